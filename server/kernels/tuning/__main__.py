"""Measures which way each projection of a model is best computed on this GPU, and writes tiles/sm_XX.toml.

Run by scripts/tune-kernels, never while serving. Compiling needs no GPU: --compile-only on any machine, then --compiled
on the one with the GPU. What the file has already is kept, so that a run that was ended goes on where it was.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from server.errors import EngineDead, StartupError
from server.kernels.tile_files import FORMAT, GemmKey, TileFile, TileGemm, TileRange, read_tiles, tile_path, write_tiles
from server.kernels.tuning.cases import SIZES, GemmCase, cases_of
from server.kernels.tuning.choose import Contender, Kind, choose
from server.kernels.tuning.compiled import CandidateFolder
from server.kernels.tuning.rig import CAREFUL_REPEATS, GemmRig, algorithm_contender
from server.models.facts import ModelFacts, facts_from_config
from server.ops.cuda.driver import Driver
from server.ops.cuda.tiles import GEMM_OPERATIONS, Tile

if TYPE_CHECKING:
    from server.kernels.candidates import Candidate
    from server.kernels.catalog import Recipe

MAX_ALGORITHMS = 64  # that cuBLAS is asked for
HOW = f"medians of {CAREFUL_REPEATS}, in turns, of graphs that run through the weights of all layers"
# What operations launch beside the projections.
_GLUE = ("add_rms_norm", "add_rms_norm_partials", "gate", "reduce_partials")
EXIT_FAILED = 1
EXIT_USAGE = 2


@dataclass(frozen=True, slots=True)
class Tuning:
    """One run: which sizes of which projections, and what may be used for them."""

    facts: ModelFacts
    cases: Sequence[GemmCase]
    sizes: Sequence[int]
    candidates: CandidateFolder

    def sizes_of(self, case: GemmCase) -> list[int]:
        """Those that were asked for and can occur."""
        return [size for size in case.sizes if size in self.sizes]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parse(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        say("TRITON_INTERPRET is set, which makes Python of kernels; unset it")
        return EXIT_USAGE
    try:
        _run(options)
    except (StartupError, EngineDead, OSError) as error:
        say(str(error))
        return EXIT_FAILED
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/tune-kernels", description=__doc__.partition("\n")[0])
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--shape", default="qwen2-7b", help="as of `model-server make-model` (default: %(default)s)")
    model.add_argument("--config", type=Path, help="a config.json, or a folder that has one")
    parser.add_argument("--operation", action="append", choices=GEMM_OPERATIONS, help="may be repeated; default: all")
    parser.add_argument("--m", action="append", type=int, choices=SIZES, help="rows; may be repeated; default: all")
    parser.add_argument("--compile-only", type=Path, metavar="DIR", help="compile the candidates there, and end")
    parser.add_argument("--compiled", type=Path, metavar="DIR", help="where --compile-only has put them")
    parser.add_argument("--arch", default="sm_90", help="for --compile-only (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="compilers at a time")
    parser.add_argument("--out", type=Path, help="the file; default: the one that scripts/build-kernels reads")
    parser.add_argument("--again", action="store_true", help="measure also what the file has")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin nothing new after so many seconds")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> None:
    deadline = time.monotonic() + options.limit_s
    facts = _facts(options)
    cases = [case for case in cases_of(facts) if not options.operation or case.shape.operation in options.operation]
    if options.compile_only:
        tuning = Tuning(facts, cases, options.m or SIZES, CandidateFolder(options.compile_only, options.arch))
        _compile(tuning, options.arch, options.jobs)
        return
    from server.ops.cuda.nvidia import NvidiaDriver

    driver = NvidiaDriver.open()
    arch = driver.facts.arch
    with tempfile.TemporaryDirectory() as folder:
        tuning = Tuning(facts, cases, options.m or SIZES, CandidateFolder(options.compiled or Path(folder), arch))
        _compile(tuning, arch, options.jobs)
        out = options.out or tile_path(arch)
        tune(tuning, driver, out, is_fresh=options.again, may_begin=lambda: time.monotonic() < deadline)
    say(f"{out} is written; scripts/build-kernels --arch {arch} takes it in")


def _facts(options: argparse.Namespace) -> ModelFacts:
    if options.config:
        path = options.config / "config.json" if options.config.is_dir() else options.config
        return facts_from_config(json.loads(path.read_bytes()))
    from server.cli.make_model import SHAPES

    if options.shape not in SHAPES:
        raise StartupError(f"there is no shape {options.shape}; there are {', '.join(SHAPES)}")
    return facts_from_config(SHAPES[options.shape] | {"dtype": "bfloat16"})


# Candidates


def _compile(tuning: Tuning, arch: str, num_processes: int) -> None:
    recipes = [
        recipe for case in tuning.cases for m in tuning.sizes_of(case) for _, recipe in recipes_of(case, m, arch)
    ]
    tuning.candidates.compile([*glue_recipes(tuning.facts.dtype), *recipes], num_processes, say)
    for failure in tuning.candidates.failures:
        say(f"no candidate: {failure}")


def recipes_of(case: GemmCase, m: int, arch: str) -> "Iterator[tuple[Candidate, Recipe]]":
    """The kernels that may suit m rows."""
    from server.kernels.candidates import candidates
    from server.kernels.catalog import variant_recipe
    from server.kernels.spec import Variant

    shape = case.shape
    for candidate in candidates(
        shape.operation, m, shape.n, shape.k, has_bias=shape.has_bias, block=case.block, arch=arch
    ):
        variant = Variant(candidate.constants, candidate.num_warps, candidate.num_stages)
        yield candidate, variant_recipe(candidate.kernel, shape.dtype, variant)


def glue_recipes(dtype: str) -> "list[Recipe]":
    """What ways of an operation launch beside its GEMM."""
    from server.kernels.catalog import all_specs, expand

    specs = [spec for spec in all_specs() if spec.name in _GLUE]
    return [recipe for spec in specs for recipe in expand(spec) if recipe.dtype in (None, dtype)]


# Measuring


def tune(
    tuning: Tuning,
    driver: Driver,
    out: Path,
    *,
    is_fresh: bool = False,
    may_begin: Callable[[], bool] = lambda: True,
) -> None:
    """Measure what is missing, and write the file after each size."""
    driver.prepare_gemms()
    tiles = _begin_file(out, driver, is_fresh)
    for case in tuning.cases:
        missing = [m for m in tuning.sizes_of(case) if _known(tiles, case, m) is None]
        for range_, host_us in _measure(tuning, driver, case, missing, may_begin):
            tiles = with_range(tiles, case, range_)
            write_tiles(out, tiles)
            say(_line(case, range_, host_us))
    for line in summary(tiles, cases_of(tuning.facts)):
        say(line)


def _begin_file(out: Path, driver: Driver, is_fresh: bool) -> TileFile:
    """What is there already, if it is of this device and library."""
    now = TileFile(
        format=FORMAT,
        device=driver.facts.name,
        driver=driver_version(),
        gemm_version=driver.gemm_version(),
        triton=version("triton"),
        date=datetime.now(UTC).date().isoformat(),
        how=HOW,
    )
    before = read_tiles(out)
    if before is None or is_fresh:
        return now
    if (before.device, before.gemm_version, before.triton) != (now.device, now.gemm_version, now.triton):
        say(f"{out} is of {before.device}, cuBLAS {before.gemm_version}, Triton {before.triton}: it is made anew")
        return now
    return msgspec.structs.replace(now, gemm=before.gemm)


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Of NVIDIA's kernel module; for whoever reads the file."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text())
    except OSError:
        found = None
    return found.group() if found else "unknown"


def _measure(
    tuning: Tuning, driver: Driver, case: GemmCase, sizes: Sequence[int], may_begin: Callable[[], bool]
) -> Iterator[tuple[TileRange, dict[Kind, float]]]:
    """Of each size: what was chosen, and the host's time of one call of each kind."""
    if not sizes or not may_begin():
        return
    arch = driver.facts.arch
    glue = [image for recipe in glue_recipes(case.shape.dtype) if (image := tuning.candidates.image(recipe))]
    rig = GemmRig(driver, driver.create_stream(), glue, tuning.facts, case, max(sizes), say)
    try:
        for m in sizes:
            if not may_begin():
                return
            rig.set_rows(m)
            library = Contender("cublas", TileRange(m), None)
            algorithms = [algorithm_contender(m, algorithm) for algorithm in rig.algorithms(MAX_ALGORITHMS)]
            chosen = choose(library, [*algorithms, *tile_contenders(tuning.candidates, case, m, arch)], rig.race)
            yield chosen, dict(rig.host_us)
    finally:
        rig.close()


def tile_contenders(compiled: CandidateFolder, case: GemmCase, m: int, arch: str) -> Iterable[Contender]:
    """Those candidates that were compiled and fit the device."""
    for candidate, recipe in recipes_of(case, m, arch):
        if image := compiled.image(recipe):
            yield Contender("triton", _range(m, candidate), Tile(image, candidate.num_splits))


def _range(m: int, candidate: "Candidate") -> TileRange:
    return TileRange(
        m,
        kernel=candidate.kernel,
        constants=dict(candidate.constants),
        num_warps=candidate.num_warps,
        num_stages=candidate.num_stages,
        num_splits=candidate.num_splits,
    )


# The file


def _known(tiles: TileFile, case: GemmCase, m: int) -> TileRange | None:
    gemm = next((gemm for gemm in tiles.gemm if gemm.key == _key(case)), None)
    return next((range_ for range_ in gemm.range if range_.max_rows == m), None) if gemm else None


def with_range(tiles: TileFile, case: GemmCase, range_: TileRange) -> TileFile:
    """The file with one more measured size of a projection."""
    by_key = {gemm.key: gemm for gemm in tiles.gemm}
    before = by_key[_key(case)].range if _key(case) in by_key else ()
    ranges = {other.max_rows: other for other in (*before, range_)}
    by_key[_key(case)] = TileGemm(*_key(case), tuple(ranges[m] for m in sorted(ranges)))
    return msgspec.structs.replace(tiles, gemm=tuple(by_key.values()))


def _key(case: GemmCase) -> GemmKey:
    shape = case.shape
    assert shape.dtype in ("bfloat16", "float16"), shape
    return shape.operation, shape.dtype, shape.n, shape.k, shape.has_bias


def summary(tiles: TileFile, cases: Sequence[GemmCase]) -> Iterator[str]:
    """What the projections of a whole step take, at each number of rows at which all of them were measured."""
    for m in SIZES:
        measured = [(case.num_weights, _known(tiles, case, m)) for case in cases if m in case.sizes]
        found = [(count, range_.us, _chosen_us(range_)) for count, range_ in measured if range_ is not None]
        if len(found) == len(measured):
            library = sum(count * us["cublas"] for count, us, _ in found) / 1e3
            chosen = sum(count * us for count, _, us in found) / 1e3
            yield f"a step of {m:5} rows: cuBLAS {library:7.3f} ms, as chosen {chosen:7.3f} ms"


def _chosen_us(range_: TileRange) -> float:
    kind = "triton" if range_.kernel else "cublas_lt" if range_.algorithm else "cublas"
    return range_.us[kind]


def _line(case: GemmCase, range_: TileRange, host_us: dict[Kind, float]) -> str:
    times = "  ".join(f"{kind} {us:8.2f}" for kind, us in range_.us.items())
    host = "/".join(f"{us:.0f}" for us in host_us.values())
    return f"{case!s:36} m {range_.max_rows:5}  {times} us (host {host})  {describe(range_)}"


def describe(range_: TileRange) -> str:
    """What was chosen, in a few words."""
    if range_.kernel is None:
        return f"algorithm {range_.algorithm[:16]}" if range_.algorithm else "cuBLAS"
    sizes = " ".join(f"{name}={value}" for name, value in range_.constants.items())
    return f"{range_.kernel} {sizes} x{range_.num_splits}, {range_.num_warps} warps, {range_.num_stages} stages"


def say(text: str) -> None:
    """One line for whoever waits."""
    sys.stderr.write(f"tune-kernels: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
