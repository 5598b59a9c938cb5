"""scripts/tune-kernels on a GPU, with a tiny model: what it writes is complete, and is kept by a second run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.kernels.tile_files import read_tiles
from server.ops.cuda.nvidia import NvidiaDriver

ROOT = Path(__file__).parents[2]
SIZES = (1, 16, 192)


def run_tuning(*arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    command = [sys.executable, "-m", "server.kernels.tuning", "--shape", "tiny-qwen2", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.timeout(600)
def test_a_tiny_model_is_tuned(device: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out, compiled = tmp_path / "tiles.toml", tmp_path / "compiled"
    arguments = ["--out", str(out), "--compiled", str(compiled), *(f"--m={size}" for size in SIZES)]
    said = run_tuning(*arguments)
    assert "WRONG RESULT" not in said
    tiles = read_tiles(out)
    assert tiles is not None
    driver = NvidiaDriver.open()
    driver.prepare_gemms()
    assert (tiles.device, tiles.gemm_version) == (driver.facts.name, driver.gemm_version())
    assert {gemm.operation for gemm in tiles.gemm} == {"linear", "gated_linear", "linear_add_norm", "logits"}
    for gemm in tiles.gemm:
        assert tuple(range_.max_rows for range_ in gemm.range) == SIZES
        for range_ in gemm.range:
            assert {"cublas", "cublas_lt"} <= range_.us.keys()
            assert all(0.5 < us < 1000 for us in range_.us.values())
    again = run_tuning(*arguments)
    assert " us (host" not in again, "everything was there"
    assert "compiling" not in again
    assert read_tiles(out) == tiles
