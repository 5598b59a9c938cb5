"""What one web worker costs a token: the real app under uvicorn, between an engine that only speaks and a light client.

The engine sends one message a step with a token for each stream, as the real one does. Its logprobs are the times at
which they were sent, so that the client sees how long a token took to arrive (native route, streamed). Run it by
`scripts/profile-web`.
"""

import argparse
import asyncio
import cProfile
import http.client
import json
import os
import pstats
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn

from server.api.app import create_app
from server.engine.messages import PROTOCOL_VERSION, Hello, Outputs, Submit, TokenOutput, encode_frame, take_frames
from server.launch.board import Board, ModelState
from server.launch.garbage import resume_collector
from server.launch.web_worker import WebWorker
from server.settings.load import load_settings
from server.settings.machine import Machine
from server.settings.resolve import resolve
from server.weights.index import Checkpoint
from tests.api.service import FACTS
from tests.tiny_tokenizer import write_tiny_tokenizer

PROMPT = "x" * 128
LONG_PROMPT = "all work and no play makes a dull boy, " * 50_000  # 2 MB
WARM_UP_S = 1.0
SHARES = {"P50": 0.5, "P95": 0.95, "P99": 0.99, "max": 1.0}


def main() -> None:
    """Start engine and worker, load them, print what was measured."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="web") as name, socket.socket(socket.AF_UNIX) as listener:
        folder, board = Path(name), Board.create()
        board.started_at = board.ready_at = time.monotonic()
        board.model_state, board.max_model_len = ModelState.READY, 1 << 20
        listener.bind(str(folder / "engine.sock"))
        listener.listen(8)
        http_socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port = http_socket.getsockname()[1]
        with (
            child(lambda: run_engine(listener, board, options.step_ms / 1e3)),
            child(lambda: run_worker(folder, board, http_socket, options.profile)) as worker_pid,
        ):
            wait_until_served(port)
            measure(options, worker_pid, port)


def parse_arguments() -> argparse.Namespace:
    """Load and what to print."""
    parser = argparse.ArgumentParser("scripts/profile-web", description=__doc__.split("\n\n")[0])
    parser.add_argument("--streams", type=int, default=25, help="of this worker (default 25: 100 users, 4 workers)")
    parser.add_argument("--step-ms", type=float, default=6.6, help="time between two tokens of a stream")
    parser.add_argument("--tokens", type=int, default=128, help="of one request")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--route", choices=("native", "completions"), default="native")
    parser.add_argument("--whole", action="store_true", help="answers that are not streamed")
    parser.add_argument("--long-prompts", action="store_true", help="beside the streams 2 MB prompts keep coming")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="print so many lines of cProfile's")
    return parser.parse_args()


@contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """`work` in a forked process that is ended with the block."""
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            sys.stdout.flush()
            os._exit(0)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


# the engine


def run_engine(listener: socket.socket, board: Board, step_s: float) -> None:
    """Serve one web worker for ever: every step one token for each request that runs."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    peer, _ = listener.accept()
    peer.sendall(encode_frame(Hello(PROTOCOL_VERSION, os.getpid())))
    inbox, num_left, step = bytearray(), dict[int, int](), 0
    next_step = time.monotonic()
    while True:
        next_step = max(next_step + step_s, time.monotonic())
        time.sleep(max(0.0, next_step - time.monotonic()))
        with suppress(BlockingIOError):
            inbox += peer.recv(1 << 20, socket.MSG_DONTWAIT)
        for message in take_frames(inbox):
            if isinstance(message, Submit):
                num_left[message.request_id] = message.sampling.max_tokens
            else:
                num_left.pop(message.request_id, None)
        board.engine_beat = now = time.monotonic()
        step += 1
        token_id = ord("a") + step % 26
        items = [TokenOutput(key, token_id, now, "length" if count == 1 else None) for key, count in num_left.items()]
        num_left = {key: count - 1 for key, count in num_left.items() if count > 1}
        if items:
            peer.sendall(encode_frame(Outputs(step, items)))


# the web worker


class _Server(uvicorn.Server):
    """Notes every 2 ms how long the loop's thread works until it serves a timer that is due.

    In the thread's own time, so that it says what an event would wait for on a machine that nobody shares.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.waits_s: list[float] = []
        self._begin = 0.0
        self._sample()

    def _sample(self) -> None:
        if self._begin:
            self.waits_s.append(time.thread_time() - self._begin)
        self._begin = time.thread_time()
        asyncio.get_running_loop().call_later(0.002, self._sample)


def run_worker(folder: Path, board: Board, http_socket: socket.socket, num_profile_lines: int) -> None:
    """One uvicorn as in production, until SIGTERM; then its profile, if one is wanted."""
    write_tiny_tokenizer(folder / "model", 320)
    wishes = {"server.runtime_dir": str(folder), "model.path": "org/scripted", "engine.watchdog_s": 0}
    wishes |= {"engine.max_num_requests": 1000, "engine.max_batched_tokens": 1000, "engine.max_waiting_tokens": 10**7}
    settings = load_settings("test", {}, wishes)
    resolved = resolve(settings, FACTS, Machine(1, 1 << 34, 0, None, True))
    checkpoint = Checkpoint(folder / "model", FACTS, {}, {})
    app = create_app(settings, resolved, checkpoint, board, str(folder / "engine.sock"))
    resume_collector()
    server = _Server(uvicorn.Config(app, log_config=None, **WebWorker.CONFIG_KWARGS))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # uvicorn handles it, and raises it again at its end
    if not num_profile_lines:
        server.run(sockets=[http_socket])
        print(f"the event loop was busy before it served an event, of its own time: {percentiles(server.waits_s)}")
        return
    with cProfile.Profile() as profile:
        server.run(sockets=[http_socket])
    pstats.Stats(profile).sort_stats("tottime").print_stats(num_profile_lines)


# the clients


class Connection:
    """Sends its request again whenever it has been answered; counts, and parses as little as it can."""

    def __init__(self, port: int, request: bytes, end_mark: bytes) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self._request = request
        self._end_mark = end_mark
        self._tail = b""
        self.forget()

    def forget(self) -> None:
        """Count from here."""
        self.num_events = self.num_requests = self.num_reads = 0
        self.latencies_s: list[float] = []

    def begin(self) -> None:
        """Send the request."""
        self._tail = b""
        self.sock.sendall(self._request)

    def read(self) -> None:
        """Read what is there."""
        data = self.sock.recv(1 << 18)
        now = time.monotonic()
        assert data, "the server closed the connection"
        self.num_reads += 1
        self.num_events += data.count(b"data: ")
        _, found, behind = data.rpartition(b'"logprob":')
        if found and not behind.startswith(b"null"):
            self.latencies_s.append(now - float(behind[: behind.index(b",")]))
        self._tail = (self._tail + data)[-64:]
        if self._end_mark in self._tail:
            self.num_requests += 1
            self.begin()


class Probe(threading.Thread):
    """The same request again and again on one connection, with a pause between."""

    def __init__(self, port: int, pause_s: float, method: str, path: str, body: str | None = None) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._pause_s = pause_s
        self._arguments = (method, path, body, {"content-type": "application/json"})
        self._stopped = threading.Event()
        self.latencies_s: list[float] = []

    def run(self) -> None:
        """Until `stop`."""
        while not self._stopped.wait(self._pause_s):
            begin = time.monotonic()
            self._connection.request(*self._arguments)
            response = self._connection.getresponse()
            response.read()
            assert response.status == 200, response.status
            self.latencies_s.append(time.monotonic() - begin)

    def stop(self) -> None:
        """Waits for the answer that is due."""
        self._stopped.set()
        self.join()


def request_of(options: argparse.Namespace) -> bytes:
    """What each connection sends."""
    if options.route == "native":
        path = "/generate" if options.whole else "/generate_stream"
        body: dict[str, object] = {"inputs": PROMPT, "parameters": {"max_new_tokens": options.tokens}}
    else:
        path = "/v1/completions"
        body = {"prompt": PROMPT, "max_tokens": options.tokens, "stream": not options.whole}
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return f"{head}\r\n\r\n".encode() + content


def measure(options: argparse.Namespace, worker_pid: int, port: int) -> None:
    """Load the worker and print."""
    end_mark = b"}" if options.whole else b"\r\n0\r\n\r\n"
    connections = [Connection(port, request_of(options), end_mark) for _ in range(options.streams)]
    probes = {"GET /health": Probe(port, 0.01, "GET", "/health")}
    if options.long_prompts:
        body = json.dumps({"inputs": LONG_PROMPT, "parameters": {"max_new_tokens": 1, "truncate": 100}})
        probes["2 MB prompts"] = Probe(port, 0.02, "POST", "/generate", body)
    selector = selectors.DefaultSelector()
    for connection in connections:
        selector.register(connection.sock, selectors.EVENT_READ, connection)
        connection.begin()
    for probe in probes.values():
        probe.start()
    read_for(WARM_UP_S, selector)
    for counter in connections:
        counter.forget()
    begin, cpu_begin = time.monotonic(), cpu_s(worker_pid)
    read_for(options.seconds, selector)
    wall_s, used_s = time.monotonic() - begin, cpu_s(worker_pid) - cpu_begin
    for probe in probes.values():
        probe.stop()
    print_figures(options, connections, wall_s, used_s)
    for name, probe in probes.items():
        print(f"{name}: {percentiles(probe.latencies_s)}")
    for connection in connections:
        connection.sock.close()


def print_figures(options: argparse.Namespace, connections: list[Connection], wall_s: float, used_s: float) -> None:
    """What the streams saw."""
    num_requests = sum(connection.num_requests for connection in connections)
    num_events = sum(connection.num_events for connection in connections)
    num_reads = sum(connection.num_reads for connection in connections)
    num_tokens = num_requests * options.tokens if options.whole else num_events
    rates = {"tokens": num_tokens, "requests": num_requests, "reads": num_reads}
    print(", ".join(f"{count / wall_s:.1f} {name}/s" for name, count in rates.items()))
    print(f"worker: {used_s / wall_s:.1%} of a core, {used_s / max(1, num_tokens) * 1e6:.1f} us a token")
    latencies_s = [latency for connection in connections for latency in connection.latencies_s]
    if latencies_s:
        print(f"engine to client: {percentiles(latencies_s)}")


def read_for(duration_s: float, selector: selectors.BaseSelector) -> None:
    """Read whatever comes."""
    deadline = time.monotonic() + duration_s
    while time.monotonic() < deadline:
        for key, _ in selector.select(0.1):
            key.data.read()


def percentiles(values_s: list[float]) -> str:
    """In words."""
    values_s = sorted(values_s)
    if not values_s:
        return "none"
    at = {name: values_s[min(len(values_s) - 1, int(len(values_s) * share))] for name, share in SHARES.items()}
    return ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in at.items()) + f" of {len(values_s)}"


def cpu_s(pid: int) -> float:
    """User and system time of all its threads that live."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def wait_until_served(port: int) -> None:
    """Until the worker answers; the listener holds us meanwhile."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/health")
    connection.getresponse().read()


if __name__ == "__main__":
    main()
