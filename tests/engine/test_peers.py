"""The engine's sockets: what arrives, what a slow or broken web worker costs, and whom."""

import socket

import pytest

from server.engine.messages import Abort, Hello, Outputs, SamplingParams, Submit, TokenOutput, encode_frame, take_frames
from server.engine.peers import MAX_OUTBOX_BYTES, Peers


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "engine.sock"))
        sock.listen(8)
        yield sock


@pytest.fixture
def peers(listener):
    peers = Peers(listener, pid=7)
    yield peers
    peers.close()


@pytest.fixture
def connect(listener, peers):
    clients = []

    def connect():
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(5)
        client.connect(listener.getsockname())
        clients.append(client)
        before = len(peers)
        while len(peers) == before:
            assert list(peers.poll(1)) == []
        return client

    yield connect
    for client in clients:
        client.close()


def submit(request_id):
    return Submit(request_id, [1, 2, 3], 3, SamplingParams(max_tokens=4))


def test_a_new_peer_is_greeted_first(peers, connect):
    client = connect()
    peers.flush()
    assert take_frames(bytearray(client.recv(1000))) == [Hello(1, 7)]


def test_messages_come_with_their_peer(peers, connect):
    first, second = connect(), connect()
    first.sendall(encode_frame(submit(1)) + encode_frame(Abort(1)))
    second.sendall(encode_frame(submit(2)))
    received = []
    while len(received) < 3:
        received += peers.poll(1)
    assert [message for _, message in received if isinstance(message, Abort)] == [Abort(1)]
    owners = {message.request_id: peer for peer, message in received}
    assert owners[1] is not owners[2]


def test_a_closed_connection_is_reported_once(peers, connect):
    client = connect()
    client.close()
    assert list(peers.poll(1)) == []
    assert len(peers.take_lost()) == 1
    assert peers.take_lost() == []
    assert len(peers) == 0


def test_garbage_costs_its_sender_the_connection_and_nobody_else(peers, connect):
    good, bad = connect(), connect()
    bad.sendall(b"\xff\xff\xff\xff junk")
    good.sendall(encode_frame(submit(1)))
    received = []
    while not (received and len(peers) == 1):
        received += peers.poll(1)
    assert [message for _, message in received] == [submit(1)]


def test_a_peer_that_does_not_read_is_dropped_at_the_bound(peers, connect):
    slow, _quick = connect(), connect()
    output = Outputs(1, [TokenOutput(1, 5, 0.0, None, "x" * 65536)])
    slow.sendall(encode_frame(submit(2)))
    [(slow_peer, _)] = list(peers.poll(1))
    for _ in range(MAX_OUTBOX_BYTES // 65536 + 100):
        peers.send(slow_peer, output)
        peers.flush()
    assert peers.take_lost() == [slow_peer]
    assert len(peers) == 1
