"""Which compiled kernels there are, read at start. Knows files and JSON; does not know Triton or CUDA.

built/manifest.json                 written last by scripts/build-kernels
built/sm_90/rms_norm-1f0c....cubin  one file per architecture, kernel, dtype and variant
built/compute_80/....ptx            for every device that has no cubin
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from server.errors import StartupError
from server.ops.cuda.driver import GemmAlgorithm, KernelImage, Parameter
from server.ops.cuda.tiles import NO_TABLE, GemmChoice, GemmOperation, GemmRanges, GemmShape, GemmTable, Tile

FORMAT = 1
MANIFEST_FILE = "manifest.json"
PORTABLE_ARCH = "compute_80"  # PTX, which the driver compiles for the device it finds
MIN_CAPABILITY = 80
REBUILD = "run scripts/build-kernels"

_SOURCES = Path(__file__).parent
_TILES = _SOURCES / "tiles"
_NO_KERNELS = ("__init__", "build", "candidates", "catalog", "compiler", "cubin", "manifest", "spec", "tile_files")


class ManifestParameter(msgspec.Struct, frozen=True):
    """A run-time argument: Triton's name of its type, and the multiple that it must be of."""

    name: str
    type: str
    alignment: int


class ManifestImage(msgspec.Struct, frozen=True):
    """One compiled variant. `file` is relative to the folder; `key` is the hash of all that went into it.

    `is_tile`: it is there for a table of GEMMs alone. `waits`: as in KernelImage.
    """

    name: str
    arch: str
    dtype: str | None
    source: str
    constants: dict[str, bool | int | float | str]
    parameters: tuple[ManifestParameter, ...]
    entry: str
    num_warps: int
    shared_bytes: int
    file: str
    num_bytes: int
    sha256: str
    key: str
    is_tile: bool = False
    waits: bool = False


class ManifestChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """Up to max_rows: the image of that file, or the algorithm of cublasLt (hexadecimal), or cuBLAS as it chooses."""

    max_rows: int
    file: str | None = None
    num_splits: int = 1
    algorithm: str | None = None
    workspace_bytes: int = 0


class ManifestGemm(msgspec.Struct, frozen=True):
    """A projection by weights [n, k]; choices ascend by their rows."""

    operation: GemmOperation
    dtype: Literal["bfloat16", "float16"]
    n: int
    k: int
    has_bias: bool
    choices: tuple[ManifestChoice, ...]


class ManifestTable(msgspec.Struct, frozen=True):
    """What tiles/ has for one architecture."""

    arch: str
    gemm_version: int
    gemms: tuple[ManifestGemm, ...]


class ManifestFile(msgspec.Struct, frozen=True):
    """manifest.json. `sources`, `builder`: hashes of the kernels and of what builds; `archs`: complete ones."""

    format: int
    triton: str
    builder: str
    sources: dict[str, str]
    archs: tuple[str, ...]
    images: tuple[ManifestImage, ...]
    tables: tuple[ManifestTable, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The compiled kernels of a folder."""

    folder: Path
    content: ManifestFile

    @property
    def archs(self) -> tuple[str, ...]:
        """ "sm_90" and the like for cubins, "compute_80" for PTX that any newer device takes."""
        return tuple(sorted({image.arch for image in self.content.images}))

    def covers(self, head_dim: int, dtype: str, arch: str | None = None) -> bool:
        """Whether every kernel is there for a model's head_dim and dtype: for `arch`, or for any architecture."""
        archs = self.archs if arch is None else (self._choose(arch),)
        return any(self._covers(head_dim, dtype, chosen) for chosen in archs if chosen is not None)

    def images(self, arch: str) -> tuple[KernelImage, ...]:
        """The kernels for a device: its own, else PTX.

        Raises StartupError if there are none, or if a file is missing or cut off.
        """
        chosen = self._choose(arch)
        if chosen is None and capability_of(arch) < MIN_CAPABILITY:
            raise StartupError(
                f"the kernels of the cuda backend need a GPU of compute capability {MIN_CAPABILITY / 10:.1f} or more, "
                f'this one is {arch}; set engine.backend = "torch"'
            )
        if chosen is None:
            raise StartupError(
                f"{self.folder / MANIFEST_FILE} has kernels for {', '.join(self.archs) or 'nothing'}, "
                f"none that {arch} can run; {REBUILD} on this machine, or with --all"
            )
        return tuple(self._checked(image) for image in self._of(chosen))

    def gemm_table(self, arch: str) -> GemmTable:
        """How projections are best computed on a device of this architecture; empty if that was not measured.

        Raises StartupError if a file is missing or cut off.
        """
        table = next((table for table in self.content.tables if table.arch == arch), None)
        if table is None:
            return NO_TABLE
        needed = {choice.file for gemm in table.gemms for choice in gemm.choices}
        images = {image.file: self._checked(image) for image in self.content.images if image.file in needed}
        return GemmTable(table.gemm_version, {_shape(gemm): _ranges(gemm, images) for gemm in table.gemms})

    def _of(self, arch: str) -> Iterable[ManifestImage]:
        return (image for image in self.content.images if image.arch == arch and not image.is_tile)

    def _choose(self, arch: str) -> str | None:
        if arch in self.archs:
            return arch
        is_portable = PORTABLE_ARCH in self.archs and capability_of(arch) >= MIN_CAPABILITY
        return PORTABLE_ARCH if is_portable else None

    def _covers(self, head_dim: int, dtype: str, arch: str) -> bool:
        images = tuple(self._of(arch))
        needed = {(image.name, "HEAD_DIM" in image.constants) for image in images}
        found = {
            (image.name, "HEAD_DIM" in image.constants)
            for image in images
            if image.dtype in (None, dtype) and image.constants.get("HEAD_DIM", head_dim) == head_dim
        }
        return found == needed and any(depends for _, depends in needed)

    def _checked(self, image: ManifestImage) -> KernelImage:
        path = self.folder / image.file
        try:
            found = path.stat().st_size
        except OSError as error:
            raise StartupError(f"compiled kernel {path}: {error.strerror}; {REBUILD}") from None
        if found != image.num_bytes:
            raise StartupError(f"compiled kernel {path} has {found} bytes instead of {image.num_bytes}; {REBUILD}")
        return KernelImage(
            image.name,
            image.source,
            image.constants,
            tuple(Parameter(p.name, p.type, p.alignment) for p in image.parameters),
            image.entry,
            image.num_warps,
            image.shared_bytes,
            path,
            image.waits,
        )


def _shape(gemm: ManifestGemm) -> GemmShape:
    return GemmShape(gemm.operation, gemm.dtype, gemm.n, gemm.k, gemm.has_bias)


def _ranges(gemm: ManifestGemm, images: dict[str, KernelImage]) -> GemmRanges:
    choices = tuple(_choice(choice, images) for choice in gemm.choices)
    return GemmRanges(tuple(choice.max_rows for choice in gemm.choices), choices)


def _choice(choice: ManifestChoice, images: dict[str, KernelImage]) -> GemmChoice:
    if choice.file is not None:
        return Tile(images[choice.file], choice.num_splits)
    if choice.algorithm is not None:
        return GemmAlgorithm(bytes.fromhex(choice.algorithm), choice.workspace_bytes)
    return None


def tiles_folder() -> Path:
    """Where scripts/tune-kernels writes what it measured, and a build reads it."""
    return _TILES


def built_folder() -> Path:
    """Where scripts/build-kernels writes unless told otherwise."""
    return _SOURCES / "built"


def read_manifest(folder: Path) -> Manifest | None:
    """What was built in `folder`; none if nothing was.

    Raises StartupError if the manifest is broken, of another version, or older than the kernels' sources.
    """
    path = folder / MANIFEST_FILE
    try:
        content = decode_manifest(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StartupError(f"{path}: {error.strerror}; {REBUILD}") from None
    except msgspec.MsgspecError as error:
        raise StartupError(f"{path} is not a kernel manifest of format {FORMAT}: {error}; {REBUILD}") from None
    current = source_digests()
    changed = sorted(
        name for name in content.sources.keys() | current if content.sources.get(name) != current.get(name)
    )
    if changed:
        raise StartupError(f"{path} was built from other sources: {', '.join(changed)} changed since; {REBUILD}")
    return Manifest(folder, content)


def decode_manifest(data: bytes) -> ManifestFile:
    """Raises msgspec.MsgspecError if it is anything but a manifest of this version's format."""
    found = msgspec.json.decode(data, type=_Versioned).format
    if found != FORMAT:
        raise msgspec.ValidationError(f"it says format {found}")
    return msgspec.json.decode(data, type=ManifestFile)


class _Versioned(msgspec.Struct):
    format: int


def capability_of(arch: str) -> int:
    """90 of "sm_90"."""
    return int(arch.partition("_")[2])


def kernel_files() -> tuple[Path, ...]:
    """The source files of kernels, by name; also those that only other kernels import."""
    return tuple(sorted(path for path in _SOURCES.glob("*.py") if path.stem not in _NO_KERNELS))


def source_digests() -> dict[str, str]:
    """SHA-256 of each kernel source file by its name, and of each file of tiles/."""
    files = {path.name: path for path in kernel_files()}
    files |= {f"{_TILES.name}/{path.name}": path for path in sorted(_TILES.glob("*.toml"))}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
