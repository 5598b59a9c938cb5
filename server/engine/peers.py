"""The engine's side of its sockets: which web workers are connected, what they asked, what waits to be sent.

Knows frames and file descriptors. Does not know what a request is beyond its id.
"""

import logging
import selectors
import socket
from collections.abc import Iterator
from typing import cast

from server.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Hello,
    Message,
    ProtocolError,
    Submit,
    encode_frame,
    take_frames,
)

logger = logging.getLogger(__name__)

MAX_OUTBOX_BYTES = 4 << 20
_RECEIVE_BYTES = 1 << 20


class Peer:
    """One connected web worker."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.request_ids: set[int] = set()


class Peers:
    """All connections over one listener. Nothing here blocks except `poll` with its timeout."""

    def __init__(self, listener: socket.socket, pid: int) -> None:
        self._listener = listener
        self._pid = pid
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, Peer] = {}
        self._lost: list[Peer] = []
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __len__(self) -> int:
        return len(self._peers)

    def poll(self, timeout_s: float) -> Iterator[tuple[Peer, Submit | Abort]]:
        """Messages that arrived, waiting up to `timeout_s` for one. A peer that breaks the protocol is dropped."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._accept()
                continue
            peer = self._peers.get(cast(socket.socket, key.fileobj))
            if peer is not None:
                for message in self._receive(peer):
                    if isinstance(message, Submit | Abort):
                        yield peer, message

    def send(self, peer: Peer, message: Message) -> None:
        """Queue one frame; `flush` sends it."""
        peer.outbox += encode_frame(message)

    def flush(self) -> None:
        """Send what the sockets take. A peer that lets more than MAX_OUTBOX_BYTES pile up is dropped."""
        for peer in list(self._peers.values()):
            if not peer.outbox:
                continue
            try:
                del peer.outbox[: peer.sock.send(peer.outbox)]
            except BlockingIOError:
                pass
            except OSError:
                self._drop(peer)
                continue
            if len(peer.outbox) > MAX_OUTBOX_BYTES:
                logger.warning("a web worker reads too slowly: %d bytes wait, connection closed", len(peer.outbox))
                self._drop(peer)

    def take_lost(self) -> list[Peer]:
        """Peers dropped since the last call; their requests must be aborted."""
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Close every connection; the listener stays, it is the service's."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # gone before we came
            return
        sock.setblocking(False)
        peer = Peer(sock)
        self._peers[sock] = peer
        self._selector.register(sock, selectors.EVENT_READ)
        self.send(peer, Hello(PROTOCOL_VERSION, self._pid))

    def _receive(self, peer: Peer) -> list[Message]:
        try:
            data = peer.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return []
        peer.inbox += data
        try:
            return list(take_frames(peer.inbox))
        except ProtocolError as error:
            logger.error("closing the connection of a web worker: %s", error)
            self._drop(peer)
            return []

    def _drop(self, peer: Peer) -> None:
        if self._peers.pop(peer.sock, None) is None:
            return
        self._selector.unregister(peer.sock)
        peer.sock.close()
        self._lost.append(peer)
