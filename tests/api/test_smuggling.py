"""A body whose length can be read in two ways is refused and its connection closed: one request at most is seen."""

import re
import socket

import pytest

BODY = b'{"inputs":"a","parameters":{"max_new_tokens":1}}'
SECOND = b"GET /info HTTP/1.1\r\nHost: x\r\n\r\n"


def answers_to(service, head_lines, rest, version=b"1.1"):
    """The status lines of everything that comes back until the server closes or falls silent."""
    head = b"\r\n".join([b"POST /generate HTTP/" + version, b"Host: x", b"Content-Type: application/json", *head_lines])
    received = b""
    with socket.create_connection(("127.0.0.1", service.port), timeout=2) as sock:
        sock.sendall(head + b"\r\n\r\n" + rest)
        try:
            while data := sock.recv(65536):
                received += data
            is_closed = True
        except TimeoutError:
            is_closed = False
    return re.findall(rb"HTTP/1\.1 (\d+)", received), is_closed


CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d" % len(BODY)


@pytest.mark.parametrize(
    ("head_lines", "rest"),
    [
        ([b"Content-Length: 5", b"Transfer-Encoding: chunked"], CHUNKED + SECOND),
        ([b"Transfer-Encoding: chunked", b"Content-Length: 5"], CHUNKED + SECOND),
        ([LENGTH, b"Content-Length: 5"], BODY + SECOND),
        ([b"Transfer-Encoding: chunked", b"Transfer-Encoding: identity"], CHUNKED + SECOND),
        ([b"Transfer-Encoding: chunked, identity"], CHUNKED + SECOND),
        ([b"Transfer-Encoding: xchunked"], CHUNKED + SECOND),
        ([b"Transfer-Encoding : chunked"], CHUNKED + SECOND),
        ([b"Content-Length: +5"], BODY + SECOND),
        ([b"Content-Length: 5 5"], BODY + SECOND),
        ([b"Content-Length: 0x30"], BODY + SECOND),
        ([b"Content-Length: -1"], BODY + SECOND),
        ([LENGTH, b"X: y\nContent-Length: 5"], BODY + SECOND),
    ],
)
def test_ambiguous_length_is_refused(service, head_lines, rest):
    statuses, is_closed = answers_to(service, head_lines, rest)
    assert is_closed
    assert statuses == [b"400"]


def test_chunked_body_and_a_second_request_are_two_requests(service):
    statuses, _ = answers_to(
        service,
        [b"Transfer-Encoding: chunked"],
        CHUNKED + SECOND.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
    )
    assert statuses == [b"200", b"200"]


def test_chunked_body_in_http_1_0_ends_the_connection(service):
    statuses, is_closed = answers_to(service, [b"Transfer-Encoding: chunked"], CHUNKED + SECOND, version=b"1.0")
    assert is_closed
    assert len(statuses) == 1
