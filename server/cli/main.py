"""The `model-server` command. Parses arguments and hands over; each command's work is in the module beside it."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from server.errors import ServerError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

bench_app = typer.Typer(no_args_is_help=True)
app.add_typer(bench_app, name="bench", help="Measure this server, or another one.")

# Of make_model.SHAPES, whose import is slow.
SHAPE_NAMES = "qwen2-0.5b, qwen2-1.5b, qwen2-7b, qwen3-8b, llama3-8b, tiny-qwen2, tiny-qwen3, tiny-llama3"
_EXIT_PERMANENT = 4
_EXIT_TERMINATED = 128 + signal.SIGTERM


@app.callback()
def main() -> None:
    """A model server whose cold start takes seconds."""


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="folder, hub cache folder or hub id; empty: what the profile says")] = "",
    profile: Annotated[str, typer.Option(help="name of a file in config/profiles; empty: demo")] = "",
    host: Annotated[str, typer.Option(help="address to listen on; empty: 127.0.0.1, this machine only")] = "",
    port: Annotated[int | None, typer.Option(help="port to listen on; 0: any free one; not given: 8000")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="any setting of config/base.toml; may be repeated"),
    ] = None,
) -> None:
    """Serve a model: replaces this process by gunicorn, so signals reach its master."""
    from server.cli.serve import exec_gunicorn

    named = {"model.path": model, "server.host": host, "server.port": port}
    overrides = {key: value for key, value in named.items() if value not in ("", None)}
    _run(lambda: exec_gunicorn(profile, overrides, set_ or []))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="folder, hub cache folder or hub id of the checkpoint to read")],
    target: Annotated[Path, typer.Argument(help="folder to make")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")],
) -> None:
    """Write a checkpoint in another dtype (safetensors to safetensors)."""
    from server.cli.convert import convert as run

    _run(lambda: run(source, target, dtype))


@app.command("make-model")
def make_model(
    shape: Annotated[str, typer.Argument(help=SHAPE_NAMES)],
    target: Annotated[Path, typer.Argument(help="folder to make")],
    seed: Annotated[int, typer.Option(help="the same seed gives the same bytes")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "bfloat16",
    tokenizer: Annotated[Path | None, typer.Option(help="folder whose tokenizer files are copied")] = None,
) -> None:
    """Make a random-weight checkpoint of a known shape, for benchmarks without downloads."""
    from server.cli.make_model import make_model as run

    _run(lambda: run(shape, target, seed=seed, dtype=dtype, tokenizer=tokenizer))


@bench_app.command("startup")
def bench_startup(
    model: Annotated[str, typer.Option(help="folder or hub id; empty: what the profile says")] = "",
    profile: Annotated[str, typer.Option(help="name of a file in config/profiles; empty: demo")] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="any setting of the server; may be repeated"),
    ] = None,
    what: Annotated[
        str,
        typer.Option(
            help="comma-separated, of warm, cold, first-ever, kill, kill-many, kill-arbiter, requests; empty: all"
        ),
    ] = "",
    runs: Annotated[int, typer.Option(min=1, help="how many of each kind")] = 5,
    streams: Annotated[int, typer.Option(min=2, help="how many run at each kill of kill-many")] = 100,
    json_: Annotated[Path | None, typer.Option("--json", help="file for everything that was measured")] = None,
    command: Annotated[str, typer.Option(help="another server's command line; {port} in it becomes a free port")] = "",
    url: Annotated[str, typer.Option(help="where --command listens; empty: http://127.0.0.1:{port}")] = "",
    path: Annotated[str, typer.Option(help="where the request that ends a start is posted")] = "/generate",
    body: Annotated[str, typer.Option(help="JSON of that request; empty: a short prompt, one token")] = "",
    files: Annotated[
        Path | None,
        typer.Option(help="folder that is put into or out of the page cache; needed with --command, else the model's"),
    ] = None,
) -> None:
    """Measure starts, kills and first requests from outside: exec to the body of a real answer."""
    from server.cli.bench import bench_startup as run

    overrides: dict[str, object] = {"model.path": model} if model else {}
    _run(lambda: run(profile, overrides, set_ or [], what, runs, streams, json_, command, url, path, body, files))


@bench_app.command("load")
def bench_load(
    url: Annotated[str, typer.Option(help="a server that runs; or where --command listens. Empty: starts one")] = "",
    command: Annotated[str, typer.Option(help="another server's command line; {port} in it becomes a free port")] = "",
    model: Annotated[str, typer.Option(help="folder or hub id to start with; empty: what the profile says")] = "",
    profile: Annotated[str, typer.Option(help="name of a file in config/profiles; empty: demo")] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="any setting of the server; may be repeated"),
    ] = None,
    users: Annotated[str, typer.Option(help="closed loops: numbers of users, comma-separated; empty: 1,16")] = "",
    rate: Annotated[str, typer.Option(help="open loops: requests per second, Poisson arrivals, comma-separated")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="requests of each user of a closed loop")] = 10,
    requests: Annotated[int, typer.Option(min=2, help="requests of an open loop")] = 1000,
    duration: Annotated[float, typer.Option(min=0, help="seconds, instead of --rounds and --requests")] = 0.0,
    repeat: Annotated[int, typer.Option(min=1, help="how often everything is measured; medians are shown")] = 3,
    warmup: Annotated[int, typer.Option(min=0, help="rounds before each load that do not count")] = 1,
    start: Annotated[
        str, typer.Option(help="users of a closed loop begin together, or spread over a request")
    ] = "together",
    input_tokens: Annotated[int, typer.Option(min=1)] = 128,
    output_tokens: Annotated[int, typer.Option(min=1)] = 128,
    shared_prefix: Annotated[int, typer.Option(min=0, help="leading tokens that all prompts have in common")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="prompts of one request; not streamed")] = 1,
    token_ids: Annotated[
        str, typer.Option(help="LOW:HIGH, which ids prompts are drawn from; empty: the model's, else 300:4000")
    ] = "",
    answers: Annotated[str, typer.Option(help="streamed, whole, or both: streamed,whole")] = "streamed",
    disturb_tokens: Annotated[int, typer.Option(min=0, help="beside the load, prompts of so many tokens; 0: none")] = 0,
    disturb_every: Annotated[float, typer.Option(min=0.01, help="seconds between two of these")] = 1.0,
    probe_health: Annotated[bool, typer.Option("--probe-health", help="time GET /health beside the load")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, help="seconds for one request")] = 300.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="of prompts and arrivals; not given: another each time")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="file for everything that was measured")] = None,
) -> None:
    """Measure latency and throughput with random prompts of fixed length: users, or requests at a rate."""
    from server.cli.bench_load import LoadArguments
    from server.cli.bench_load import bench_load as run

    overrides: dict[str, object] = {"model.path": model} if model else {}
    arguments = LoadArguments(
        url=url,
        command=command,
        profile=profile,
        overrides=overrides,
        assignments=set_ or [],
        users=users,
        rate=rate,
        answers=answers,
        start=start,
        num_rounds=rounds,
        num_requests=requests,
        duration_s=duration,
        num_repeats=repeat,
        num_warmup_rounds=warmup,
        num_prompt_tokens=input_tokens,
        num_tokens=output_tokens,
        num_shared=shared_prefix,
        batch=batch,
        token_ids=token_ids,
        disturb_tokens=disturb_tokens,
        disturb_every_s=disturb_every,
        probes_health=probe_health,
        timeout_s=timeout,
        seed=seed,
        json_file=json_,
    )
    _run(lambda: run(arguments))


def _run(command: Callable[[], object]) -> None:
    """Run a command; a fault of the user's becomes one line and exit code 4."""
    # SIGTERM leaves nothing half-written behind, as Ctrl-C does. Becoming gunicorn puts its default back.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_EXIT_TERMINATED))
    try:
        command()
    except ServerError as error:
        typer.echo(f"model-server: {error}", err=True)
        raise typer.Exit(_EXIT_PERMANENT) from error
