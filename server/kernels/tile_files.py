"""tiles/sm_XX.toml: which way each GEMM is best computed on one architecture, as it was measured.

scripts/tune-kernels writes such files, scripts/build-kernels reads them; what serves reads the manifest instead.
"""

import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from server.errors import StartupError
from server.kernels.manifest import tiles_folder
from server.kernels.spec import Constant, Variant
from server.ops.cuda.tiles import GemmOperation

FORMAT = 1
ALGORITHM_BYTES = 64

_HEADER = """\
# Which way each GEMM is computed: written by scripts/tune-kernels, and by nothing else.
# A range is for more rows than the one before and up to max_rows; without kernel and algorithm cuBLAS chooses.
# us: medians in microseconds of its own choice, of the best algorithm and of the best kernel.
"""


GemmKey = tuple[GemmOperation, Literal["bfloat16", "float16"], int, int, bool]  # operation, dtype, n, k, bias


class TileRange(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A kernel of gemm.py with its constants, or an algorithm of cublasLt (hexadecimal), or neither."""

    max_rows: int
    kernel: str | None = None
    constants: dict[str, Constant] = {}
    num_warps: int = 4
    num_stages: int = 2
    num_splits: int = 1
    algorithm: str | None = None
    workspace_bytes: int = 0
    us: dict[str, float] = {}

    @property
    def variant(self) -> Variant:
        """Of the kernel."""
        return Variant(self.constants, self.num_warps, self.num_stages)

    def __post_init__(self) -> None:
        if self.kernel is not None and self.algorithm is not None:
            raise ValueError(f"range up to {self.max_rows}: both a kernel and an algorithm")
        if self.algorithm is not None and len(bytes.fromhex(self.algorithm)) != ALGORITHM_BYTES:
            raise ValueError(f"range up to {self.max_rows}: an algorithm has {ALGORITHM_BYTES} bytes")
        if self.max_rows < 1 or self.num_splits < 1:
            raise ValueError(f"range up to {self.max_rows} rows with {self.num_splits} splits")


class TileGemm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A projection by weights [n, k], in ranges of rows that ascend."""

    operation: GemmOperation
    dtype: Literal["bfloat16", "float16"]
    n: int
    k: int
    bias: bool
    range: tuple[TileRange, ...]

    def __post_init__(self) -> None:
        rows = [range_.max_rows for range_ in self.range]
        if rows != sorted(set(rows)):
            raise ValueError(f"{self.operation} {self.n} x {self.k}: ranges up to {rows} do not ascend")

    @property
    def key(self) -> GemmKey:
        """What there is one entry of."""
        return self.operation, self.dtype, self.n, self.k, self.bias


class TileFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole file. Algorithms are good for `gemm_version` of cublasLt alone."""

    format: int
    device: str
    driver: str
    gemm_version: int
    triton: str
    date: str
    how: str
    gemm: tuple[TileGemm, ...] = ()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"it says format {self.format}, not {FORMAT}")
        if len({gemm.key for gemm in self.gemm}) != len(self.gemm):
            raise ValueError("two entries are of the same operation, dtype, n, k and bias")


def tile_path(arch: str) -> Path:
    """Where the file of an architecture is, if it has been tuned."""
    return tiles_folder() / f"{arch}.toml"


def read_tiles(path: Path) -> TileFile | None:
    """None if there is no such file. Raises StartupError if it is broken."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), TileFile)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # msgspec's and tomllib's are ValueErrors
        raise StartupError(f"{path}: {error}; run scripts/tune-kernels again, or remove it") from None


def write_tiles(path: Path, tiles: TileFile) -> None:
    """The whole file at once: whoever reads meanwhile sees the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(render_tiles(tiles))
    aside.replace(path)


def render_tiles(tiles: TileFile) -> str:
    """The text of the file."""
    head = {name: value for name, value in msgspec.to_builtins(tiles).items() if name != "gemm"}
    lines = [_HEADER, *_pairs(head)]
    for gemm in tiles.gemm:
        fields = msgspec.to_builtins(gemm)
        ranges = fields.pop("range")
        lines += ["", "[[gemm]]", *_pairs(fields)]
        for range_ in ranges:
            lines += ["[[gemm.range]]", *_pairs(range_)]
    return "\n".join(lines) + "\n"


def _pairs(values: dict[str, object]) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in values.items()]


def _toml(value: object) -> str:
    """Strings here hold nothing that JSON and TOML write differently."""
    if isinstance(value, dict):
        return "{ " + ", ".join(_pairs(value)) + " }" if value else "{}"
    return msgspec.json.encode(value).decode()
