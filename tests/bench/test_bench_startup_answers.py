"""What a measurement needs to know of a server is an answer, or the measurement fails with the reason."""

import sys

import pytest

from server.bench.server_process import BenchFailed, ServerCommand, ServerProcess
from server.bench.startup import ask_for_json

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status, body = (200, b'[1]') if self.path == "/good" else (500, b'broken')
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("listening", flush=True)
server.serve_forever()
"""


def test_an_answer_that_is_none_fails_the_measurement_and_not_the_bench() -> None:
    with ServerProcess(ServerCommand((sys.executable, "-c", SERVER, "{port}"), is_ours=False)) as server:
        while "listening" not in str(server.failure("")):
            server.check_alive()
        assert ask_for_json(server, "GET", "/good") == [1]
        with pytest.raises(BenchFailed, match="GET /bad was answered with 500: b'broken'"):
            ask_for_json(server, "GET", "/bad")
        with pytest.raises(BenchFailed, match="DELETE /good was answered with 501"):
            ask_for_json(server, "DELETE", "/good")


def test_a_server_that_does_not_listen_has_said_nothing() -> None:
    command = ServerCommand((sys.executable, "-c", "import time; time.sleep(600)"), is_ours=False)
    with ServerProcess(command) as server, pytest.raises(BenchFailed, match="GET /info was answered with nothing"):
        ask_for_json(server, "GET", "/info")
