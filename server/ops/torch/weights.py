"""The weight memory as torch tensors: in place on a CPU, copied once on a GPU.

Knows the layout's names, shapes and dtypes; does not know what the tensors mean.
"""

import warnings

import torch

from server.models.facts import DType
from server.weights.layout import WeightLayout
from server.weights.memory import WeightView, WeightViews

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_tensors(fd: int, layout: WeightLayout, device: torch.device) -> dict[str, torch.Tensor]:
    """Every tensor of a loaded weight memory by its name in the layout, on `device`.

    On a CPU they share the memory and must not be written: that would end the process. On another device each tensor is
    copied by itself, so that host memory stays bounded by the page cache.
    """
    views = WeightViews(fd, layout)
    return {name: _as_tensor(views[name]).to(device) for name in views}


def _as_tensor(view: WeightView) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns that it cannot hold anyone to it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.frombuffer(view.data, dtype=TORCH_DTYPES[view.dtype]).view(view.shape)
