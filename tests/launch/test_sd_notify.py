import os
import socket
from pathlib import Path

import pytest

from server.launch.sd_notify import Notifier


def test_messages_reach_the_socket_and_gunicorn_no_longer_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "s"))
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "s"))
        notifier = Notifier()
        assert "NOTIFY_SOCKET" not in os.environ
        notifier.status("loading 10 %")
        notifier.status("loading 10 %")
        notifier.ready("ready after 1 s")
        notifier.stopping()
        assert [systemd.recv(999) for _ in range(3)] == [
            b"STATUS=loading 10 %",
            b"READY=1\nSTATUS=ready after 1 s",
            b"STOPPING=1",
        ]


def test_an_abstract_address_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind("\0model-server-test-" + str(os.getpid()))
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@model-server-test-" + str(os.getpid()))
        Notifier().stopping()
        assert systemd.recv(99) == b"STOPPING=1"


def test_without_systemd_nothing_happens_and_a_dead_one_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Notifier().stopping()
    assert not caplog.records
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    Notifier().ready("ready")
    assert "systemd was not told" in caplog.text
