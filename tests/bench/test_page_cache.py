"""The page cache is shown as the kernel sees it."""

import os
from pathlib import Path

import pytest

from server.bench.page_cache import evict, read_files, resident_share

NUM_BYTES = (5 << 20) + 123


@pytest.fixture
def files() -> list[Path]:
    """Two files on a disk: the temporary folder may be memory, which cannot be cold."""
    folder = Path(__file__).parent
    paths = [folder / f".page-cache-{os.getpid()}-{number}" for number in range(2)]
    for path in paths:
        path.write_bytes(os.urandom(NUM_BYTES))
    yield paths
    for path in paths:
        path.unlink()


def test_written_files_are_resident_until_they_are_evicted_and_again_when_they_were_read(files: list[Path]) -> None:
    assert resident_share(files) == 1.0
    evict(files)
    if resident_share(files) == 1.0:
        pytest.skip("this file system keeps everything in memory")
    assert resident_share(files) == 0.0
    assert read_files(files[:1]) > 0
    assert resident_share(files) == pytest.approx(0.5, abs=0.01)
    assert read_files(files) > 0
    assert resident_share(files) == 1.0


def test_a_bounded_read_stops_early(files: list[Path]) -> None:
    evict(files)
    if resident_share(files) == 1.0:
        pytest.skip("this file system keeps everything in memory")
    read_files(files, max_bytes=4 << 20)
    assert resident_share(files) < 0.9


def test_empty_files_are_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert resident_share([tmp_path / "empty"]) == 1.0
