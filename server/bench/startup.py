"""`model-server bench startup`: starts, kills and first requests, all measured from outside at a client's sockets.

Each measurement yields Runs; what they mean and how they are shown is server.bench.report's matter.
"""

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from server.bench.http import Address, Answer, StreamSet, TokenStream, ask
from server.bench.page_cache import evict, read_files, resident_share
from server.bench.server_process import BenchFailed, ServerCommand, ServerProcess, path_without_compilers

KINDS = ("warm", "cold", "first-ever", "kill", "kill-many", "kill-arbiter", "requests")
POLL_S = 0.002
NUM_STREAMS = 100
NUM_PROMPT_TOKENS = 128
NUM_STREAM_TOKENS = 512
NUM_REQUESTS = 100
_TOKENS_BEFORE_KILL = 48
_TOKENS_BEFORE_KILL_OF_MANY = 16
_SETTLE_S = 1.5  # a model worker that dies within a second of its start waits a little before the next
_DISK_PROBE_BYTES = 4 << 30
_WARM_SHARE = 0.999
_COLD_SHARE = 0.01
_CACHE_VARIABLES = (
    "XDG_CACHE_HOME",
    "TRITON_HOME",
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "NUMBA_CACHE_DIR",
)
_SAMPLE_TEXT = (
    "When the ship came round the point the wind fell, and the men stood at the rail and looked at the long grey "
    "shore, at the houses under the hill and the smoke that went straight up from them, and nobody said a word. "
)


class Run(msgspec.Struct, frozen=True):
    """One measurement. `values` are seconds, but for "times_..."; `startup` is what /startup said after it."""

    kind: str
    values: dict[str, float]
    notes: dict[str, Any] = {}
    startup: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `files`: what is put into or out of the page cache. `body`: of the request that ends a start."""

    command: ServerCommand
    files: tuple[Path, ...]
    path: str
    body: Mapping[str, Any]
    num_runs: int = 5
    num_streams: int = NUM_STREAMS
    limit_s: float = 600.0


def measure(plan: Plan, kind: str) -> Iterator[Run]:
    """The runs of one kind, as they are done. Raises BenchFailed."""
    if kind == "warm":
        yield from (_start(plan, "warm", _make_warm(plan)) for _ in range(plan.num_runs))
    elif kind == "cold":
        yield from _cold_starts(plan)
    elif kind == "first-ever":
        yield from (_first_ever(plan) for _ in range(plan.num_runs))
    elif kind == "requests":
        yield from (_first_requests(plan) for _ in range(plan.num_runs))
    else:
        yield from _kills(plan, kind)


def _make_warm(plan: Plan) -> dict[str, Any]:
    if resident_share(plan.files) < _WARM_SHARE:
        read_files(plan.files)
    share = resident_share(plan.files)
    if share < _WARM_SHARE:
        raise BenchFailed(f"only {share:.1%} of the model stays in the page cache: there is not enough memory for it")
    return {"resident_before": round(share, 4)}


def _cold_starts(plan: Plan) -> Iterator[Run]:
    """Each followed by a start that must find everything in the page cache."""
    num_bytes = sum(path.stat().st_size for path in plan.files)
    for _ in range(plan.num_runs):
        _make_cold(plan)
        disk_rate = read_files(plan.files, _DISK_PROBE_BYTES)
        notes = {"resident_before": round(_make_cold(plan), 4), "disk_bytes_per_s": round(disk_rate)}
        run = _start(plan, "cold", notes)
        floor_s = num_bytes / disk_rate
        run.values.update(disk_floor=floor_s, times_floor=run.values["answer"] / floor_s)
        yield run
        share = resident_share(plan.files)
        yield _start(plan, "warm after cold", {"resident_before": round(share, 4)})


def _make_cold(plan: Plan) -> float:
    evict(plan.files)
    share = resident_share(plan.files)
    if share > _COLD_SHARE:
        raise BenchFailed(f"{share:.1%} of the model stays in memory: this file system cannot be cold, or it is in use")
    return share


def _first_ever(plan: Plan) -> Run:
    """Empty cache folders, and no compiler to be found."""
    with tempfile.TemporaryDirectory(prefix="msc-") as folder:
        caches = Path(folder) / "caches"
        variables = {name: str(caches / name.lower()) for name in _CACHE_VARIABLES}
        for value in variables.values():
            Path(value).mkdir(parents=True)
        variables |= {"PATH": path_without_compilers(os.environ.get("PATH", ""), Path(folder) / "path")}
        variables |= {"CC": "", "CXX": "", "CUDA_HOME": ""}
        if "HF_HOME" not in os.environ and "HF_HUB_CACHE" not in os.environ:  # a model is no cache of ours
            variables["HF_HOME"] = str(
                Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
            )
        command = plan.command.with_environ(variables)
        run = _start(plan, "first-ever", _make_warm(plan), command)
        cached = sum(path.stat().st_size for path in caches.rglob("*") if path.is_file())
        return msgspec.structs.replace(run, notes=run.notes | {"cache_bytes_after": cached})


def _start(plan: Plan, kind: str, notes: dict[str, Any], command: ServerCommand | None = None) -> Run:
    """From just before exec to the whole body of a generated answer; /health is watched beside it."""
    with ServerProcess(command or plan.command) as server:
        health = _HealthWatcher(server.address, server.started_at)
        health.start()
        try:
            answer = _first_answer(plan, server)
        finally:
            health.stop()
        startup = _startup_of(plan, server.address)
    values = {"answer": answer.received_at - server.started_at, **health.values}
    if startup and startup["ready_s"]:
        values["own_ready"] = startup["ready_s"]
    return Run(kind, values, notes | health.notes, startup)


def _first_answer(plan: Plan, server: ServerProcess) -> Answer:
    deadline = server.started_at + plan.limit_s
    while time.monotonic() < deadline:
        server.check_alive()
        answer = ask(server.address, "POST", plan.path, dict(plan.body), timeout_s=plan.limit_s)
        if answer is not None and answer.status == 200:
            return answer
        if answer is not None and answer.status in (400, 404, 405, 422):
            raise server.failure(f"POST {plan.path} was refused with {answer.status}: {answer.body[:300]!r}")
        time.sleep(POLL_S)
    raise server.failure(f"no answer within {plan.limit_s:.0f} s")


class _HealthWatcher(threading.Thread):
    """When /health first answered anything, and when 200."""

    def __init__(self, address: Address, started_at: float) -> None:
        super().__init__(name="health", daemon=True)
        self._address = address
        self._started_at = started_at
        self._is_enough = threading.Event()
        self.values: dict[str, float] = {}
        self.notes: dict[str, Any] = {}

    def run(self) -> None:
        while not self._is_enough.is_set():
            answer = ask(self._address, "GET", "/health", timeout_s=10)
            if answer is not None:
                if not self.values:
                    self.notes["first_health_status"] = answer.status
                    self.values["first_health"] = answer.received_at - self._started_at
                if answer.status == 200:
                    self.values["health_200"] = answer.received_at - self._started_at
                    return
            self._is_enough.wait(POLL_S)

    def stop(self) -> None:
        """After the answer; a server whose /health is not 200 by then (or that has none) has no such time."""
        self.join(0.5)
        self._is_enough.set()
        self.join()


def _startup_of(plan: Plan, address: Address) -> dict[str, Any] | None:
    answer = ask(address, "GET", "/startup") if plan.command.is_ours else None
    if answer is None or answer.status != 200:
        return None
    view: dict[str, Any] = msgspec.json.decode(answer.body)
    return view


def ask_for_json(server: ServerProcess, method: str, path: str, body: object = None) -> Any:
    """What a ready server answers with status 200. Raises BenchFailed."""
    answer = ask(server.address, method, path, body)
    if answer is None or answer.status != 200:
        said = "nothing" if answer is None else f"{answer.status}: {answer.body[:300]!r}"
        raise server.failure(f"{method} {path} was answered with {said}")
    return msgspec.json.decode(answer.body)


class _Prompts:
    """Prompts of any number of tokens, no two alike, so that no prefix is found again."""

    def __init__(self, server: ServerProcess) -> None:
        tokens = ask_for_json(server, "POST", "/tokenize", {"inputs": _SAMPLE_TEXT})
        self._ids = [token["id"] for token in tokens]
        self.max_total_tokens = int(ask_for_json(server, "GET", "/info")["max_total_tokens"])
        self._random = random.Random(0)  # noqa: S311 (the same prompts in every run)

    def next(self, num_tokens: int) -> list[int]:
        """The next one, as token ids."""
        return self._random.choices(self._ids, k=num_tokens)

    def body(self, num_prompt_tokens: int, num_tokens: int) -> dict[str, Any]:
        """A request that generates exactly `num_tokens`."""
        wishes = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        return {"prompt": self.next(num_prompt_tokens), **wishes}


def _first_requests(plan: Plan) -> Run:
    """The first generation after ready against the hundredth: 128 tokens in, 16 out, one after the other."""
    notes = _make_warm(plan)
    with ServerProcess(plan.command) as server:
        server.wait_ready(plan.limit_s)
        prompts = _Prompts(server)
        times = []
        for _ in range(NUM_REQUESTS):
            begin = time.monotonic()
            answer = ask(server.address, "POST", "/v1/completions", prompts.body(NUM_PROMPT_TOKENS, 16))
            if answer is None or answer.status != 200:
                raise server.failure(f"a request failed: {answer}")
            times.append(answer.received_at - begin)
    values = {"first": times[0], "hundredth": times[-1], "median": sorted(times)[NUM_REQUESTS // 2]}
    return Run("requests", values | {"difference": times[0] - times[-1]}, notes)


def _kills(plan: Plan, kind: str) -> Iterator[Run]:
    """One server for all runs: each kill waits until the replacement has settled."""
    role = "arbiter" if kind == "kill-arbiter" else "model"
    num_streams = plan.num_streams if kind == "kill-many" else 1
    with ServerProcess(plan.command) as server:
        server.wait_ready(plan.limit_s)
        prompts = _Prompts(server)
        for _ in range(plan.num_runs):
            time.sleep(_SETTLE_S)
            yield _kill(plan, kind, server, prompts, role, num_streams)


def _kill(plan: Plan, kind: str, server: ServerProcess, prompts: _Prompts, role: str, num_streams: int) -> Run:
    num_prompt_tokens = min(NUM_PROMPT_TOKENS, prompts.max_total_tokens // 4)
    num_tokens = min(NUM_STREAM_TOKENS, prompts.max_total_tokens - num_prompt_tokens)
    pids = ask_for_json(server, "GET", "/startup")["pids"]
    enough = min(num_tokens // 2, _TOKENS_BEFORE_KILL if num_streams == 1 else _TOKENS_BEFORE_KILL_OF_MANY)
    with StreamSet(server.address) as streams:
        for _ in range(num_streams):
            body = prompts.body(num_prompt_tokens, num_tokens) | {"stream": True}
            streams.open("/v1/completions", body, num_prompt_tokens)
        if not streams.read_until(lambda all_: all(len(one.arrivals) >= enough for one in all_), plan.limit_s):
            raise server.failure(f"{num_streams} streams did not get {enough} tokens each")
        os.kill(pids[role], signal.SIGKILL)
        killed_at = time.monotonic()
        known_tokens = sum(one.num_prompt_tokens + len(one.arrivals) for one in streams.streams)
        running = [one for one in streams.streams if not one.is_complete]
        if not streams.read_until(lambda all_: all(one.is_over for one in all_), plan.limit_s):
            raise server.failure("streams hang after the kill")
        _check_whole(server, streams.streams, num_tokens)
        pauses = [one.pause_after(killed_at) for one in running]
    after = _startup_of(plan, server.address)
    values = {"pause": pauses[0]} if num_streams == 1 else {"first_pause": min(pauses), "last_pause": max(pauses)}
    if after and (down_s := after["restarts"]["model"]["down_s"]):
        values["own_down"] = down_s
    notes = {"known_tokens": known_tokens, "num_streams": num_streams, "num_running_at_kill": len(running)}
    return Run(kind, values, notes, after)


def _check_whole(server: ServerProcess, streams: Sequence[TokenStream], num_tokens: int) -> None:
    """No stream may have lost or gained a token."""
    for stream in streams:
        if stream.error or len(stream.arrivals) != num_tokens:
            raise server.failure(
                f"a stream got {len(stream.arrivals)} tokens of {num_tokens}: {stream.error or 'it ended in order'}"
            )
