"""The way of a step's integers to the device: pinned host arrays that are filled, and one copy per step.

Two host buffers take turns, so that one can be filled while the copy from the other may still be under way.
"""

from dataclasses import fields

import torch
from torch import Tensor

from server.ops.interface import BatchLimits, StepInputs, StepShape, input_sizes


class Staging:
    """One packed int32 buffer per side. `inputs` are views of the device's; they stay valid for ever."""

    def __init__(self, limits: BatchLimits, device: torch.device) -> None:
        self._sizes = input_sizes(limits)
        num_words = sum(self._sizes.values())
        self._is_copied = device.type == "cuda"
        self._hosts = [torch.zeros(num_words, dtype=torch.int32, pin_memory=self._is_copied) for _ in range(2)]
        self._views = [_as_memoryviews(self._split(host)) for host in self._hosts]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if self._is_copied else []
        self._device_buffer = torch.zeros_like(self._hosts[0], device=device)
        self.inputs = self._split(self._device_buffer)
        self._turn = 0

    def next_host(self) -> StepInputs[memoryview]:
        """Host arrays to fill for the step after the one uploaded last."""
        self._turn = 1 - self._turn
        if self._is_copied and not self._copied[self._turn].query():  # its copy was two steps ago
            self._copied[self._turn].synchronize()
        return self._views[self._turn]

    def upload(self, shape: StepShape) -> None:
        """Copy the host arrays handed out last, of the block tables the rows that the step uses."""
        num_table_words = shape.table_rows * shape.table_columns
        num_words = self._device_buffer.shape[0] - self._sizes["block_tables"] + num_table_words
        self._device_buffer[:num_words].copy_(self._hosts[self._turn][:num_words], non_blocking=True)
        if self._is_copied:
            self._copied[self._turn].record()

    def _split(self, buffer: Tensor) -> StepInputs[Tensor]:
        return StepInputs(*buffer.split(list(self._sizes.values())))


def _as_memoryviews(arrays: StepInputs[Tensor]) -> StepInputs[memoryview]:
    return StepInputs(*(memoryview(getattr(arrays, field.name).numpy()) for field in fields(arrays)))
