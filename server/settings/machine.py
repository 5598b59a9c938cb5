"""What this machine offers, found by looking at files only: a CUDA call before the last fork would poison every child.

Knows device nodes, libraries and CPU limits. Does not know settings.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil
from pathlib import Path

from server.ops.cuda.cublas import LIBRARY_NAMES, WHEEL_FOLDERS

_LIBRARY_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/usr/lib/wsl/lib",
)
_LIBCUDA = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class Machine:
    """`num_cores` are those that this process may use: affinity and the control group's quota are counted.

    `memory_bytes` is what the machine has in all. `torch_has_cuda`: the installed PyTorch is not a build for CPUs only.
    """

    num_cores: int
    memory_bytes: int
    num_gpus: int
    libcuda_path: str | None
    has_torch: bool
    torch_has_cuda: bool = False
    has_cuda_bindings: bool = False
    has_cublas: bool = False

    @property
    def has_cuda(self) -> bool:
        """Whether a context could be made here, as far as files tell."""
        return self.num_gpus > 0 and self.libcuda_path is not None


def detect_machine(root: Path = Path("/")) -> Machine:
    """Look at this machine; `root` is another one's file system in tests and images (packages stay this Python's)."""
    torch_folder = next(iter(_package_folders("torch")), None)
    return Machine(
        num_cores=min(len(os.sched_getaffinity(0)), quota_cores(root) or 1 << 30),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        num_gpus=sum(1 for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)),
        libcuda_path=find_library(_LIBCUDA, root, _linker_folders()),
        has_torch=torch_folder is not None,
        torch_has_cuda=torch_folder is not None and (torch_folder / "lib/libtorch_cuda.so").exists(),
        has_cuda_bindings=any((folder / "bindings").is_dir() for folder in _package_folders("cuda")),
        has_cublas=all(find_library(name, root, [*_wheel_folders(), *_linker_folders()]) for name in LIBRARY_NAMES),
    )


def find_library(name: str, root: Path, search_path: Sequence[str] = ()) -> str | None:
    """Where the dynamic linker would find it. Not loaded: libcuda in the maps forbids every later fork."""
    cache = root / "etc/ld.so.cache"
    pattern = rb"/[^\0]*/" + re.escape(name.encode()) + rb"(?=\0)"
    cached = re.findall(pattern, cache.read_bytes()) if cache.is_file() else []
    candidates = [f"{folder}/{name}" for folder in search_path if folder]
    candidates += [os.fsdecode(path) for path in cached]
    candidates += [f"{folder}/{name}" for folder in _LIBRARY_FOLDERS]
    return next((path for path in candidates if (root / path.lstrip("/")).exists()), None)


def _linker_folders() -> list[str]:
    return os.environ.get("LD_LIBRARY_PATH", "").split(":")


def _wheel_folders() -> list[str]:
    """Where NVIDIA's wheels put their libraries."""
    return [f"{folder}/{below}" for folder in sys.path if folder for below in WHEEL_FOLDERS]


def _package_folders(name: str) -> list[Path]:
    """Where a package is installed: several for a namespace, none if it is not. It is not imported."""
    spec = find_spec(name)
    return [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []


def quota_cores(root: Path) -> int | None:
    """Cores that the control groups (v2) of this process allow, rounded up; None without a limit."""
    try:
        own_group = (root / "proc/self/cgroup").read_text().rpartition("::")[2].strip().strip("/")
    except OSError:
        return None
    base = root / "sys/fs/cgroup"
    folders = [base / own_group, *(base / own_group).parents] if own_group else [base]
    quotas = [_cpu_quota(folder / "cpu.max") for folder in folders if folder.is_relative_to(base)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _cpu_quota(path: Path) -> int | None:
    try:
        quota_us, period_us = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota_us == "max" else max(1, ceil(int(quota_us) / int(period_us)))
