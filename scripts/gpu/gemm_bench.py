"""Every tile that tuning tries for a projection, with its speed or what it takes of a multiprocessor.

    gemm_bench.py speed OPERATION M [--compiled DIR]   on a GPU: microseconds, TB/s of weights, TFLOP/s, beside cuBLAS
    gemm_bench.py resources DIR                        anywhere: registers, stack, shared memory of what DIR has

DIR is what scripts/tune-kernels --compile-only has filled. scripts/tune-kernels keeps only winners; this shows by how
much they win, and which tiles are never worth being tried. Shapes are those of Qwen2-7B in bfloat16.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.pop("TRITON_INTERPRET", None)  # it would make Python of the kernels

import msgspec  # noqa: E402

from server.cli.make_model import SHAPES  # noqa: E402
from server.kernels.tile_files import TileRange  # noqa: E402
from server.kernels.tuning.__main__ import describe, glue_recipes, recipes_of, say, tile_contenders  # noqa: E402
from server.kernels.tuning.cases import GemmCase, cases_of  # noqa: E402
from server.kernels.tuning.choose import Contender  # noqa: E402
from server.kernels.tuning.compiled import CandidateFolder, CompiledCandidates  # noqa: E402
from server.kernels.tuning.rig import GemmRig  # noqa: E402
from server.models.facts import facts_from_config  # noqa: E402
from server.ops.cuda.nvidia import NvidiaDriver  # noqa: E402
from server.ops.cuda.tiles import GEMM_OPERATIONS  # noqa: E402

FACTS = facts_from_config(SHAPES["qwen2-7b"] | {"dtype": "bfloat16"})


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    speed = commands.add_parser("speed")
    speed.add_argument("operation", choices=GEMM_OPERATIONS)
    speed.add_argument("m", type=int)
    speed.add_argument("--compiled", type=Path)
    resources = commands.add_parser("resources")
    resources.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "resources":
        show_resources(options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        for case in cases_of(FACTS):
            if case.shape.operation == options.operation:
                show_speed(case, options.m, options.compiled or Path(folder))


def show_speed(case: GemmCase, m: int, folder: Path) -> None:
    """Fastest first; what is beside a projection in its operation (a norm, say) is timed with it."""
    driver = NvidiaDriver.open()
    arch = driver.facts.arch
    compiled = CandidateFolder(folder, arch)
    glue = glue_recipes(case.shape.dtype)
    compiled.compile([*glue, *(recipe for _, recipe in recipes_of(case, m, arch))], len(os.sched_getaffinity(0)), say)
    driver.prepare_gemms()
    images = [image for recipe in glue if (image := compiled.image(recipe))]
    rig = GemmRig(driver, driver.create_stream(), images, FACTS, case, m, say)
    rig.set_rows(m)
    contenders = [Contender("cublas", TileRange(m), None)]
    contenders += tile_contenders(compiled, case, m, arch)
    timed = [(us, each) for each in contenders if (us := rig.race.quick_us(each)) is not None]
    weights = case.shape.n * case.shape.k
    print(f"{case}, {m} rows, {driver.facts.name}")
    for us, each in sorted(timed, key=lambda pair: pair[0]):
        rates = f"{weights * 2 / us / 1e6:6.2f} TB/s {2 * m * weights / us / 1e6:7.1f} TFLOP/s"
        print(f"{us:9.2f} us {rates}  {'' if rig.race.is_right(each) else 'WRONG '}{describe(each.range)}")
    rig.close()


def show_resources(folder: Path) -> None:
    """One line for each cubin, those that use the stack first."""
    import triton

    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    compiled = msgspec.json.decode((folder / "candidates.json").read_bytes(), type=CompiledCandidates)
    lines = []
    for image in compiled.images.values():
        command = [dump, "--dump-resource-usage", folder / image.file]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", text)
        assert found, f"{image.file}: cuobjdump says {text!r}"
        constants = " ".join(f"{name}={value}" for name, value in image.constants.items())
        sizes = f"{found[1]:>4} registers {found[2]:>4} B stack {image.shared_bytes:>7} B shared"
        lines.append((-int(found[2]), f"{sizes}  {image.name} {constants}, {image.num_warps} warps"))
    for _, line in sorted(lines):
        print(line)
    print(*compiled.failures.values(), sep="\n")


if __name__ == "__main__":
    main()
