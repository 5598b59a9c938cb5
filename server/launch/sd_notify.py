"""Messages to systemd (sd_notify protocol). The master is the only sender, so NotifyAccess=main is enough."""

import logging
import os
import socket

logger = logging.getLogger(__name__)


class Notifier:
    """Takes NOTIFY_SOCKET out of the environment: Gunicorn would send READY=1 before any worker exists."""

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._last_status = ""

    def ready(self, status: str) -> None:
        """The service answers."""
        self._send(f"READY=1\nSTATUS={status}")

    def status(self, status: str) -> None:
        """A line for `systemctl status`; sent when it differs from the last one."""
        if status != self._last_status:
            self._last_status = status
            self._send(f"STATUS={status}")

    def stopping(self) -> None:
        """The stop has begun."""
        self._send("STOPPING=1")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.connect(self._address)
                sock.sendall(state.encode())
        except OSError as error:
            logger.warning("systemd was not told %r: %s", state, error)
