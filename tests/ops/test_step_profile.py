"""What scripts/gpu/step_profile.py makes of a profiler's list, and that it runs, on a driver that does nothing."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from scripts.gpu import step_profile
from scripts.gpu.graph_times import limits_of
from scripts.gpu.step_profile import Activity, Gaps, Kernel, Profile, by_kernel, describe, measure_gaps, read_profile

ROOT = Path(__file__).parents[2]


def activities(*spans: tuple[str, int, int]) -> list[Activity]:
    """By their begin and end in microseconds."""
    return [Activity(name, begin * 1000, end * 1000) for name, begin, end in spans]


# Two steps of 20 us. In the first the GEMM begins 1 us after embed; in the second gate begins before the GEMM ends.
STEPS = activities(
    ("Memcpy HtoD", 0, 2),
    ("embed", 3, 5),
    ("gemm", 6, 14),
    ("gate", 14, 15),
    ("sample_finish", 15, 16),
    ("Memcpy DtoH", 17, 18),
    ("Memcpy HtoD", 20, 22),
    ("embed", 22, 24),
    ("gemm", 24, 34),
    ("gate", 30, 36),
    ("sample_finish", 36, 38),
)
PROFILE = Profile("as it is", "1x1", True, 4.5, 54.0, Gaps(16.5, 0.5, 2.0), (Kernel("gemm", 1.5, 9.0),))


def test_launches_of_a_name_are_added_up_and_counted_per_step() -> None:
    kernels = by_kernel(STEPS, 2)
    assert kernels[0] == Kernel("gemm", 1.0, 9.0)
    assert [kernel.us for kernel in kernels] == sorted((kernel.us for kernel in kernels), reverse=True)
    assert sum(kernel.num_launches for kernel in kernels) == len(STEPS) / 2


def test_overlapping_kernels_are_busy_once_and_idle_is_within_or_between_steps() -> None:
    assert measure_gaps(STEPS, 2) == Gaps(busy_us=33 / 2, idle_within_us=1 / 2, idle_between_us=4 / 2)
    assert measure_gaps(STEPS[::-1], 2) == measure_gaps(STEPS, 2), "the order of the list means nothing"


def test_all_time_is_busy_or_idle() -> None:
    gaps = measure_gaps(STEPS, 1)
    assert gaps.busy_us + gaps.idle_within_us + gaps.idle_between_us == 38
    assert gaps.idle_between_share == pytest.approx(4 / 38)
    assert measure_gaps([], 1).idle_between_share == 0


def test_a_profile_survives_the_way_between_processes() -> None:
    assert read_profile(json.dumps(asdict(PROFILE))) == PROFILE


def test_a_table_has_the_step_and_its_slowest_kernels() -> None:
    text = describe(PROFILE, 5)
    assert text.startswith(
        "1x1 replayed, as it is: wall 4500 us, host 54 us; busy 16 us, idle 0 us within steps, 2 us (10.5%)"
    )
    assert text.splitlines()[1].split() == ["9.0", "us", "=", "1.5", "x", "6.00", "gemm"]
    assert len(describe(PROFILE, 0).splitlines()) == 1


def test_a_switch_is_set_in_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "SHOWN_NAME", 60)
    step_profile.switch_on("scripts.gpu.step_profile.SHOWN_NAME=7")
    assert step_profile.SHOWN_NAME == 7
    with pytest.raises(SystemExit, match="has no NOTHING"):
        step_profile.switch_on("scripts.gpu.step_profile.NOTHING=7")


def test_every_variant_is_measured_at_every_size_replayed_and_issued(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu/step_profile.py", "--on-nothing", "--size", "1x1", "--steps", "1"]
    command += ["--requests", "2", "--mixed-tokens", "64", "--with", "early_launch", "--json", str(tmp_path / "found")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = json.loads((tmp_path / "found").read_text())
    assert [(row["variant"], row["size"], row["is_replayed"]) for row in found] == [
        (variant, "1x1", is_replayed) for variant in ("as it is", "early_launch") for is_replayed in (True, False)
    ]


def test_a_size_that_decodes_and_mixed_steps_have_is_that_of_decodes() -> None:
    options = step_profile._parser().parse_args(["--size", "64x64", "256x256", "512x256"])
    decodes, largest, mixed = step_profile._sizes(options, limits_of(256, 200, 512))
    assert (decodes.num_prefills, largest.num_prefills) == (0, 0)
    assert mixed.num_prefills


def test_an_unknown_size_is_named_with_what_there_is() -> None:
    command = [sys.executable, "scripts/gpu/step_profile.py", "--on-nothing", "--size", "3x1", "--with"]
    result = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 1
    assert "no steps of 3x1 are recorded; there are 1x1, 2x2" in result.stderr
