"""What the model worker asks of a device before it has a backend on it: its memory, and the weights put there."""

import torch
from torch import Tensor

from server.ops.torch.weights import weight_tensors
from server.weights.layout import WeightLayout
from server.weights.memory import WeightMemory


def device_memory_bytes(device: str) -> tuple[int, int]:
    """(total, free) bytes of a GPU. Makes the context if there is none."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(torch.device(device))
    return total_bytes, free_bytes


def load_weights(memory: WeightMemory, layout: WeightLayout, device: str) -> dict[str, Tensor]:
    """The loaded weight memory as tensors on `device`, by their names in the layout."""
    return weight_tensors(memory, layout, torch.device(device))
