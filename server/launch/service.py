"""What every role of one running service shares, made by the master before any fork and inherited.

A module-level value, because Gunicorn calls hooks and worker classes by name, with no place to pass it.
"""

import socket
from dataclasses import dataclass

from gunicorn.sock import TCPSocket

from server.launch.board import Board
from server.launch.hand_over import HandOver
from server.launch.runtime_dir import RuntimeDir
from server.settings.resolve import ResolvedConfig
from server.settings.schema import Settings
from server.weights.index import Checkpoint
from server.weights.layout import WeightLayout
from server.weights.plan import LoadPlan
from server.weights.record import LoadRecord


@dataclass(frozen=True, slots=True)
class Service:
    """`hand_over` gives the memory that the loader fills by `load_plan`, `pool_hand_over` the KV pool that the first
    model worker makes on a GPU and sends by `pool_sender`. Model workers accept on `engine_listener`, web workers on
    `http_listeners` (Arbiter.LISTENERS of the class is empty)."""

    settings: Settings
    resolved: ResolvedConfig
    checkpoint: Checkpoint
    layout: WeightLayout
    board: Board
    engine_listener: socket.socket
    http_listeners: tuple[TCPSocket, ...]
    folder: RuntimeDir
    load_plan: LoadPlan
    load_record: LoadRecord
    hand_over: HandOver
    pool_hand_over: HandOver
    pool_sender: socket.socket

    def close_in_web_worker(self) -> None:
        """It only connects, and has no use for memory of a device."""
        self.engine_listener.close()
        self.hand_over.close()
        self.pool_hand_over.close()
        self.pool_sender.close()


_current: Service | None = None


def publish_service(service: Service) -> None:
    """Master only, once, before the first long-lived fork."""
    global _current
    assert _current is None, "a process belongs to one service"
    _current = service


def current_service() -> Service:
    """The service that this process belongs to."""
    assert _current is not None, "no service has been started in this process or its parents"
    return _current
