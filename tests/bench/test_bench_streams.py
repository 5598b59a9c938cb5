"""Tokens are counted and timed when their bytes come, wherever the network cuts them."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from server.bench.http import StreamSet, TokenStream, ask

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextmanager
def serving(*answers: bytes) -> Iterator[tuple[str, int]]:
    """Answers the n-th connection with the n-th answer, one byte at a time, and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    for position in range(len(answer)):
                        connection.sendall(answer[position : position + 1])

        thread = threading.Thread(target=run)
        thread.start()
        yield listener.getsockname()
        thread.join()


def read_all(*answers: bytes) -> list[TokenStream]:
    with serving(*answers) as address, StreamSet(address) as streams:
        for _ in answers:
            streams.open("/v1/completions", {"prompt": "x"}, 3)
        assert streams.read_until(lambda all_: all(one.is_over for one in all_), 20)
        return streams.streams


def test_each_event_is_a_token_wherever_it_is_cut() -> None:
    events = [b'data: {"text":"data: %d"}\n\n' % number for number in range(5)]
    answer = HEAD + b"".join(map(chunk, events)) + chunk(b": ping\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    whole, other = read_all(answer, answer)
    assert len(whole.arrivals) == len(other.arrivals) == 5
    assert (whole.is_complete, whole.error) == (True, "")
    assert whole.arrivals == sorted(whole.arrivals)


def test_a_stream_that_breaks_or_fails_has_an_error() -> None:
    token = chunk(b'data: {"text":"a"}\n\n')
    broken, failed, refused = read_all(
        HEAD + token,
        HEAD + token + chunk(b'data: {"error":{"message":"gone"}}\n\n'),
        b'HTTP/1.1 503 no\r\ncontent-length: 16\r\n\r\n{"error":"later"}',
    )
    assert [len(stream.arrivals) for stream in (broken, failed, refused)] == [1, 1, 0]
    assert broken.error == "the connection was lost"
    assert "gone" in failed.error
    assert "later" in refused.error


def test_the_pause_is_the_longest_silence_that_ended_after_the_moment() -> None:
    with socket.socket() as sock:
        stream = TokenStream(sock, 1, arrivals=[0.0, 5.0, 5.5, 7.5, 7.6])
    assert stream.pause_after(5.2) == 2.0
    assert stream.pause_after(1.0) == 5.0
    assert stream.pause_after(9.0) == 0.0


def test_a_port_without_a_server_gives_no_answer() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert ask(sock.getsockname(), "GET", "/health") is None
