"""scripts/tune-kernels: what is raced, who wins, what is written; on a device in host memory with its own clock."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
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
from server.kernels.tile_files import TileFile, TileRange, read_tiles, write_tiles
from server.kernels.tuning import __main__ as tuning_command
from server.kernels.tuning import compiled as compiled_module
from server.kernels.tuning import rig as rig_module
from server.kernels.tuning.__main__ import Tuning, main, tune
from server.kernels.tuning.cases import SIZES, cases_of
from server.kernels.tuning.choose import NUM_FINALISTS, Contender, Kind, Race, choose
from server.kernels.tuning.compiled import CandidateFolder
from server.kernels.tuning.values import agree, as_floats, random_inputs, random_weights
from server.models.facts import ModelFacts
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import Function, GemmAlgorithm, KernelImage, Stream
from tests.ops.gemm_images import tile_constants
from tests.ops.host_driver import GEMM_VERSION, HostDriver
from tests.ops.host_kernels import all_recipes, host_image

FACTS = ModelFacts(
    architecture="Qwen2ForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    max_position=512,
    rms_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    qkv_bias=True,
    out_bias=False,
    qk_norm=False,
    tied_head=False,
    dtype="bfloat16",
)
QWEN2_7B = replace(
    FACTS,
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
)

# Who wins


def contender(kind: Kind, name: str, rows: int = 8) -> Contender:
    range_ = TileRange(rows, kernel=name) if kind == "triton" else TileRange(rows, workspace_bytes=len(name))
    return Contender(kind, range_, None)


class Track:
    """A race with given times. `quick` differs from `careful` where it is given."""

    def __init__(self, times: dict[Contender, float | None], quick: dict[Contender, float] | None = None) -> None:
        self._times, self._quick = times, quick or {}
        self.wrong: set[Contender] = set()
        self.finalists: list[Contender] = []

    @property
    def race(self) -> Race:
        return Race(self._quick_us, self._careful_us, lambda contender: contender not in self.wrong)

    def _quick_us(self, contender: Contender) -> float | None:
        return self._quick.get(contender, self._times[contender])

    def _careful_us(self, contenders: Sequence[Contender]) -> list[float]:
        self.finalists = list(contenders)
        times = [self._times[contender] for contender in contenders]
        assert None not in times, "who cannot run is not in the final"
        return times  # type: ignore[return-value]


LIBRARY = contender("cublas", "")
ALGORITHMS = [contender("cublas_lt", "x" * number) for number in range(1, 6)]
KERNELS = [contender("triton", f"k{number}") for number in range(6)]


def run(times: dict[Contender, float | None], **more: Any) -> tuple[TileRange, Track]:
    track = Track({LIBRARY: 10.0} | times, **more)
    return choose(LIBRARY, list(times), track.race), track


def test_the_fastest_wins_and_the_best_of_each_kind_is_noted() -> None:
    times = dict(zip(ALGORITHMS, (9.0, 8.123, 11.0, 12.0, 13.0), strict=True))
    times |= dict(zip(KERNELS, (7.5, 7.25, 20.0, 8.0, 9.0, 10.0), strict=True))
    chosen, track = run(times)
    assert chosen.kernel == "k1"
    assert chosen.us == {"cublas": 10.0, "cublas_lt": 8.12, "triton": 7.25}
    assert chosen.max_rows == 8
    counts = [sum(c.kind == kind for c in track.finalists) for kind in ("cublas", "cublas_lt", "triton")]
    assert counts == [1, NUM_FINALISTS["cublas_lt"], NUM_FINALISTS["triton"]]


@pytest.mark.parametrize(("us", "wins"), [(9.79, True), (9.81, False), (10.5, False)])
def test_a_gain_that_may_be_noise_changes_nothing(us: float, wins: bool) -> None:
    chosen, _ = run({KERNELS[0]: us})
    assert (chosen.kernel == "k0") == wins
    assert chosen.us == {"cublas": 10.0, "triton": us}


def test_the_careful_race_decides() -> None:
    chosen, _ = run({KERNELS[0]: 9.0, KERNELS[1]: 8.0}, quick={KERNELS[0]: 1.0, KERNELS[1]: 2.0})
    assert chosen.kernel == "k1"


def test_who_cannot_run_or_is_wrong_is_replaced_by_the_next() -> None:
    times: dict[Contender, float | None] = {kernel: 5.0 + index for index, kernel in enumerate(KERNELS)}
    times[KERNELS[0]] = None
    track = Track({LIBRARY: 20.0} | times)
    track.wrong = {KERNELS[1]}
    chosen = choose(LIBRARY, KERNELS, track.race)
    assert chosen.kernel == "k2"
    assert track.finalists == [LIBRARY, *KERNELS[2:6]]


def algorithm(number: int) -> Contender:
    return Contender("cublas_lt", TileRange(8, algorithm=bytes([number]).hex() * 64), None)


def test_what_is_like_the_fastest_is_tried_and_what_is_like_that() -> None:
    everyone = {number: algorithm(number) for number in range(20)}
    times: dict[Contender, float | None] = {one: 9.0 - 0.5 * number for number, one in everyone.items()}
    times[everyone[4]] = None
    track = Track({LIBRARY: 10.0} | times)
    track.wrong = {everyone[3]}
    varied: list[int] = []

    def vary(contender: Contender) -> list[Contender]:
        number = next(number for number, one in everyone.items() if one is contender)
        varied.append(number)
        return [everyone[number + step] for step in (1, 2, 3)]

    chosen = choose(LIBRARY, [everyone[0], everyone[1]], replace(track.race, vary=vary))
    assert varied == [1, 2, 5], "who is wrong or cannot run is no place to go on from"
    assert chosen.algorithm == everyone[8].range.algorithm


def test_a_search_ends_where_nothing_is_faster() -> None:
    best, others = algorithm(0), [algorithm(number) for number in range(1, 5)]
    track = Track({LIBRARY: 10.0, best: 5.0} | dict.fromkeys(others, 6.0))
    varied: list[Contender] = []

    def vary(contender: Contender) -> list[Contender]:
        varied.append(contender)
        return others

    assert choose(LIBRARY, [best], replace(track.race, vary=vary)).algorithm == best.range.algorithm
    assert varied == [best]


def test_without_others_the_library_stays() -> None:
    chosen, _ = run({})
    assert (chosen.kernel, chosen.algorithm, chosen.us) == (None, None, {"cublas": 10.0})


# Numbers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_random_numbers_are_of_the_size_of_weights_and_activations(dtype: Any) -> None:
    for make, low, high in ((random_weights, 2**-7, 2**-5), (random_inputs, 0.5, 2.0)):
        numbers = as_floats(make(4000, dtype, Random(1)), dtype)
        assert len(numbers) == 4000
        assert all(low <= abs(number) < high for number in numbers)
        assert 0.4 < sum(number > 0 for number in numbers) / 4000 < 0.6
        assert len(set(numbers)) > 200


def test_results_agree_up_to_rounding_and_never_with_nan() -> None:
    expected = [1.0, -64.0, 0.01]
    assert agree([1.5, -64.5, -0.5], expected, "bfloat16")
    assert not agree([1.0, -62.0, 0.01], expected, "bfloat16")
    assert not agree([1.0, -64.0, float("nan")], expected, "bfloat16")
    assert not agree([1.0, -64.0], expected, "bfloat16")
    assert not agree([1.5, -64.0, 0.01], expected, "float32")
    assert as_floats(b"\x80\x3f\x00\xc0", "bfloat16").tolist() == [1.0, -2.0]  # type: ignore[attr-defined]


# What is raced


def test_the_projections_of_a_model_are_found() -> None:
    cases = cases_of(QWEN2_7B)
    assert [str(case) for case in cases] == [
        "linear 4608 x 3584 + bias",
        "linear_add_norm 3584 x 3584",
        "gated_linear 37888 x 3584",
        "linear_add_norm 3584 x 18944",
        "logits 152064 x 3584",
    ]
    assert [case.num_weights for case in cases] == [28] * 4 + [1]
    assert cases[2].block == 18944 // 4
    assert cases[0].sizes == SIZES
    assert max(cases[4].sizes) == 512


class ClockedDriver(HostDriver):
    """Each GEMM takes what `gemm_ms` says of its algorithm, each kernel what `kernel_ms` says of its name and block."""

    def __init__(self) -> None:
        super().__init__(total_bytes=4 << 30)
        self.gemm_ms: Callable[[GemmAlgorithm | None], float] = lambda _: 1.0
        self.kernel_ms: Callable[[KernelImage], float] = lambda _: 0.0
        self._now = 0.0
        self.clock_ms = lambda: self._now

    def gemm_async(
        self,
        x: Buffer,
        weight: Buffer,
        bias: Buffer | None,
        out: Buffer,
        workspace: Buffer,
        stream: Stream,
        algorithm: GemmAlgorithm | None = None,
    ) -> None:
        super().gemm_async(x, weight, bias, out, workspace, stream, algorithm)
        self._issue(self._captures.get(stream), lambda: self._pass(self.gemm_ms(algorithm)))

    def launch_async(
        self, function: Function, grid: tuple[int, int, int], values: Sequence[int | float], stream: Stream
    ) -> None:
        super().launch_async(function, grid, values, stream)
        self._issue(self._captures.get(stream), lambda: self._pass(self.kernel_ms(function.image)))

    def _pass(self, ms: float) -> None:
        self._now += ms


class HostCandidates:
    """In place of compiled ones: what the interpreter runs, the same object each time."""

    def __init__(self) -> None:
        self._images: list[tuple[Recipe, KernelImage]] = []

    def image(self, recipe: Recipe) -> KernelImage:
        for known, image in self._images:
            if known == recipe:
                return image
        self._images.append((recipe, host_image(recipe)))
        return self._images[-1][1]


KERNELS_OF: dict[str, str] = {
    "linear": "linear",
    "linear_add_norm": "linear_split",
    "gated_linear": "gated_linear",
    "logits": "linear_fp32",
}


def one_candidate(operation: str, m: int, n: int, k: int, *, has_bias: bool, block: int, arch: str) -> list[Candidate]:
    name = KERNELS_OF[operation]
    constants = tile_constants(name, 16, 64, has_bias=has_bias)
    return [Candidate(name, constants, 4, 3, num_splits=3 if "split" in name else 1)]


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


def test_every_projection_is_measured_and_written(tuning: Tuning, driver: ClockedDriver, tmp_path: Path) -> None:
    driver.kernel_ms = lambda image: {"linear": 0.25, "gated_linear": 0.25}.get(image.name, 2.0)
    driver.gemm_ms = lambda algorithm: 1.0 if algorithm is None else 2.0 - 0.5 * min(algorithm.data[0], 3)
    path = tmp_path / "tiles" / "sm_80.toml"
    tune(tuning, driver, path)
    tiles = written(path)
    assert (tiles.device, tiles.gemm_version) == ("host memory", GEMM_VERSION)
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


def test_interpreted_kernels_are_not_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--compile-only", "nowhere"]) == 2
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--m", "3"], ["--operation", "gate"], ["--shape", "a", "--config", "b"]])
def test_unknown_choices_are_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "usage: scripts/tune-kernels" in capsys.readouterr().err
