"""`model-server bench load`: finds or starts the server, shows each load as it is measured, and writes it if asked."""

import random
import resource
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from server.bench.http import Address, ask
from server.bench.load import Load, LoadPlan, LoadRun, measure_load
from server.bench.load_report import compare_with_targets, format_load_report, make_load_report
from server.bench.load_requests import (
    DEFAULT_TOKEN_IDS,
    Shape,
    ordinary_token_ids,
    parse_numbers,
    parse_token_ids,
)
from server.bench.load_targets import targets_hold
from server.bench.server_process import BenchFailed, ServerCommand, ServerProcess
from server.cli.bench import EXIT_FAILED, our_command, write_report
from server.errors import StartupError

_READY_LIMIT_S = 600.0
_DEFAULT_USERS = "1,16"


@dataclass(frozen=True, slots=True)
class LoadArguments:
    """The command line; what each means stands in its help."""

    url: str
    command: str
    profile: str
    overrides: dict[str, object]
    assignments: Sequence[str]
    users: str
    rate: str
    answers: str
    start: str
    num_rounds: int
    num_requests: int
    duration_s: float
    num_repeats: int
    num_warmup_rounds: int
    num_prompt_tokens: int
    num_tokens: int
    num_shared: int
    batch: int
    token_ids: str
    disturb_tokens: int
    disturb_every_s: float
    probes_health: bool
    timeout_s: float
    seed: int | None
    json_file: Path | None


@dataclass(frozen=True, slots=True)
class _Target:
    """A server that answers. `session`: of its processes, where it was started here."""

    address: Address
    model: str
    device: str
    backend: str
    what: str
    session: int | None


def bench_load(arguments: LoadArguments) -> None:
    """Measure, print, write. Raises StartupError for arguments that make no sense; a failed request is in the report,
    and the command ends with exit code 1."""
    loads = _loads_of(arguments)
    shape = Shape(arguments.num_prompt_tokens, arguments.num_tokens, arguments.num_shared, arguments.batch)
    if arguments.json_file is not None and not arguments.json_file.parent.is_dir():
        raise StartupError(f"--json {arguments.json_file}: there is no folder {arguments.json_file.parent}")
    tested, folder = _tested(arguments)
    token_ids = _token_ids(arguments, folder)
    runs: list[LoadRun] = []
    failure = ""
    with _target(arguments, tested) as target:
        _allow_many_files()  # of the client alone: the server has its own already
        plan = _plan_of(arguments, loads, shape, token_ids, target.model)
        try:
            for run in measure_load(target.address, plan, target.session):
                runs.append(run)
                print(_progress(run), flush=True)
        except BenchFailed as error:
            failure = str(error)
        targets = compare_with_targets(runs, plan) if targets_hold(target.device, target.backend) else []
        report = make_load_report(runs, failure, _own_command(), target.device, _conditions(plan, target), targets)
    print("\n" + format_load_report(report))
    if arguments.json_file is not None:
        unwritten = write_report(arguments.json_file, msgspec.json.format(msgspec.json.encode(report), indent=1))
        if unwritten:
            raise BenchFailed(unwritten)
    if failure or any(run.num_failed for run in runs):
        sys.exit(EXIT_FAILED)


def _loads_of(arguments: LoadArguments) -> Sequence[Load]:
    """All numbers of users, then all rates, each with all kinds of answers."""
    known = {"streamed": True, "whole": False}
    kinds = [kind.strip() for kind in arguments.answers.split(",")]
    if not set(kinds) <= known.keys():
        raise StartupError(f"--answers {arguments.answers}: there are streamed and whole")
    if arguments.batch > 1 and "streamed" in kinds:
        raise StartupError(f"--batch {arguments.batch}: several prompts a request are measured with --answers whole")
    if arguments.disturb_tokens and "streamed" not in kinds:
        raise StartupError("--disturb-tokens shows in the gaps of streams: --answers streamed is needed")
    if arguments.start not in ("together", "spread"):
        raise StartupError(f"--start {arguments.start}: there are together and spread")
    users = arguments.users or ("" if arguments.rate else _DEFAULT_USERS)
    numbers = parse_numbers("--users", users, 1) if users else ()
    if any(number != int(number) for number in numbers):
        raise StartupError(f"--users {users}: whole numbers are expected")
    rates = parse_numbers("--rate", arguments.rate, 0.001) if arguments.rate else ()
    shapes = [(int(number), 0.0) for number in numbers] + [(0, rate) for rate in rates]
    return [Load(*shape, known[kind]) for shape in shapes for kind in kinds]


def _tested(arguments: LoadArguments) -> tuple[ServerCommand | None, Path | None]:
    """How to start what is measured, and the folder of its model; None: it runs already, or its model is not known."""
    own = arguments.profile or arguments.overrides or arguments.assignments
    if own and (arguments.command or arguments.url):
        raise StartupError(
            "--model, --profile and --set are for the server that is started; leave out --url, --command"
        )
    if arguments.command:
        url = arguments.url or "http://127.0.0.1:{port}"
        return ServerCommand(tuple(shlex.split(arguments.command)), url=url, is_ours=False), None
    if arguments.url:
        return None, None
    return our_command(arguments.profile, arguments.overrides, arguments.assignments)


def _token_ids(arguments: LoadArguments, folder: Path | None) -> range:
    if arguments.token_ids:
        return parse_token_ids(arguments.token_ids)
    return DEFAULT_TOKEN_IDS if folder is None else ordinary_token_ids(folder)


@contextmanager
def _target(arguments: LoadArguments, tested: ServerCommand | None) -> Iterator[_Target]:
    """The server, ready. One that was started ends with the block."""
    if tested is None:
        yield _running_target(arguments.url)
        return
    with ServerProcess(tested) as server:
        server.wait_ready(_READY_LIMIT_S)
        what = arguments.command or f"model-server, profile {arguments.profile or 'demo'}"
        yield _describe(server.address, what, server.pid)


def _running_target(url: str) -> _Target:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or 80
    except ValueError as error:  # of the port or of brackets
        raise StartupError(f"--url {url}: {error}; http://HOST:PORT is expected") from error
    if parts.scheme != "http" or not host:
        raise StartupError(f"--url {url}: http://HOST:PORT is expected")
    address = (host, port)
    if ask(address, "GET", "/health") is None:
        raise StartupError(f"--url {url}: nobody answers there")
    return _describe(address, url, None)


def _describe(address: Address, what: str, session: int | None) -> _Target:
    """What a server says of itself; not every server says it."""
    models, startup = _get(address, "/v1/models"), _get(address, "/startup")
    try:
        model = str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        model = ""
    known = startup if isinstance(startup, dict) else {}
    backend = str(known.get("backend", ""))
    return _Target(
        address=address,
        model=model,
        device=str(known.get("device", "")),
        backend=backend,
        what=f"{what}, {backend}" if backend else what,
        session=session,
    )


def _get(address: Address, path: str) -> Any:
    answer = ask(address, "GET", path)
    if answer is None or answer.status != 200:
        return None
    try:
        return msgspec.json.decode(answer.body)
    except msgspec.MsgspecError:
        return None


def _plan_of(arguments: LoadArguments, loads: Sequence[Load], shape: Shape, token_ids: range, model: str) -> LoadPlan:
    # Another one each time: what a server that runs on still has in its prefix cache must not be found again.
    seed = random.SystemRandom().getrandbits(31) if arguments.seed is None else arguments.seed
    return LoadPlan(
        loads=loads,
        shape=shape,
        token_ids=token_ids,
        model=model,
        num_rounds=arguments.num_rounds,
        num_requests=arguments.num_requests,
        duration_s=arguments.duration_s,
        num_repeats=arguments.num_repeats,
        num_warmup_rounds=arguments.num_warmup_rounds,
        spreads_start=arguments.start == "spread",
        disturb_tokens=arguments.disturb_tokens,
        disturb_every_s=arguments.disturb_every_s,
        probes_health=arguments.probes_health,
        timeout_s=arguments.timeout_s,
        seed=seed,
    )


def _conditions(plan: LoadPlan, target: _Target) -> dict[str, Any]:
    """What the figures depend on."""
    lengths = []
    if any(load.users for load in plan.loads):
        lengths.append(f"{plan.num_rounds} rounds")
    if any(load.rate for load in plan.loads):
        lengths.append(f"{plan.num_requests} requests")
    conditions = {
        "server": target.what,
        "model": target.model,
        "input tokens": plan.shape.num_prompt_tokens,
        "output tokens": plan.shape.num_tokens,
        "shared prefix": plan.shape.num_shared,
        "prompts a request": plan.shape.batch,
        "token ids": f"{plan.token_ids.start}:{plan.token_ids.stop}",
        "length": f"{plan.duration_s:g} s" if plan.duration_s else ", ".join(lengths),
        "warm-up rounds": plan.num_warmup_rounds,
        "start": "spread" if plan.spreads_start else "together",
        "seed": plan.seed,
    }
    if plan.disturb_tokens:
        conditions["long prompts"] = f"{plan.disturb_tokens} tokens every {plan.disturb_every_s:g} s"
    return conditions


def _own_command() -> str:
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def _allow_many_files() -> None:
    """A connection per user: as many as the system grants."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _progress(run: LoadRun) -> str:
    kind: Literal["streamed", "whole"] = "streamed" if run.is_stream else "whole"
    begin = f"{run.load}, {kind}, run {run.repeat + 1}: "
    errors = sum(failures.count for failures in run.errors.values())
    if run.all is None:
        return f"{begin}{errors} errors and no good request"
    latency = run.all.latency_ms
    return (
        f"{begin}{run.all.num_requests} requests in {run.all.seconds:.1f} s, P50 {latency.p50:.0f} ms, "
        f"P95 {latency.p95:.0f} ms, {run.all.tokens_per_s:.0f} tokens/s, {errors} errors"
        f" (client: {run.client.cpu_share:.0%} of a core)"
    )
