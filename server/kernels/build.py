"""Compiles every kernel ahead of time. Run by scripts/build-kernels, never while serving.

Owns the folder that manifest.py describes. A file is kept as long as nothing that went into it has changed, and a build
that is interrupted leaves the manifest as it was.
"""

import argparse
import ast
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from server.errors import StartupError
from server.kernels.manifest import (
    FORMAT,
    MANIFEST_FILE,
    MIN_CAPABILITY,
    PORTABLE_ARCH,
    ManifestChoice,
    ManifestFile,
    ManifestGemm,
    ManifestImage,
    ManifestParameter,
    ManifestTable,
    built_folder,
    decode_manifest,
    kernel_files,
    source_digests,
)
from server.kernels.tile_files import TileRange, read_tiles, tile_path

if TYPE_CHECKING:
    from server.kernels.catalog import Recipe

CUBIN_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
ALL_ARCHS = (*CUBIN_ARCHS, PORTABLE_ARCH)
EXIT_FAILED = 1
EXIT_USAGE = 2
_CACHE_PREFIX = ".triton-"
_BUILDERS = ("build.py", "catalog.py", "compiler.py", "cubin.py", "manifest.py", "spec.py", "tile_files.py")


@dataclass(frozen=True, slots=True)
class Job:
    """One file of the folder: what it is made from, and the hash of all of that.

    `is_tile`: only a table of GEMMs asks for it.
    """

    recipe: "Recipe"
    arch: str
    key: str
    is_tile: bool = False

    @property
    def file(self) -> str:
        """Relative to the folder."""
        suffix = "ptx" if self.arch == PORTABLE_ARCH else "cubin"
        return f"{self.arch}/{self.recipe.name}-{self.key[:16]}.{suffix}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="scripts/build-kernels", description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", action="append", choices=ALL_ARCHS, help="may be repeated; default: this machine's")
    parser.add_argument("--all", action="store_true", help=f"all of {', '.join(ALL_ARCHS)}")
    parser.add_argument("--one-variant", action="store_true", help="the first variant of each kernel: for tests")
    parser.add_argument("--out", type=Path, help="folder; needed with --one-variant")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    options = parser.parse_args(arguments)
    if options.one_variant and options.out is None:
        parser.error("--one-variant needs --out, so that it does not replace what is served")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        _say("TRITON_INTERPRET is set, which makes Python of kernels; unset it")
        return EXIT_USAGE
    archs = ALL_ARCHS if options.all else tuple(options.arch or archs_present())
    if not archs:
        _say("no GPU of capability 8.0 or more here, so no kernels are built (--arch and --all build for others)")
        return 0
    try:
        build(options.out or built_folder(), archs, options.jobs, is_partial=options.one_variant)
    except (StartupError, OSError) as error:
        _say(str(error))
        return EXIT_FAILED
    return 0


def archs_present() -> tuple[str, ...]:
    """What the GPUs of this machine need, as nvidia-smi names them; nothing where it is missing or finds none."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ()
    digits = (line.strip().replace(".", "") for line in found.splitlines())
    archs = {f"sm_{capability}" for capability in digits if capability.isdigit() and int(capability) >= MIN_CAPABILITY}
    return tuple(sorted({arch if arch in CUBIN_ARCHS else PORTABLE_ARCH for arch in archs}))


def build(folder: Path, archs: Sequence[str], num_processes: int, *, is_partial: bool = False) -> None:
    """Make `folder` hold the kernels for `archs`; what it has for other architectures stays if it is still right.

    `is_partial`: only the first variant of each kernel. Raises StartupError if a kernel cannot be compiled or is not
    what launches expect.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        sources = source_digests()
        manifest = _read_manifest(folder)
        intact = {image.key: image for image in manifest.images if _is_intact(folder, image)} if manifest else {}
        if (
            manifest
            and not is_partial
            and _is_current(manifest, sources, archs)
            and len(intact) == len(manifest.images)
        ):
            _say(f"{len(intact)} kernels in {folder} are up to date")
            return
        jobs = _jobs(archs, is_partial)
        other_jobs = _jobs([arch for arch in manifest.archs if arch not in archs] if manifest else [], is_partial=False)
        stale = {job.arch for job in other_jobs if job.key not in intact}
        others = [job for job in other_jobs if job.arch not in stale]
        missing = [job for job in jobs if job.key not in intact]
        images = intact | {image.key: image for image in _compile_all(folder, missing, num_processes)}
        if source_digests() != sources:
            raise StartupError("sources of kernels changed while they were compiled; run it again")
        complete = {job.arch for job in (others if is_partial else [*jobs, *others])}
        wanted = [msgspec.structs.replace(images[job.key], is_tile=job.is_tile) for job in (*jobs, *others)]
        tables = [table for arch in sorted(complete) if (table := _table(arch))]
        _write_manifest(folder, sources, complete, wanted, tables)
        _say(f"{len(missing)} kernels compiled, {len(jobs) + len(others) - len(missing)} kept in {folder}")


# What there is


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One build of a folder at a time; another one waits. What a killed one left is cleared away."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_over in folder.glob(f"{_CACHE_PREFIX}*"):
            shutil.rmtree(left_over)
        yield


def _read_manifest(folder: Path) -> ManifestFile | None:
    """A manifest that cannot be read is as good as none: everything is built."""
    try:
        return decode_manifest((folder / MANIFEST_FILE).read_bytes())
    except (OSError, msgspec.MsgspecError):
        return None


def _is_intact(folder: Path, image: ManifestImage) -> bool:
    try:
        return _sha256((folder / image.file).read_bytes()) == image.sha256
    except OSError:
        return False


def _is_current(manifest: ManifestFile, sources: dict[str, str], archs: Iterable[str]) -> bool:
    """Told without Triton, whose import costs a second."""
    return (
        (manifest.triton, manifest.builder) == (version("triton"), _builder_digest())
        and manifest.sources == sources
        and set(archs) <= set(manifest.archs)
    )


# What there should be


def _jobs(archs: Iterable[str], is_partial: bool) -> list[Job]:
    from server.kernels.catalog import all_specs, expand  # needs Triton

    recipes = [recipe for spec in all_specs() for recipe in expand(spec)[: 1 if is_partial else None]]
    if is_partial:
        return make_jobs((recipe, arch) for arch in archs for recipe in recipes)
    jobs = make_jobs((recipe, arch) for arch in archs for recipe in recipes)
    keys = {job.key for job in jobs}
    tiles = make_jobs((recipe, arch) for arch in archs for recipe in _tile_recipes(arch))
    return [*jobs, *(replace(job, is_tile=True) for job in tiles if job.key not in keys)]


def make_jobs(recipes: Iterable[tuple["Recipe", str]]) -> list[Job]:
    """One for each recipe and architecture, without repetitions."""
    key_of = key_maker()
    jobs = (Job(recipe, arch, key_of(recipe, arch)) for recipe, arch in recipes)
    return list({job.key: job for job in jobs}.values())


def key_maker() -> "Callable[[Recipe, str], str]":
    """Gives the hash of all that goes into a file. Sources are read once: it is good for as long as they are."""
    builder = f"{version('triton')} {_builder_digest()}"
    module_digest = cache(_module_digest)

    def key_of(recipe: "Recipe", arch: str) -> str:
        return _sha256(json.dumps([asdict(recipe), arch, module_digest(recipe.module), builder]).encode())

    return key_of


def _tile_recipes(arch: str) -> "list[Recipe]":
    """Those that an architecture's file of tiles names."""
    tiles = read_tiles(tile_path(arch))
    ranges = [(gemm.dtype, range_) for gemm in (tiles.gemm if tiles else ()) for range_ in gemm.range]
    return [_tile_recipe(dtype, range_) for dtype, range_ in ranges if range_.kernel is not None]


def _tile_recipe(dtype: str, range_: TileRange) -> "Recipe":
    from server.kernels.catalog import variant_recipe  # needs Triton

    assert range_.kernel is not None
    return variant_recipe(range_.kernel, dtype, range_.variant)


def _builder_digest() -> str:
    """Of the code that decides how a source is compiled."""
    folder = Path(__file__).parent
    return _sha256(b"".join((folder / name).read_bytes() for name in _BUILDERS))


def _module_digest(module: str) -> str:
    """Of a kernel's source file and of all that it imports from this folder, directly or not."""
    files = {path.stem: path for path in kernel_files()}
    seen: set[str] = set()
    unseen = {module}
    while unseen:
        name = unseen.pop()
        seen.add(name)
        unseen |= (_imported_names(files[name]) & files.keys()) - seen
    return _sha256(b"".join(files[name].read_bytes() for name in sorted(seen)))


def _imported_names(path: Path) -> set[str]:
    """The last part of every module and name that is imported: more than modules, which does no harm."""
    names: set[str] = set()
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.name.rpartition(".")[2] for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.rpartition(".")[2])
    return names


# What is made


def _compile_all(folder: Path, jobs: Sequence[Job], num_processes: int) -> list[ManifestImage]:
    if not jobs:
        return []
    num_workers = max(1, min(num_processes, len(jobs)))
    _say(f"compiling {len(jobs)} kernels for {', '.join(sorted({job.arch for job in jobs}))}, {num_workers} at a time")
    with compiler_pool(folder, num_workers) as pool:
        return [future.result() for future in [pool.submit(compile_job, folder, job) for job in jobs]]


@contextmanager
def compiler_pool(folder: Path, num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes for `compile_job`, with caches below `folder` while it lasts. An error ends what has not begun."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=_CACHE_PREFIX) as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # the same bytes wherever the sources lie
        # Forked processes have Triton imported already, and no compilation has started threads in this one.
        with ProcessPoolExecutor(num_workers, get_context("fork")) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def compile_job(folder: Path, job: Job) -> ManifestImage:
    """Write its file. Raises StartupError if it cannot be compiled or is not what launches expect."""
    from server.kernels.compiler import compile_recipe

    kernel = compile_recipe(job.recipe, job.arch)
    return _save(folder, job, kernel.data, kernel.shared_bytes, waits=kernel.waits)


def _save(folder: Path, job: Job, data: bytes, shared_bytes: int, *, waits: bool = False) -> ManifestImage:
    recipe = job.recipe
    _write_aside(folder / job.file, data)
    return ManifestImage(
        name=recipe.name,
        arch=job.arch,
        dtype=recipe.dtype,
        source=recipe.source,
        constants=recipe.constants,
        parameters=tuple(ManifestParameter(p.name, p.type, p.alignment) for p in recipe.parameters),
        entry=recipe.function,
        num_warps=recipe.num_warps,
        shared_bytes=shared_bytes,
        file=job.file,
        num_bytes=len(data),
        sha256=_sha256(data),
        key=job.key,
        is_tile=job.is_tile,
        waits=waits,
    )


def _table(arch: str) -> ManifestTable | None:
    """What the file of tiles says, with the compiled files of its kernels."""
    tiles = read_tiles(tile_path(arch))
    if tiles is None:
        return None
    gemms = (
        ManifestGemm(*gemm.key, tuple(_choice(arch, gemm.dtype, range_) for range_ in gemm.range))
        for gemm in tiles.gemm
    )
    return ManifestTable(arch, tiles.gemm_version, tuple(gemms))


def _choice(arch: str, dtype: str, range_: TileRange) -> ManifestChoice:
    file = None if range_.kernel is None else make_jobs([(_tile_recipe(dtype, range_), arch)])[0].file
    return ManifestChoice(range_.max_rows, file, range_.num_splits, range_.algorithm, range_.workspace_bytes)


def _write_manifest(
    folder: Path,
    sources: dict[str, str],
    archs: Iterable[str],
    images: Sequence[ManifestImage],
    tables: Sequence[ManifestTable],
) -> None:
    """The manifest comes last, then go the files that it does not name."""
    manifest = ManifestFile(
        FORMAT, version("triton"), _builder_digest(), sources, tuple(sorted(archs)), tuple(images), tuple(tables)
    )
    _write_aside(folder / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    named = {folder / image.file for image in images}
    for path in folder.glob("*/*"):
        if path.parent.name in ALL_ARCHS and path not in named:
            path.unlink()


def _write_aside(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(data)
    aside.replace(path)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _say(text: str) -> None:
    sys.stderr.write(f"build-kernels: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
