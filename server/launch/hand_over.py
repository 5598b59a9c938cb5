"""How the descriptor of a memory gets from its maker to everybody else, whoever has died since.

The maker sends it once, and nobody takes the message out of the socket: each process that inherits the receiving end
looks at it (MSG_PEEK) and gets a descriptor of its own. The socket keeps the memory alive while any process has it.
So the loader hands over the weights, and the first model worker the KV pool: a process that does not own its memory is
gone 0.1 s sooner after a SIGKILL.
"""

import array
import socket

_MESSAGE = b"w"


def send_memory(sock: socket.socket, fd: int) -> None:
    """The maker's part; afterwards it may close both."""
    socket.send_fds(sock, [_MESSAGE], [fd])


class HandOver:
    """The receiving end. Made by the master before any fork."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def create(cls) -> "tuple[HandOver, socket.socket]":
        """The receiving end, and the one for the maker."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def copy_memory(self) -> int | None:
        """A descriptor of the memory, the caller's to close; None if none was sent (yet)."""
        fds = array.array("i")
        flags = socket.MSG_PEEK | socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            _, messages, _, _ = self._sock.recvmsg(len(_MESSAGE), socket.CMSG_LEN(fds.itemsize), flags)
        except (BlockingIOError, ConnectionResetError):
            return None
        for _, _, data in messages:
            fds.frombytes(data[: fds.itemsize])
        return fds[0] if fds else None

    def close(self) -> None:
        """In a process that has no use for the memory."""
        self._sock.close()
