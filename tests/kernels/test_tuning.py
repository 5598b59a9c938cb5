"""scripts/tune-kernels: what it measures, writes and keeps, and how candidates are compiled."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.errors import StartupError
from server.kernels import build as build_module
from server.kernels import candidates as candidates_module
from server.kernels.build import Job
from server.kernels.candidates import Candidate
from server.kernels.catalog import Recipe
from server.kernels.manifest import ManifestImage
from server.kernels.tile_files import TileFile, read_tiles, write_tiles
from server.kernels.tuning import __main__ as tuning_command
from server.kernels.tuning import compiled as compiled_module
from server.kernels.tuning import rig as rig_module
from server.kernels.tuning.__main__ import Tuning, driver_version, main, tune
from server.kernels.tuning.cases import cases_of
from server.kernels.tuning.compiled import CandidateFolder
from server.ops.cuda import nvidia
from tests.kernels.tuning_rig import FACTS, ClockedDriver, HostCandidates, one_candidate
from tests.ops.gemm_images import tile_constants
from tests.ops.host_driver import GEMM_VERSION
from tests.ops.host_kernels import all_recipes
from tests.tiny_models import tiny_config


@pytest.fixture
def driver() -> ClockedDriver:
    return ClockedDriver()


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> Tuning:
    """Of all projections of a tiny model, at two sizes, with one kernel for each."""
    monkeypatch.setattr(candidates_module, "candidates", one_candidate)
    monkeypatch.setattr(rig_module, "CAREFUL_REPEATS", 1)
    monkeypatch.setattr(rig_module, "QUICK_REPEATS", 1)
    monkeypatch.setattr(tuning_command, "version", lambda _: "3.6.0")
    return Tuning(FACTS, cases_of(FACTS), (1, 2), HostCandidates())  # type: ignore[arg-type]


def only(tuning: Tuning, *operations: str, sizes: tuple[int, ...] = (2,)) -> Tuning:
    cases = [case for case in tuning.cases if case.shape.operation in operations]
    return replace(tuning, cases=cases, sizes=sizes)


def written(path: Path) -> TileFile:
    tiles = read_tiles(path)
    assert tiles is not None
    return tiles


def test_every_projection_is_measured_and_written(
    tuning: Tuning, driver: ClockedDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.kernel_ms = lambda image: {"linear": 0.25, "gated_linear": 0.25}.get(image.name, 2.0)
    driver.gemm_ms = lambda algorithm: 1.0 if algorithm is None else 2.0 - 0.5 * min(algorithm.data[0], 3)
    path = tmp_path / "tiles" / "sm_80.toml"
    tune(tuning, driver, path)
    tiles = written(path)
    assert (tiles.device, tiles.gemm_version) == ("host memory", GEMM_VERSION)
    assert (tiles.driver, tiles.triton) == (driver_version(), "3.6.0")
    assert len(tiles.gemm) == 5
    for gemm in tiles.gemm:
        assert [range_.max_rows for range_ in gemm.range] == [1, 2]
    by_key = {gemm.key: gemm.range[1] for gemm in tiles.gemm}
    qkv = by_key["linear", "bfloat16", 48, 32, True]
    assert (qkv.kernel, qkv.constants) == ("linear", tile_constants("linear", 16, 64, has_bias=True))
    assert (qkv.num_warps, qkv.num_stages, qkv.num_splits) == (4, 3, 1)
    assert qkv.us == {"cublas": 1000.0, "cublas_lt": 500.0, "triton": 250.0}
    gated = by_key["gated_linear", "bfloat16", 96, 32, False]
    assert gated.kernel == "gated_linear"
    assert gated.us == {"cublas": 3000.0, "cublas_lt": 2500.0, "triton": 250.0}
    down = by_key["linear_add_norm", "bfloat16", 32, 48, False]
    assert (down.kernel, down.algorithm) == (None, (bytes([3]) * 64).hex()), "split and norm take four milliseconds"
    assert down.us == {"cublas": 3000.0, "cublas_lt": 2500.0, "triton": 4000.0}
    assert driver.num_used_bytes == 0, "all memory is given back"
    # Two layers of qkv, two projections with a norm, and the gated one; the head.
    said = capsys.readouterr().err
    assert "a step of     2 rows: cuBLAS  21.000 ms, as chosen  11.500 ms" in said
    assert said.count("a step of") == 2


def test_a_kernel_with_wrong_results_is_not_chosen(
    tuning: Tuning,
    driver: ClockedDriver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    biasless = Candidate("linear", tile_constants("linear", 16, 64, has_bias=False), 4, 3)
    monkeypatch.setattr(candidates_module, "candidates", lambda *_, **__: [biasless])
    tune(only(tuning, "linear"), driver, tmp_path / "sm_80.toml")
    (range_,) = written(tmp_path / "sm_80.toml").gemm[0].range
    assert range_.kernel is None
    assert "triton" not in range_.us
    assert "WRONG RESULT, left out: linear" in capsys.readouterr().err


def test_a_candidate_that_cannot_be_loaded_is_left_out(
    tuning: Tuning, driver: ClockedDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.fail_at(1, method="load")
    tune(only(tuning, "linear"), driver, tmp_path / "sm_80.toml")
    assert "triton" not in written(tmp_path / "sm_80.toml").gemm[0].range[0].us
    assert "left out: linear {'BLOCK_M': 16, 'BLOCK_N': 64, 'BLOCK_K': 32" in capsys.readouterr().err


def test_what_is_there_is_kept_unless_it_is_of_another_library(
    tuning: Tuning, driver: ClockedDriver, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sm_80.toml"
    tune(only(tuning, "logits", sizes=(2,)), driver, path)
    num_gemms = driver.calls["gemm_async"]
    tune(only(tuning, "logits", sizes=(2,)), driver, path)
    assert driver.calls["gemm_async"] == num_gemms
    tune(only(tuning, "logits", sizes=(1, 2)), driver, path)
    assert [range_.max_rows for range_ in written(path).gemm[0].range] == [1, 2]
    tune(only(tuning, "linear", sizes=(1,)), driver, path)
    assert len(written(path).gemm) == 2
    write_tiles(path, msgspec.structs.replace(written(path), gemm_version=1))
    capsys.readouterr()
    tune(only(tuning, "logits", sizes=(1,)), driver, path)
    assert "cuBLAS 1, Triton 3.6.0: it is made anew" in capsys.readouterr().err
    assert written(path).gemm_version == GEMM_VERSION
    assert [range_.max_rows for gemm in written(path).gemm for range_ in gemm.range] == [1]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC 12.2", "580.95.05"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86\n", "570.86"),
        ("nothing of the kind", "unknown"),
    ],
)
def test_the_driver_is_named(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
    assert driver_version(tmp_path / "missing") == "unknown"


def test_a_run_that_is_ended_leaves_what_it_has_measured(tuning: Tuning, driver: ClockedDriver, tmp_path: Path) -> None:
    path = tmp_path / "sm_80.toml"
    turns = iter([True, True, False])
    tune(only(tuning, "linear", "logits", sizes=(1, 2)), driver, path, may_begin=lambda: next(turns, False))
    assert [(gemm.operation, [range_.max_rows for range_ in gemm.range]) for gemm in written(path).gemm] == [
        ("linear", [1])
    ]


# Compiling


class HerePool:
    """Does at once and in this process what it is given."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except StartupError as error:
            future.set_exception(error)
        return future


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """What was compiled, by a stand-in that fails at 3 stages and takes 1 MiB of shared memory at 9."""
    done: list[Recipe] = []

    def compile_job(folder: Path, job: Job) -> ManifestImage:
        done.append(job.recipe)
        if job.recipe.num_stages == 3:
            raise StartupError(f"kernel {job.recipe.name} cannot be compiled: too much\nand more")
        return build_module._save(folder, job, b"code", 1 << 20 if job.recipe.num_stages == 9 else 512)

    monkeypatch.setattr(compiled_module, "compile_job", compile_job)
    monkeypatch.setattr(compiled_module, "compiler_pool", lambda *_: nullcontext(HerePool()))
    return done


def recipes(*stages: int) -> list[Recipe]:
    recipe = next(recipe for recipe in all_recipes() if (recipe.name, recipe.dtype) == ("gate", "bfloat16"))
    return [replace(recipe, num_stages=number) for number in stages]


def test_candidates_are_compiled_once_and_found_again(compiled: list[Recipe], tmp_path: Path) -> None:
    said: list[str] = []
    folder = CandidateFolder(tmp_path / "new", "sm_90")
    folder.compile(recipes(1, 2, 2), 4, said.append)
    assert said == ["compiling 2 candidates for sm_90, 4 at a time"]
    folder.compile(recipes(2, 4), 4, said.append)
    again = CandidateFolder(tmp_path / "new", "sm_90")
    again.compile(recipes(1, 2, 4), 4, said.append)
    assert [recipe.num_stages for recipe in compiled] == [1, 2, 4]
    (recipe,) = recipes(4)
    image = again.image(recipe)
    assert image is not None
    assert image.path.read_bytes() == b"code"
    assert image is again.image(recipe), "operations know kernels by their image"


def test_what_cannot_be_compiled_or_launched_is_no_candidate(compiled: list[Recipe], tmp_path: Path) -> None:
    folder = CandidateFolder(tmp_path, "sm_90")
    wanted = recipes(2, 3, 9, 5)
    folder.compile(wanted[:3], 1, lambda _: None)
    assert [folder.image(recipe) is not None for recipe in wanted] == [True, False, False, False]
    again = CandidateFolder(tmp_path, "sm_90")
    again.compile(wanted[:3], 1, lambda _: None)
    assert len(compiled) == 3, "what failed is not tried again"
    assert again.failures == ["kernel gate cannot be compiled: too much"]


def test_candidates_of_other_sources_are_not_used(
    compiled: list[Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CandidateFolder(tmp_path, "sm_90").compile(recipes(2), 1, lambda _: None)
    monkeypatch.setattr(build_module, "_module_digest", lambda name: "changed")
    changed = CandidateFolder(tmp_path, "sm_90")
    assert changed.image(*recipes(2)) is None
    changed.compile(recipes(2), 1, lambda _: None)
    assert len(compiled) == 2
    (tmp_path / "candidates.json").write_bytes(b"{")
    assert CandidateFolder(tmp_path, "sm_90").image(*recipes(2)) is None


# The command


@pytest.fixture
def command(tuning: Tuning, driver: ClockedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(tuning_command, "CandidateFolder", HostCandidates)
    monkeypatch.setattr(nvidia.NvidiaDriver, "open", lambda: driver)


@pytest.mark.usefixtures("command")
def test_the_command_measures_what_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3", dtype="float16", num_layers=1)))
    out = tmp_path / "tiles.toml"
    arguments = ["--config", str(tmp_path), "--out", str(out), "--operation", "linear", "--m", "2", "--m", "1"]
    assert main([*arguments, "--compiled", str(tmp_path / "compiled")]) == 0
    (gemm,) = written(out).gemm
    assert (gemm.operation, gemm.dtype, [range_.max_rows for range_ in gemm.range]) == ("linear", "float16", [1, 2])
    said = capsys.readouterr().err
    assert f"recipes for {tmp_path / 'compiled'}" in said
    assert "no candidate: kernel x cannot be compiled: too much" in said
    assert said.endswith(f"tune-kernels: {out} is written; scripts/build-kernels --arch sm_80 takes it in\n")
    assert main([*arguments, "--again", "--limit-s", "0"]) == 0
    assert len(written(out).gemm) == 1, "what is written stays until something else is"


@pytest.mark.usefixtures("command")
def test_candidates_can_be_compiled_without_a_gpu(
    tmp_path: Path, driver: ClockedDriver, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--compile-only", str(tmp_path / "there"), "--operation", "logits", "--m", "64"]) == 0
    assert f"recipes for {tmp_path / 'there'}" in capsys.readouterr().err
    assert driver.num_calls == 0


@pytest.mark.usefixtures("command")
def test_an_unknown_shape_or_a_broken_file_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shape", "qwen2-8b"]) == 1
    assert "there is no shape qwen2-8b; there are qwen2-0.5b, " in capsys.readouterr().err
    (tmp_path / "tiles.toml").write_text("[[")
    assert main(["--out", str(tmp_path / "tiles.toml"), "--m", "1"]) == 1
    assert "run scripts/tune-kernels again, or remove it" in capsys.readouterr().err


def test_interpreted_kernels_are_not_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--compile-only", "nowhere"]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--m", "3"], ["--operation", "gate"], ["--shape", "a", "--config", "b"]])
def test_unknown_choices_are_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "usage: scripts/tune-kernels" in capsys.readouterr().err
