"""The operations by driver API, cuBLAS and kernels built ahead: what serves on a GPU. No torch.

Sums, norms, rotations, softmax, residual and logits are in fp32; a result is rounded to the model's dtype once. Owns
the activations, not the weights and the KV pool. All work goes to one stream, and nothing is allocated in a step.
"""

import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import lru_cache, partial

from server.models.facts import ModelFacts
from server.ops.cuda import attention
from server.ops.cuda.arena import Arena
from server.ops.cuda.attention import CudaAttention
from server.ops.cuda.branch import Branch
from server.ops.cuda.buffer import Buffer, BufferDType
from server.ops.cuda.driver import Driver, DriverError, Graph, KernelImage, Stream
from server.ops.cuda.gemms import Projections
from server.ops.cuda.kernels import Kernel, Kernels
from server.ops.cuda.sampler import CudaSampler
from server.ops.cuda.sizes import (
    GEMM_WORKSPACE,
    activation_specs,
    arena_bytes,
    frequencies_spec,
    kv_pool_spec,
    max_graph_requests,
)
from server.ops.cuda.staging import CudaPendingTokens, Staging, TokenRing, staging_spec
from server.ops.cuda.tiles import NO_TABLE, GemmTable
from server.ops.interface import Activations, BatchLimits, Linear, StepGraph, StepInputs, StepShape, StepSize
from server.ops.sampling import SlotSampling

GATE_TILE = 1024  # columns per program


class CudaOperations:
    """Implements ops/interface.Operations on buffers. Made by backend.create_backend."""

    def __init__(
        self,
        facts: ModelFacts,
        weights: Mapping[str, Buffer],
        limits: BatchLimits,
        inverse_frequencies: tuple[float, ...],
        vocab_limit: int,
        *,
        driver: Driver,
        stream: Stream,
        images: Iterable[KernelImage],
        gemms: GemmTable = NO_TABLE,
        kv_pool: Buffer | None = None,
        records_steps: bool = True,
    ) -> None:
        self._facts = facts
        self.limits = limits
        self.weights = weights
        self.max_graph_requests = max_graph_requests(limits) if records_steps else 0
        self._driver, self._stream = driver, stream
        self._thread_id = threading.get_ident()
        driver.prepare_gemms()
        images = tuple(images)
        kernels = Kernels(driver, stream, images)
        self._kernels = StepKernels.load(kernels, facts)
        self._gate_columns = facts.intermediate_size // facts.num_mlp_blocks
        tiles_per_block = -(-self._gate_columns // GATE_TILE)
        self._gate_tiles = facts.num_mlp_blocks * tiles_per_block
        pool_spec = kv_pool_spec(facts, limits)
        self.kv_pool = kv_pool or Arena(driver, pool_spec.num_bytes).take(pool_spec)
        self._layer_pools = _layer_pools(self.kv_pool)
        arena = Arena(driver, arena_bytes(facts, limits))
        specs = activation_specs(facts, limits)
        self._largest = Activations(*(arena.take(getattr(specs, field.name)) for field in fields(specs)))
        # Recorded sizes come again and again, by turns; 64 are all of these, and some.
        self._first_rows = lru_cache(64)(partial(_first_rows, self._largest))
        self._size: StepSize | None = None
        self._act: Activations[Buffer]
        self._frequencies = arena.take(frequencies_spec(facts))
        self._projections = Projections(
            driver,
            stream,
            kernels,
            facts,
            arena.take(GEMM_WORKSPACE),
            gemms,
            add_rms_norm=self.add_rms_norm,
            gate=self.gate,
        )
        self._staging = Staging(driver, stream, limits, arena.take(staging_spec(limits)))
        branch = Branch(driver, stream, images) if attention.BRANCHES else None
        self._attention = CudaAttention(kernels, facts, limits, driver.facts, arena, branch=branch)
        arrivals = self._attention.arrivals
        driver.fill_async(arrivals.address, 0, arrivals.num_bytes, stream)
        self._sampler = CudaSampler(driver, stream, kernels, facts, limits, vocab_limit, arena)
        self._ring = TokenRing(driver, stream, self._sampler.packed)
        self._shape: StepShape
        self._num_sampled = 0
        self._upload(self._frequencies, array("f", inverse_frequencies).tobytes())

    @property
    def inputs(self) -> StepInputs[Buffer]:
        """The device's arrays of the current step."""
        return self._staging.inputs

    @contextmanager
    def execution_context(self) -> Iterator[None]:
        """The GPU's context is current in the calling thread."""
        if threading.get_ident() != self._thread_id:
            self._driver.attach_thread()
            self._thread_id = threading.get_ident()
        yield

    def reset_slot(self, slot: int, sampling: SlotSampling) -> None:
        """Give the slot to a request."""
        self._sampler.reset(slot, sampling)

    def next_staging(self) -> StepInputs[memoryview]:
        """Host arrays for the coming step."""
        return self._staging.next_host()

    def begin_step(self, shape: StepShape) -> Activations[Buffer]:
        """Upload; nothing else is derived from the inputs."""
        self._staging.upload(shape)
        return self._begin(shape)

    def embed(self, table: Buffer, out: Buffer) -> None:
        """out[t] = table[token id of t], in fp32."""
        inputs, (num_tokens, hidden) = self.inputs, out.shape
        last_tokens = self._sampler.last_tokens
        self._kernels.embed((num_tokens, 1, 1), inputs.token_ids, inputs.token_slots, last_tokens, table, out, hidden)

    def rms_norm(self, x: Buffer, weight: Buffer, out: Buffer) -> None:
        """RMSNorm in fp32."""
        num_tokens, hidden = out.shape
        self._kernels.rms_norm((num_tokens, 1, 1), x, weight, out, hidden, self._facts.rms_eps)

    def add_rms_norm(self, residual: Buffer, delta: Buffer, weight: Buffer, out: Buffer) -> None:
        """residual += delta in fp32, then RMSNorm."""
        num_tokens, hidden = out.shape
        self._kernels.add_rms_norm((num_tokens, 1, 1), residual, delta, weight, out, hidden, self._facts.rms_eps)

    def linear(self, x: Buffer, layer: Linear[Buffer], out: Buffer) -> None:
        """x @ weight.T + bias."""
        self._projections.linear(x, layer, out)

    def linear_add_norm(
        self, x: Buffer, layer: Linear[Buffer], delta: Buffer, residual: Buffer, norm_weight: Buffer, out: Buffer
    ) -> None:
        """A GEMM, then the sum with the residual and its norm, or the norm adds up the GEMM's partial sums."""
        self._projections.linear_add_norm(x, layer, delta, residual, norm_weight, out)

    def gated_linear(self, x: Buffer, layer: Linear[Buffer], gate_up: Buffer, out: Buffer) -> None:
        """A GEMM, then the gate, or both in one kernel."""
        self._projections.gated_linear(x, layer, gate_up, out)

    def rotate_and_store(self, layer: int, qkv: Buffer, q_norm: Buffer | None, k_norm: Buffer | None) -> None:
        """q and k are normed and rotated in fp32 and rounded once; k and v go to the pool."""
        facts, inputs = self._facts, self.inputs
        keys, values = self._layer_pools[layer]
        self._kernels.rotate_and_store(
            (qkv.shape[0], facts.num_kv_heads, 1),
            qkv,
            inputs.positions,
            inputs.kv_rows,
            self._frequencies,
            q_norm or qkv,  # not read in a model without norms
            k_norm or qkv,
            keys,
            values,
            facts.num_kv_heads,
            facts.group_size,
            facts.rms_eps,
        )

    def attend(self, layer: int, qkv: Buffer, out: Buffer) -> None:
        """Causal attention over the pool."""
        keys, values = self._layer_pools[layer]
        self._attention.attend(qkv, keys, values, self.inputs, out)

    def gate(self, gate_up: Buffer, out: Buffer) -> None:
        """silu(gate) * up in fp32."""
        num_tokens, intermediate = out.shape
        self._kernels.gate((num_tokens, self._gate_tiles, 1), gate_up, out, intermediate, self._gate_columns)

    def gather_samples(self, x: Buffer, out: Buffer) -> None:
        """Rows of the chunks that sample."""
        num_samples, hidden = out.shape
        if num_samples:
            self._kernels.gather_rows((num_samples, 1, 1), x, self.inputs.sample_rows, out, hidden)

    def logits(self, x: Buffer, head: Buffer, out: Buffer) -> None:
        """fp32 logits, straight from the GEMM's fp32 sums. No rows are a step of unfinished prompts."""
        if x.shape[0]:
            self._projections.logits(x, head, out)

    def sample(self, logits: Buffer) -> None:
        """Tokens of all sampled rows; each becomes its slot's last token."""
        self._num_sampled = self._shape.num_samples
        self._sampler.sample(logits, self.inputs, self._shape.size.num_samples)

    def fetch_tokens(self) -> CudaPendingTokens:
        """Start the copy of what `sample` chose."""
        return self._ring.fetch(self._num_sampled)

    def capture(self, shape: StepShape, run: Callable[[Activations[Buffer]], None]) -> StepGraph:
        """Record what `run` issues. The stream is as good as before if that fails."""
        assert self.max_graph_requests, "this backend was made to record nothing"
        act = self._begin(shape)
        self._driver.begin_capture(self._stream)
        try:
            run(act)
            return StepGraph(self._driver.end_capture(self._stream))
        except BaseException:
            with suppress(DriverError):  # the first error names the cause
                self._driver.abandon_capture(self._stream)
            raise

    def replay(self, graph: StepGraph, shape: StepShape) -> None:
        """Issue a recorded step by one call."""
        self._driver.launch_graph_async(Graph(graph), self._stream)
        self._num_sampled = shape.num_samples

    def _begin(self, shape: StepShape) -> Activations[Buffer]:
        self._shape = shape
        self._num_sampled = 0
        if shape.size != self._size:  # which often comes again
            self._size = shape.size
            self._attention.plan(shape.size)
            self._act = self._first_rows(shape.size)
        return self._act

    def _upload(self, dest: Buffer, data: bytes) -> None:
        """Copy a constant, and wait until it is there."""
        pinned = self._driver.allocate_pinned(len(data))
        pinned.view[:] = data
        self._driver.copy_to_device_async(dest.address, pinned.address, len(data), self._stream)
        self._driver.synchronize(self._stream)
        self._driver.free_pinned(pinned)


@dataclass(frozen=True, slots=True)
class StepKernels:
    """The kernels that operations launch themselves, in the model's dtype and variant."""

    embed: Kernel
    rms_norm: Kernel
    add_rms_norm: Kernel
    rotate_and_store: Kernel
    gate: Kernel
    gather_rows: Kernel

    @classmethod
    def load(cls, kernels: Kernels, facts: ModelFacts) -> "StepKernels":
        """Each is loaded before it returns."""
        dtype: BufferDType = facts.dtype
        return cls(
            embed=kernels.get("embed", dtype),
            rms_norm=kernels.get("rms_norm", dtype),
            add_rms_norm=kernels.get("add_rms_norm", dtype),
            rotate_and_store=kernels.get("rotate_and_store", dtype, HEAD_DIM=facts.head_dim, HAS_NORM=facts.qk_norm),
            gate=kernels.get("gate", dtype, BLOCK=GATE_TILE),
            gather_rows=kernels.get("gather_rows", dtype),
        )


_PER_SAMPLE = ("sampled", "logits")


def _first_rows(largest: Activations[Buffer], size: StepSize) -> Activations[Buffer]:
    counts = [size.num_samples if field.name in _PER_SAMPLE else size.num_tokens for field in fields(largest)]
    return Activations(*(getattr(largest, f.name).rows(0, n) for f, n in zip(fields(largest), counts, strict=True)))


def _layer_pools(kv_pool: Buffer) -> list[tuple[Buffer, Buffer]]:
    """K and V of each layer: [rows, kv_heads, head_dim]."""
    num_layers, _, *rows = kv_pool.shape
    halves = kv_pool.view(num_layers * 2, *rows)
    parts = [halves.rows(index, index + 1).view(*rows) for index in range(num_layers * 2)]
    return list(zip(parts[::2], parts[1::2], strict=True))
