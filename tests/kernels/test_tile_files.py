"""tiles/sm_XX.toml: what is written is read again, what is broken is named, and a build takes it into its manifest."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from server.errors import StartupError
from server.kernels import build as build_module
from server.kernels import manifest as manifest_module
from server.kernels.build import Job, build
from server.kernels.manifest import Manifest, ManifestImage, read_manifest, source_digests
from server.kernels.tile_files import TileFile, TileGemm, TileRange, read_tiles, render_tiles, tile_path, write_tiles
from server.ops.cuda.driver import GemmAlgorithm
from server.ops.cuda.tiles import NO_TABLE, GemmShape, Tile
from tests.ops.host_kernels import all_recipes

ALGORITHM = bytes(range(64))
RANGES = (
    TileRange(1, kernel="gate", constants={"BLOCK": 512}, num_warps=8, num_stages=3, num_splits=4, us={"cublas": 9.5}),
    TileRange(16, algorithm=ALGORITHM.hex(), workspace_bytes=4096, us={"cublas": 10.0, "cublas_lt": 8.25}),
    TileRange(64, us={"cublas": 12.0}),
    TileRange(128, kernel="gate", constants={"BLOCK": 1024}),  # as the spec has it
)
TILES = TileFile(
    format=1,
    device='An "H200"',
    driver="580.95.05",
    gemm_version=130101,
    triton="3.6.0",
    date="2026-12-01",
    how="medians of 5",
    gemm=(
        TileGemm("linear", "bfloat16", 4608, 3584, True, RANGES),
        TileGemm("logits", "float16", 152064, 3584, False, RANGES[2:3]),
    ),
)


@pytest.fixture
def tiles_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tiles"
    monkeypatch.setattr(manifest_module, "_TILES", folder)
    return folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What was compiled, by a stand-in for the compiler."""
    jobs: list[Job] = []

    def compile_all(folder: Path, new: Sequence[Job], num_processes: int) -> list[ManifestImage]:
        jobs.extend(new)
        return [build_module._save(folder, job, job.key.encode(), 0) for job in new]

    monkeypatch.setattr(build_module, "_compile_all", compile_all)
    return jobs


def content(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest


def test_what_is_written_is_read_again(tiles_folder: Path) -> None:
    path = tile_path("sm_90")
    assert path == tiles_folder / "sm_90.toml"
    assert read_tiles(path) is None
    write_tiles(path, TILES)
    assert read_tiles(path) == TILES
    assert [file.name for file in tiles_folder.iterdir()] == ["sm_90.toml"]


def test_a_file_can_be_read_by_people() -> None:
    lines = render_tiles(TILES).splitlines()
    assert "written by scripts/tune-kernels" in lines[0]
    assert 'device = "An \\"H200\\""' in lines
    assert "[[gemm]]" in lines
    assert "constants = { BLOCK = 512 }" in lines
    assert "us = { cublas = 10.0, cublas_lt = 8.25 }" in lines
    assert not any("num_splits = 1" in line for line in lines), "defaults are left out"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("format = 1", "format = 2"), "it says format 2, not 1"),
        (("max_rows = 16", "max_rows = 1"), r"linear 4608 x 3584: ranges up to \[1, 1, 64, 128\] do not ascend"),
        (("max_rows = 1\n", "max_rows = 0\n"), "range up to 0 rows"),
        (('algorithm = "00', 'algorithm = "'), "an algorithm has 64 bytes"),
        (('algorithm = "00', 'algorithm = "xx'), "non-hexadecimal"),
        (("workspace_bytes = 4096", 'kernel = "gate"'), "both a kernel and an algorithm"),
        (('operation = "logits"', 'operation = "gates"'), "Invalid enum value 'gates'"),
        (("num_warps = 8", "warps = 8"), "unknown field `warps`"),
        (("[[gemm]]", "[[gemm"), "Expected"),
    ],
)
def test_a_broken_file_is_named(tiles_folder: Path, change: tuple[str, str], message: str) -> None:
    text = render_tiles(TILES)
    assert change[0] in text
    tiles_folder.mkdir()
    path = tile_path("sm_90")
    path.write_text(text.replace(*change, 1))
    with pytest.raises(StartupError, match=rf"{path}: .*{message}.*; run scripts/tune-kernels again, or remove it"):
        read_tiles(path)


def test_two_entries_of_one_projection_are_refused(tiles_folder: Path) -> None:
    tiles_folder.mkdir()
    text = render_tiles(TILES)
    tile_path("sm_90").write_text(text + text[text.index("[[gemm]]") :])
    with pytest.raises(StartupError, match="two entries are of the same operation"):
        read_tiles(tile_path("sm_90"))


def test_a_build_compiles_what_was_tuned_and_hands_the_table_on(
    tiles_folder: Path, compiled: list[Job], tmp_path: Path
) -> None:
    write_tiles(tile_path("sm_90"), TILES)
    build(tmp_path / "built", ["sm_90", "sm_80"], 1)
    assert len(compiled) == 2 * len(all_recipes()) + 1, "one variant is the spec's own"
    (tuned,) = [job for job in compiled if job.is_tile]
    assert (tuned.arch, tuned.recipe.constants, tuned.recipe.num_warps, tuned.recipe.num_stages) == (
        "sm_90",
        {"BLOCK": 512},
        8,
        3,
    )
    manifest = content(tmp_path / "built")
    assert len(manifest.images("sm_90")) == len(all_recipes()), "whoever asks by name does not meet it"
    assert manifest.covers(64, "float16", "sm_90")
    assert manifest.gemm_table("sm_80") == NO_TABLE
    table = manifest.gemm_table("sm_90")
    assert table.gemm_version == 130101
    assert table.ranges[GemmShape("logits", "float16", 152064, 3584, False)].choices == (None,)
    ranges = table.ranges[GemmShape("linear", "bfloat16", 4608, 3584, True)]
    assert ranges.max_rows == (1, 16, 64, 128)
    first, algorithm, library, last = ranges.choices
    assert isinstance(first, Tile)
    assert (first.image.constants, first.image.num_warps, first.num_splits) == ({"BLOCK": 512}, 8, 4)
    assert first.image.path.exists()
    assert algorithm == GemmAlgorithm(ALGORITHM, 4096)
    assert library is None
    assert isinstance(last, Tile)
    assert (last.image.constants, last.num_splits) == ({"BLOCK": 1024}, 1)


def test_a_table_that_changes_is_built_again_and_its_kernels_go_with_it(
    tiles_folder: Path, compiled: list[Job], tmp_path: Path
) -> None:
    folder = tmp_path / "built"
    write_tiles(tile_path("sm_90"), TILES)
    build(folder, ["sm_90"], 1)
    compiled.clear()
    tile_path("sm_90").unlink()
    with pytest.raises(StartupError, match=r"tiles/sm_90.toml changed since; run scripts/build-kernels"):
        read_manifest(folder)
    build(folder, ["sm_90"], 1)
    assert compiled == []
    assert content(folder).gemm_table("sm_90") == NO_TABLE
    assert len(list(folder.glob("sm_90/*"))) == len(all_recipes())


def test_a_file_of_tiles_counts_among_the_sources(tiles_folder: Path) -> None:
    before = source_digests()
    write_tiles(tile_path("sm_90"), TILES)
    first = source_digests()["tiles/sm_90.toml"]
    write_tiles(tile_path("sm_90"), msgspec.structs.replace(TILES, date="2026-12-02"))
    after = source_digests()
    assert after.pop("tiles/sm_90.toml") != first
    assert after == before


@pytest.mark.parametrize(("kernel", "dtype"), [("nothing", "bfloat16"), ("sum_words", "bfloat16")])
def test_a_table_of_unknown_kernels_is_not_built(
    tiles_folder: Path, compiled: list[Job], tmp_path: Path, kernel: str, dtype: str
) -> None:
    gemm = TileGemm("linear", dtype, 8, 8, False, (TileRange(1, kernel=kernel),))
    write_tiles(tile_path("sm_90"), msgspec.structs.replace(TILES, gemm=(gemm,)))
    with pytest.raises(StartupError, match=f"no kernel is named {kernel} and takes {dtype}"):
        build(tmp_path / "built", ["sm_90"], 1)
