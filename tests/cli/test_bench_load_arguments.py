"""Arguments of `bench load` that make no sense are refused before anything is started."""

from dataclasses import replace
from pathlib import Path

import pytest

from server.cli.bench_load import LoadArguments, bench_load
from server.errors import StartupError

USUAL = LoadArguments(
    url="",
    command="",
    profile="",
    overrides={},
    assignments=[],
    users="",
    rate="",
    answers="streamed",
    start="together",
    num_rounds=1,
    num_requests=2,
    duration_s=0.0,
    num_repeats=1,
    num_warmup_rounds=0,
    num_prompt_tokens=128,
    num_tokens=128,
    num_shared=0,
    batch=1,
    token_ids="",
    disturb_tokens=0,
    disturb_every_s=1.0,
    probes_health=False,
    timeout_s=1.0,
    seed=None,
    json_file=None,
)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"users": "x"}, "--users x: numbers of at least 1"),
        ({"users": "1.5"}, "whole numbers"),
        ({"users": "inf"}, "--users inf: numbers of at least 1"),
        ({"url": "http://127.0.0.1:99999"}, "http://HOST:PORT is expected"),
        ({"rate": "0"}, "--rate 0: numbers"),
        ({"answers": "half"}, "there are streamed and whole"),
        ({"batch": 2}, "are measured with --answers whole"),
        ({"start": "late"}, "there are together and spread"),
        ({"disturb_tokens": 9, "answers": "whole"}, "--answers streamed is needed"),
        ({"num_shared": 128}, "must be less than"),
        ({"token_ids": "9"}, "LOW:HIGH"),
        ({"url": "http://127.0.0.1:1"}, "nobody answers there"),
        ({"url": "https://127.0.0.1"}, "http://HOST:PORT is expected"),
        ({"url": "http://127.0.0.1:1", "profile": "x"}, "leave out --url"),
        ({"command": "x", "assignments": ["a.b=1"]}, "leave out --url, --command"),
        ({"json_file": Path("/nowhere/report.json")}, "there is no folder /nowhere"),
        ({"overrides": {"model.path": "/nowhere"}}, "there is no such folder"),
    ],
)
def test_it_is_said_what_makes_no_sense(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        bench_load(replace(USUAL, **changes))  # type: ignore[arg-type]
