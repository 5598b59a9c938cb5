"""The weight memory as torch tensors, in place, on a CPU as on a GPU.

Knows the layout's names, shapes and dtypes; does not know what the tensors mean.
"""

import warnings

import torch

from server.models.facts import DType
from server.weights.device_memory import DeviceMemory
from server.weights.layout import WeightLayout
from server.weights.memory import HostMemory, WeightMemory, WeightView, WeightViews

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def weight_tensors(memory: WeightMemory, layout: WeightLayout, device: torch.device) -> dict[str, torch.Tensor]:
    """Every tensor of a loaded weight memory by its name in the layout, on `device`.

    They share the memory, which must stay mapped, and must not be written: that would end the process. Only host memory
    for another device is copied, tensor by tensor, so that no more host memory is needed.
    """
    if isinstance(memory, DeviceMemory):
        return _device_tensors(memory, layout, device)
    assert isinstance(memory, HostMemory), f"no tensors can be made of {memory}"
    views = WeightViews(memory, layout)
    return {name: _as_tensor(views[name]).to(device) for name in views}


def _as_tensor(view: WeightView) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns that it cannot hold anyone to it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.frombuffer(view.data, dtype=TORCH_DTYPES[view.dtype]).view(view.shape)


class _DeviceBytes:
    """Memory of a device, as torch takes it without copy. `memory` is kept as long as a tensor lives."""

    def __init__(self, memory: DeviceMemory, num_bytes: int) -> None:
        self.memory = memory
        # torch refuses memory that is declared read-only; the mapping is what refuses writes.
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def _device_tensors(memory: DeviceMemory, layout: WeightLayout, device: torch.device) -> dict[str, torch.Tensor]:
    whole = torch.as_tensor(_DeviceBytes(memory, layout.total_bytes), device=device)
    assert whole.data_ptr() == memory.address, "torch has copied the weights"
    return {
        spec.name: whole[spec.offset : spec.offset + spec.num_bytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
        for spec in layout.tensors
    }
