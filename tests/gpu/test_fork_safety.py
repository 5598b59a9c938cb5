"""What a fork check must see on a machine with a GPU: imports do no harm, a context does."""

import subprocess
import sys

SCRIPT = """
import torch
from server.launch.fork_check import fork_violations
print(fork_violations())
torch.ones(1, device="cuda")
print(fork_violations())
"""


def test_importing_torch_is_harmless_and_using_it_is_not() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, after = done.stdout.splitlines()
    assert "CUDA" not in before
    assert "nvidia" not in before
    assert "CUDA is initialised" in after
    assert "/dev/nvidia" in after
