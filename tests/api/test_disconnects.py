"""A client that leaves frees its request, wherever it was and however it left."""

import json
import socket
import struct

import pytest

from tests.api.service import MAX_MODEL_LEN, ApiService, wait_until

ROUTES = [
    ("/generate", {"inputs": "abc"}),
    ("/generate_stream", {"inputs": "abc"}),
    ("/", {"inputs": "abc", "stream": True}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": MAX_MODEL_LEN}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": MAX_MODEL_LEN, "stream": True}),
    ("/v1/completions", {"prompt": ["abc", "xy"], "max_tokens": MAX_MODEL_LEN, "stream": True}),
]


def send_raw(service, path, body):
    content = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", service.port), timeout=10)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    sock.sendall(head.encode() + content)
    return sock


def leave_by_close(sock):
    sock.close()


def leave_by_reset(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def leave_by_half_close(sock):
    sock.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="module")
def gated(tmp_path_factory):
    with ApiService(tmp_path_factory.mktemp("g"), gated=True) as service:
        yield service


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("leave", [leave_by_close, leave_by_reset, leave_by_half_close])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_leaving_aborts_the_request_within_a_step(gated, path, body, leave, num_steps):
    num_requests = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    num_aborted = gated.metric("requests_aborted_total")
    sock = send_raw(gated, path, body)
    gated.permit(num_steps)
    gated.wait_at_gate()
    leave(sock)
    wait_until(lambda: gated.metric("requests_aborted_total") == num_aborted + num_requests)
    gated.permit(2)  # the step at the gate, and one that may have been planned before the abort was read
    gated.check_idle()
    sock.close()
    gated.drop_permits()


def test_many_leave_at_once_and_nothing_stays(service):
    socks = [send_raw(service, *ROUTES[index % len(ROUTES)]) for index in range(60)]
    for index, sock in enumerate(socks):
        (leave_by_close, leave_by_reset)[index % 2](sock)
    service.check_idle()


def test_client_that_reads_to_the_end_is_not_counted_as_gone(start_service):
    service = start_service()
    for path, body in ROUTES:
        assert service.post(path, body).status_code == 200
    assert service.metric("requests_aborted_total") == 0


def test_leaving_writes_no_stack_trace(service, caplog):
    for path, body in ROUTES:
        send_raw(service, path, body).close()
    service.check_idle()
    assert not [record for record in caplog.records if record.exc_info]
