"""The operations in torch: the reference of every other backend, and what serves on a CPU.

Sums, norms, rotations, softmax, residual and logits are in fp32 whatever the model's dtype; a result is rounded to it
once. Owns the KV pool, the activations and the slots' device state.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from server.models.facts import ModelFacts
from server.ops.interface import (
    Activations,
    BatchLimits,
    Linear,
    SampledTokens,
    StepGraph,
    StepInputs,
    StepShape,
    StepSize,
)
from server.ops.sampling import SlotSampling
from server.ops.torch.attention import AttentionTile, allocate_workspace, paged_attention, plan_tiles
from server.ops.torch.rotary import Rotation, rotate, rotation_at
from server.ops.torch.sampler import SlotTable, choose
from server.ops.torch.staging import Staging
from server.ops.torch.weights import TORCH_DTYPES


class TorchPendingTokens:
    """Sampled tokens on their way to the host: int32 rows of ids, fp32 bits of logprobs, finiteness."""

    def __init__(self, packed: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._packed = packed
        if packed.device.type == "cuda":
            # Pinned memory from torch's cache: it is not reused before the copy is over and the tensor gone.
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._copied is None or self._copied.query()

    def wait(self) -> SampledTokens:
        """Block until the tokens are on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        token_ids, logprobs, is_finite = self._packed
        return SampledTokens(token_ids.tolist(), logprobs.view(torch.float32).tolist(), is_finite.bool().tolist())


class TorchOperations:
    """Implements ops/interface.Operations on tensors. Made by backend.create_backend."""

    max_graph_requests = 0  # a recorded step would save no time here: what it ran is called again

    def __init__(
        self,
        facts: ModelFacts,
        weights: Mapping[str, Tensor],
        limits: BatchLimits,
        inverse_frequencies: tuple[float, ...],
        vocab_limit: int,
    ) -> None:
        device = weights["embed.weight"].device
        self._facts = facts
        self._vocab_limit = min(vocab_limit, facts.vocab_size)
        self.limits = limits
        # Norm weights are tiny and used in fp32.
        self.weights = {
            name: tensor.float() if name.endswith("norm.weight") else tensor for name, tensor in weights.items()
        }
        self._device = device
        self._scale = facts.head_dim**-0.5
        self._inverse_frequencies = torch.tensor(inverse_frequencies, dtype=torch.float32, device=device)
        self._largest = _allocate_activations(facts, limits, device)
        pool_shape = (facts.num_layers, 2, limits.num_blocks * limits.block_size, facts.num_kv_heads, facts.head_dim)
        self.kv_pool = torch.zeros(pool_shape, dtype=TORCH_DTYPES[facts.dtype], device=device)
        self._workspace = allocate_workspace(limits, facts.num_kv_heads, facts.head_dim, like=self.kv_pool)
        self._slots = SlotTable(limits.max_num_requests + 1, facts.vocab_size, device)  # one for rows of no request
        self._staging = Staging(limits, device)
        self._shape: StepShape
        self._rotation: Rotation
        self._tiles: list[AttentionTile]
        self._token_ids: Tensor
        self._kv_rows: Tensor
        self._recorded: list[Callable[[Activations[Tensor]], None]] = []
        self._no_samples = torch.empty(3, 0, dtype=torch.int32, device=device)
        self._sampled = self._no_samples

    @property
    def inputs(self) -> StepInputs[Tensor]:
        """The device's arrays of the current step."""
        return self._staging.inputs

    @contextmanager
    def execution_context(self) -> Iterator[None]:
        """Inference mode, and on a GPU the kernels that sum in fp32 and need no tuning per shape."""
        with torch.inference_mode(), _gpu_precision() if self._device.type == "cuda" else nullcontext():
            yield

    def reset_slot(self, slot: int, sampling: SlotSampling) -> None:
        """Give the slot to a request."""
        self._slots.reset(slot, sampling)

    def next_staging(self) -> StepInputs[memoryview]:
        """Host arrays for the coming step."""
        return self._staging.next_host()

    def begin_step(self, shape: StepShape) -> Activations[Tensor]:
        """Upload, and derive what all layers share: token ids, rotations, rows of the pool, attention tiles."""
        self._staging.upload(shape)
        inputs, num_tokens = self._staging.inputs, shape.size.num_tokens
        self._shape = shape
        self._sampled = self._no_samples
        self._token_ids = inputs.token_ids[:num_tokens]
        if shape.reads_last_tokens:
            slots = inputs.token_slots[:num_tokens]
            last_tokens = self._slots.last_tokens.index_select(0, slots.clamp(min=0))
            self._token_ids = torch.where(slots < 0, self._token_ids, last_tokens)
        self._rotation = rotation_at(inputs.positions[:num_tokens], self._inverse_frequencies)
        self._kv_rows = inputs.kv_rows[:num_tokens].long()
        self._tiles = plan_tiles(shape, inputs, self.limits)
        return self._first_rows(shape.size)

    def embed(self, table: Tensor, out: Tensor) -> None:
        """out[t] = table[token id of t]."""
        out.copy_(table.index_select(0, self._token_ids))

    def rms_norm(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """RMSNorm in fp32."""
        out.copy_(F.rms_norm(x, weight.shape, weight, self._facts.rms_eps))

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, out: Tensor) -> None:
        """residual += delta in fp32, then RMSNorm."""
        self.rms_norm(residual.add_(delta), weight, out)

    def linear(self, x: Tensor, layer: Linear[Tensor], out: Tensor) -> None:
        """x @ weight.T + bias."""
        if layer.bias is None:
            torch.mm(x, layer.weight.t(), out=out)
        else:
            torch.addmm(layer.bias, x, layer.weight.t(), out=out)

    def linear_add_norm(
        self, x: Tensor, layer: Linear[Tensor], delta: Tensor, residual: Tensor, norm_weight: Tensor, out: Tensor
    ) -> None:
        """A GEMM, then the sum with the residual and its norm."""
        self.linear(x, layer, delta)
        self.add_rms_norm(residual, delta, norm_weight, out)

    def gated_linear(self, x: Tensor, layer: Linear[Tensor], gate_up: Tensor, out: Tensor) -> None:
        """A GEMM, then the gate."""
        self.linear(x, layer, gate_up)
        self.gate(gate_up, out)

    def rotate_and_store(self, layer: int, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> None:
        """q and k are normed and rotated in fp32 and rounded once; k and v go to the pool."""
        group_size = self._facts.group_size
        groups = self._groups(qkv)
        heads = groups[:, :, : group_size + 1].float()
        if q_norm is not None and k_norm is not None:
            heads = F.rms_norm(heads, (heads.shape[-1],), eps=self._facts.rms_eps)
            heads[:, :, :group_size] *= q_norm
            heads[:, :, group_size] *= k_norm
        groups[:, :, : group_size + 1].copy_(rotate(heads, self._rotation))
        keys, values = self.kv_pool[layer]
        keys.index_copy_(0, self._kv_rows, groups[:, :, group_size])
        values.index_copy_(0, self._kv_rows, groups[:, :, group_size + 1])

    def attend(self, layer: int, qkv: Tensor, out: Tensor) -> None:
        """Causal attention over the pool."""
        queries = self._groups(qkv)[:, :, : self._facts.group_size]
        kv = self.kv_pool[layer]
        paged_attention(queries, kv, self._tiles, self._scale, self._workspace, out.view(queries.shape))

    def gate(self, gate_up: Tensor, out: Tensor) -> None:
        """silu(gate) * up in fp32."""
        num_blocks = self._facts.num_mlp_blocks
        gate, up = gate_up.view(gate_up.shape[0], num_blocks, 2, -1).unbind(2)
        torch.mul(F.silu(gate.float()), up, out=out.view(gate.shape))

    def gather_samples(self, x: Tensor, out: Tensor) -> None:
        """Rows of the chunks that sample."""
        torch.index_select(x, 0, self.inputs.sample_rows[: out.shape[0]], out=out)

    def logits(self, x: Tensor, head: Tensor, out: Tensor) -> None:
        """fp32 logits; on a GPU straight from the GEMM's fp32 sums. No rows are a step of unfinished prompts."""
        if not x.shape[0]:
            return
        if x.dtype == torch.float32:
            torch.mm(x, head.t(), out=out)
        elif self._device.type == "cuda":
            torch.mm(x, head.t(), out_dtype=torch.float32, out=out)
        else:
            out.copy_(torch.mm(x, head.t()))

    def sample(self, logits: Tensor) -> None:
        """Tokens of all sampled rows; each becomes its slot's last token."""
        inputs, shape, num_samples = self.inputs, self._shape, self._shape.size.num_samples
        use = shape.sampling
        slots = inputs.sample_slots[:num_samples].long()
        flags = self._slots.token_flags
        if use.penalty or use.min_tokens:
            flags = flags.index_select(0, slots)
        rows = choose(
            logits[:, : self._vocab_limit],
            flags[:, : self._vocab_limit],
            self._slots.params(slots),
            inputs.sample_positions[:num_samples].long(),
            inputs.random_samples[: shape.num_random].long(),
            use,
        )
        self._slots.record(slots, rows.token_ids, mark_seen=use.penalty)
        columns = (rows.token_ids.int(), rows.logprobs.view(torch.int32), rows.is_finite.int())
        self._sampled = torch.stack([column[: shape.num_samples] for column in columns])  # without padding

    def fetch_tokens(self) -> TorchPendingTokens:
        """Start the copy of what `sample` chose."""
        return TorchPendingTokens(self._sampled)

    def capture(self, shape: StepShape, run: Callable[[Activations[Tensor]], None]) -> StepGraph:
        """Remember `run`."""
        self._recorded.append(run)
        return StepGraph(len(self._recorded) - 1)

    def replay(self, graph: StepGraph, shape: StepShape) -> None:
        """Call what was remembered."""
        self._recorded[graph](self._first_rows(shape.size))

    def _groups(self, qkv: Tensor) -> Tensor:
        """[tokens, kv_heads, query heads of the group + k + v, head_dim]."""
        facts = self._facts
        return qkv.view(qkv.shape[0], facts.num_kv_heads, facts.group_size + 2, facts.head_dim)

    def _first_rows(self, size: StepSize) -> Activations[Tensor]:
        largest = self._largest
        counts = [size.num_samples if field.name in _PER_SAMPLE else size.num_tokens for field in fields(largest)]
        return Activations(*(getattr(largest, f.name)[:n] for f, n in zip(fields(largest), counts, strict=True)))


_PER_SAMPLE = ("sampled", "logits")


def _allocate_activations(facts: ModelFacts, limits: BatchLimits, device: torch.device) -> Activations[Tensor]:
    dtype = TORCH_DTYPES[facts.dtype]

    def rows(count: int, width: int, row_dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(count, width, dtype=row_dtype, device=device)

    num_tokens, num_samples = limits.max_batched_tokens, limits.max_num_requests
    return Activations(
        residual=rows(num_tokens, facts.hidden_size, torch.float32),
        normed=rows(num_tokens, facts.hidden_size),
        delta=rows(num_tokens, facts.hidden_size),
        qkv=rows(num_tokens, facts.qkv_rows),
        attended=rows(num_tokens, facts.num_heads * facts.head_dim),
        gate_up=rows(num_tokens, 2 * facts.intermediate_size),
        gated=rows(num_tokens, facts.intermediate_size),
        sampled=rows(num_samples, facts.hidden_size),
        logits=rows(num_samples, facts.vocab_size, torch.float32),
    )


@contextmanager
def _gpu_precision() -> Iterator[None]:
    """No sums in bf16 or TF32 inside GEMMs; attention kernels without a plan to be built for each new shape."""
    matmul = torch.backends.cuda.matmul
    before = (
        matmul.allow_tf32,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )
    matmul.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        matmul.allow_tf32 = before[0]
        matmul.allow_bf16_reduced_precision_reduction = before[1]
        matmul.allow_fp16_reduced_precision_reduction = before[2]
