"""Connections of clients that stall: bounded in memory and in time, while those of others go on."""

import select
import socket

import pytest

from server.launch.web_worker import bound_stalled_clients


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def connect(listener):
    client = socket.create_connection(listener.getsockname())
    served, _ = listener.accept()
    served.setblocking(False)
    return client, served


def fill(served):
    """Send until nothing more fits; returns how much did."""
    num_bytes = 0
    try:
        while True:
            num_bytes += served.send(b"x" * 4096)
    except BlockingIOError:
        return num_bytes


def test_a_client_that_reads_nothing_is_dropped_after_the_limit(listener):
    bound_stalled_clients(listener, stall_limit_s=0.2)
    client, served = connect(listener)
    with client, served:
        fill(served)
        poll = select.poll()
        poll.register(served, select.POLLERR)
        assert poll.poll(20_000), "never dropped"
        with pytest.raises(TimeoutError):
            served.send(b"x")


def test_a_client_that_reads_slowly_keeps_its_connection(listener):
    bound_stalled_clients(listener, stall_limit_s=5)
    client, served = connect(listener)
    with client, served:
        num_bytes = fill(served)
        while num_bytes:
            num_bytes -= len(client.recv(min(num_bytes, 1 << 20)))
        served.send(b"y")
        assert client.recv(1) == b"y"


def test_what_waits_for_a_stalled_client_is_bounded(listener):
    bound_stalled_clients(listener)
    client, served = connect(listener)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with client, served:
        assert served.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 1 << 20
        fill(served)


def test_unix_sockets_are_left_as_they_are(tmp_path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        bound_stalled_clients(sock)
