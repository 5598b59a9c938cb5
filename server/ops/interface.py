"""What a backend can do: the operations of a decoder step on buffers that it made once, at its largest sizes.

A buffer is opaque to everyone but its backend (a torch tensor, a device address with strides). Each step is described
twice: `StepShape` by host numbers that choose launches, `StepInputs` by integers in persistent buffers. No operation
waits for the device, and none looks at device values to decide what to launch, so a step can be captured in a graph.

    staging = ops.next_staging()      host memory, filled by runner/input_batch
    act = ops.begin_step(shape)       one upload; the buffers, cut to this step's rows
    decoder.forward(act)              embed .. logits
    ops.sample(act.logits)            ids stay on the device
    ops.fetch_tokens()                a copy to the host is under way

What lies between begin_step and fetch_tokens can be recorded once per StepSize and replayed (`capture`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, NewType, Protocol, TypeVar

from server.ops.sampling import SamplingUse, SlotSampling

BufferT = TypeVar("BufferT")
StepGraph = NewType("StepGraph", int)  # a recorded step, by its number in the backend that recorded it
ON_HOST = -1  # in StepInputs.token_slots: the token id is in token_ids


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest step, and the KV pool: `num_blocks` blocks of `block_size` tokens, block 0 being scratch."""

    max_batched_tokens: int
    max_num_requests: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_mixed_tokens: int = 0  # of a step that holds a decode and a chunk of several; 0: any, and none is recorded

    @property
    def max_blocks_per_request(self) -> int:
        """The most columns of a block table."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class StepSize:
    """What the launches of a step follow from, and nothing else of it: rows, and chunks of either kind.

    The exact counts, or for a step that is recorded or replayed the counts that it is padded to.
    """

    num_tokens: int
    num_decodes: int
    num_prefills: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the host knows of a step. Chunk i computes positions starts[i] .. starts[i] + lengths[i] - 1 of a request.

    The first `num_decodes` chunks are of one token each. The first `num_samples` of the sampled rows are requests',
    and `num_random` of them draw, the others are greedy. Block tables take `table_rows` rows of `table_columns`.
    Rows of `size` that are beyond these counts are padding.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    num_decodes: int
    num_samples: int
    num_random: int
    reads_last_tokens: bool
    sampling: SamplingUse
    table_rows: int
    table_columns: int
    size: StepSize

    @property
    def num_chunks(self) -> int:
        """Requests that take part."""
        return len(self.lengths)


# Entries of StepInputs.header, at whose places the kernels of server/kernels/attention.py look for them.
HEADER_FIELDS = ("num_decodes", "num_chunks", "num_tokens", "table_columns")


@dataclass(frozen=True, slots=True)
class StepInputs(Generic[BufferT]):
    """The int32 arrays of a step, at their largest sizes; a step fills the front of each.

    per step     header: how many of the chunks are decodes; chunks; tokens; columns of the block tables
    per token    token_ids; token_slots: ON_HOST, or the slot whose last sampled token is meant; positions;
                 kv_rows: block id * block_size + offset, where K and V of the token go
    per chunk    query_starts: first token row (one more entry closes the last chunk); context_lens: tokens of the
                 request after this chunk; slots: the request's, which is its row of the block tables
    per sample   sample_rows: token row whose hidden state is decoded; sample_slots; sample_positions: position of the
                 new token; random_samples: indices of the samples that draw
    per slot     block_tables: [slot][columns] block ids. Columns may differ from step to step

    Padding: tokens 0 at position 0 of block 0, which belong to no chunk, so that what attention leaves in their rows is
    whatever was there; samples of any row for slot `max_num_requests`.
    """

    header: BufferT
    token_ids: BufferT
    token_slots: BufferT
    positions: BufferT
    kv_rows: BufferT
    query_starts: BufferT
    context_lens: BufferT
    slots: BufferT
    sample_rows: BufferT
    sample_slots: BufferT
    sample_positions: BufferT
    random_samples: BufferT
    block_tables: BufferT


def input_sizes(limits: BatchLimits) -> dict[str, int]:
    """Entries of each StepInputs array, in field order: the packing of the one buffer that is uploaded.

    block_tables comes last, because only the rows that a step uses are uploaded.
    """
    per_token, per_request = limits.max_batched_tokens, limits.max_num_requests
    return {
        "header": len(HEADER_FIELDS),
        "token_ids": per_token,
        "token_slots": per_token,
        "positions": per_token,
        "kv_rows": per_token,
        "query_starts": per_request + 1,
        "context_lens": per_request,
        "slots": per_request,
        "sample_rows": per_request,
        "sample_slots": per_request,
        "sample_positions": per_request,
        "random_samples": per_request,
        "block_tables": per_request * limits.max_blocks_per_request,
    }


@dataclass(frozen=True, slots=True)
class Activations(Generic[BufferT]):
    """Every intermediate of the decoder, T = tokens, S = samples of the step.

    residual [T, hidden] has the backend's precision for sums, the others the model's dtype; logits are fp32.
    normed, delta [T, hidden]; qkv [T, qkv_rows]; attended [T, heads * head_dim]; gate_up [T, 2 * intermediate];
    gated [T, intermediate]; sampled [S, hidden]; logits [S, vocab].
    """

    residual: BufferT
    normed: BufferT
    delta: BufferT
    qkv: BufferT
    attended: BufferT
    gate_up: BufferT
    gated: BufferT
    sampled: BufferT
    logits: BufferT


@dataclass(frozen=True, slots=True)
class Linear(Generic[BufferT]):
    """A projection: weight [out, in], bias [out] or none."""

    weight: BufferT
    bias: BufferT | None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The samples of a step on the host, in the order of its sampling chunks."""

    token_ids: list[int]
    logprobs: list[float]
    is_finite: list[bool]


class PendingTokens(Protocol):
    """A copy of sampled tokens to the host that is under way. The device memory it reads may be reused at once."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> SampledTokens:
        """Block until the tokens are on the host."""
        ...


class Operations(Protocol[BufferT]):
    """One backend on one device. Not thread-safe; operations run in the order of the calls, for the step begun last."""

    @property
    def limits(self) -> BatchLimits:
        """The sizes for which the buffers were made."""
        ...

    @property
    def weights(self) -> Mapping[str, BufferT]:
        """The model's tensors by the names of weights/layout."""
        ...

    @property
    def max_graph_requests(self) -> int:
        """The most decodes of a step that is worth recording; 0: recording saves nothing on this backend."""
        ...

    def execution_context(self) -> AbstractContextManager[None]:
        """What must surround every call below."""
        ...

    def reset_slot(self, slot: int, sampling: SlotSampling) -> None:
        """Give the slot to a request: sampling parameters, seen tokens, stop tokens."""
        ...

    def next_staging(self) -> StepInputs[memoryview]:
        """Host arrays (int32) for the coming step, free to be filled. Valid until the next call."""
        ...

    def begin_step(self, shape: StepShape) -> Activations[BufferT]:
        """Upload the staging handed out last and make it the current step."""
        ...

    def embed(self, table: BufferT, out: BufferT) -> None:
        """out[t] = table[token id of t]."""
        ...

    def rms_norm(self, x: BufferT, weight: BufferT, out: BufferT) -> None:
        """out = x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once."""
        ...

    def add_rms_norm(self, residual: BufferT, delta: BufferT, weight: BufferT, out: BufferT) -> None:
        """residual += delta, then out = rms_norm(residual)."""
        ...

    def linear(self, x: BufferT, layer: Linear[BufferT], out: BufferT) -> None:
        """out = x @ weight.T + bias, summed in fp32, rounded once."""
        ...

    def linear_add_norm(
        self, x: BufferT, layer: Linear[BufferT], delta: BufferT, residual: BufferT, norm_weight: BufferT, out: BufferT
    ) -> None:
        """residual += x @ weight.T + bias, then out = rms_norm(residual). `delta` is scratch for the rounded sum."""
        ...

    def gated_linear(self, x: BufferT, layer: Linear[BufferT], gate_up: BufferT, out: BufferT) -> None:
        """out = silu(gate) * up of x @ weight.T + bias. `gate_up` is scratch for the two, if rounded."""
        ...

    def rotate_and_store(self, layer: int, qkv: BufferT, q_norm: BufferT | None, k_norm: BufferT | None) -> None:
        """Norm (if any) and rotate q and k in place, then k and v to the pool. A row: per KV head its q heads, k, v."""
        ...

    def attend(self, layer: int, qkv: BufferT, out: BufferT) -> None:
        """Causal attention of each chunk's queries over its request's KV blocks."""
        ...

    def gate(self, gate_up: BufferT, out: BufferT) -> None:
        """out = silu(gate) * up, gate and up interleaved in the model's num_mlp_blocks."""
        ...

    def gather_samples(self, x: BufferT, out: BufferT) -> None:
        """out[s] = x[row of sample s]."""
        ...

    def logits(self, x: BufferT, head: BufferT, out: BufferT) -> None:
        """out = x @ head.T in fp32."""
        ...

    def sample(self, logits: BufferT) -> None:
        """Choose a token per row as ops/sampling defines; it becomes the slot's last token."""
        ...

    def fetch_tokens(self) -> PendingTokens:
        """Start the copy of what `sample` chose."""
        ...

    def capture(self, shape: StepShape, run: Callable[[Activations[BufferT]], None]) -> StepGraph:
        """Record, without running it, what `run` issues for a step of `shape`: forward and sample, no upload, no fetch.

        Of the shape only its size is recorded: not the requests, their lengths nor their SamplingUse. A step of that
        size must have run before, so that whatever is loaded at first use is loaded. It may be called between
        begin_step and fetch_tokens of such a step, or between two steps.
        """
        ...

    def replay(self, graph: StepGraph, shape: StepShape) -> None:
        """Issue a recorded step, instead of `run`, for the step begun last, whose shape has the recorded size."""
        ...
