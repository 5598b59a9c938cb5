"""Attention of the cuda backend on any driver, fed with ragged batches in a poisoned pool and held to float64.

Whatever attention has no business with is NaN (rows of the pool, k and v in qkv, workspace) or an impossible block id.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.models.facts import DType, ModelFacts
from server.ops.cuda.arena import ALIGNMENT, Arena, BufferSpec
from server.ops.cuda.attention import CudaAttention, attention_bytes
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import DeviceFacts, Driver, KernelImage
from server.ops.cuda.kernels import Kernels
from server.ops.interface import BatchLimits, StepInputs, StepShape, StepSize
from server.ops.sampling import SamplingUse
from server.ops.torch.attention import allocate_workspace, paged_attention, plan_tiles

TORCH_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "int32": torch.int32}
UNIT_ROUNDOFFS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NO_SAMPLING = SamplingUse(penalty=False, min_tokens=False, top_k_or_top_p=False, min_p=False, logprobs=False)
NO_BLOCK = 1 << 30  # read through, it leads out of any memory
NUM_ROWS_AFTER = 3  # of `out`, behind those of the step
SENTINEL = 77.0

Chunk = tuple[int, int]  # start, length


def attention_facts(*, num_kv_heads: int, group_size: int, head_dim: int, dtype: DType = "float16") -> ModelFacts:
    num_heads = num_kv_heads * group_size
    sizes = (64, 64, 64, 1, num_heads, num_kv_heads, head_dim, 1 << 17)
    return ModelFacts("Qwen2ForCausalLM", *sizes, 1e-6, 1e4, None, False, False, False, True, dtype)


def step_shape(chunks: Sequence[Chunk], num_decodes: int, num_slots: int = 0, table_columns: int = 0) -> StepShape:
    starts, lengths = zip(*chunks, strict=True)
    size = StepSize(sum(lengths), num_decodes, len(chunks) - num_decodes, 0)
    return StepShape(starts, lengths, num_decodes, 0, 0, False, NO_SAMPLING, num_slots, table_columns, size)


@dataclass(frozen=True)
class Batch:
    """A step's queries, pool and inputs, on the host."""

    shape: StepShape
    qkv: Tensor  # [tokens, kv_heads, group + 2, head_dim]
    pool: Tensor  # [2, rows, kv_heads, head_dim]
    header: Tensor
    query_starts: Tensor
    context_lens: Tensor
    slots: Tensor
    block_tables: Tensor  # [slots, columns]
    pool_rows: list[Tensor]  # of each chunk's context

    @property
    def num_tokens(self) -> int:
        return self.shape.size.num_tokens

    @property
    def queries(self) -> Tensor:
        return self.qkv[:, :, :-2]

    def chunks(self) -> Iterable[tuple[slice, int, Tensor]]:
        """Token rows, first position and rows of the pool of each chunk."""
        ends = self.query_starts[1:].tolist()
        for end, start, length, rows in zip(ends, self.shape.starts, self.shape.lengths, self.pool_rows, strict=False):
            yield slice(end - length, end), start, rows


def make_batch(
    facts: ModelFacts, limits: BatchLimits, chunks: Sequence[Chunk], num_decodes: int, sharpness: float = 1.0
) -> Batch:
    """Random q, k and v; slots, and the blocks of all requests, are shuffled. `sharpness` multiplies the scores."""
    longest = max(-(-sum(chunk) // limits.block_size) for chunk in chunks)
    num_columns = min(1 << (longest - 1).bit_length(), limits.max_blocks_per_request)
    shape = step_shape(chunks, num_decodes, limits.max_num_requests, num_columns)
    dtype, block_size = TORCH_DTYPES[facts.dtype], limits.block_size
    pool = torch.full((2, limits.num_blocks * block_size, facts.num_kv_heads, facts.head_dim), torch.nan, dtype=dtype)
    free = (torch.randperm(limits.num_blocks - 1) + 1).tolist()
    slots = torch.full((limits.max_num_requests,), NO_BLOCK, dtype=torch.int32)
    slots[: len(chunks)] = torch.randperm(limits.max_num_requests)[: len(chunks)]
    tables = torch.full((limits.max_num_requests, num_columns), NO_BLOCK, dtype=torch.int32)
    pool_rows = []
    for index, (start, length) in enumerate(chunks):
        context = start + length
        block_ids = torch.tensor([free.pop() for _ in range(-(-context // block_size))])
        tables[slots[index], : len(block_ids)] = block_ids
        rows = (block_ids[:, None] * block_size + torch.arange(block_size)).flatten()[:context]
        pool[:, rows] = torch.randn(2, context, facts.num_kv_heads, facts.head_dim).to(dtype)
        pool_rows.append(rows)
    qkv = torch.full((shape.size.num_tokens, facts.num_kv_heads, facts.group_size + 2, facts.head_dim), torch.nan)
    qkv[:, :, :-2] = (
        torch.randn(shape.size.num_tokens, facts.num_kv_heads, facts.group_size, facts.head_dim) * sharpness
    )
    ends = torch.tensor(shape.lengths).cumsum(0)
    query_starts = torch.full((limits.max_num_requests + 1,), NO_BLOCK, dtype=torch.int32)
    query_starts[0], query_starts[1 : len(chunks) + 1] = 0, ends
    context_lens = torch.full((limits.max_num_requests,), NO_BLOCK, dtype=torch.int32)
    context_lens[: len(chunks)] = torch.tensor([sum(chunk) for chunk in chunks])
    header = torch.tensor([num_decodes, len(chunks), shape.size.num_tokens, num_columns], dtype=torch.int32)
    return Batch(shape, qkv.to(dtype), pool, header, query_starts, context_lens, slots, tables, pool_rows)


def exact_attention(batch: Batch, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Attention in float64, [tokens, kv_heads, group, head_dim] both, and how far off rounded weights may be.

    Weights are rounded to the dtype once, and so is the result; scores are sums in fp32.
    """
    dtype = batch.qkv.dtype
    roundoff = UNIT_ROUNDOFFS[dtype]
    exact = torch.empty(batch.queries.shape, dtype=torch.float64)
    bound = torch.empty_like(exact)
    for tokens, start, rows in batch.chunks():
        k, v = (pool[rows].to(device, torch.float64) for pool in batch.pool)
        for begin in range(tokens.start, tokens.stop, 512):
            end = min(begin + 512, tokens.stop)
            q = batch.queries[begin:end].to(device, torch.float64)
            positions = start + torch.arange(begin - tokens.start, end - tokens.start, device=device)
            is_hidden = torch.arange(len(rows), device=device) > positions[:, None]
            scores = torch.einsum("thgd,nhd->hgtn", q, k) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
            result = torch.einsum("hgtn,nhd->thgd", weights, v)
            magnitude = torch.einsum("hgtn,nhd->thgd", weights, v.abs())
            # Weights below 2^-14 are fp16's subnormals, which are 2^-24 apart.
            subnormals = len(rows) * 2.0**-25 * v.abs().max() if dtype == torch.float16 else 0.0
            score_error = (scores.abs().max() + 1) * 2.0**-19
            exact[begin:end] = result.cpu()
            bound[begin:end] = (
                (roundoff + score_error) * magnitude + 1.01 * roundoff * result.abs() + subnormals + 1e-7
            ).cpu()
    return exact, bound


def torch_attention(batch: Batch, limits: BatchLimits) -> Tensor:
    """What the torch backend computes in fp32."""
    none = torch.empty(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(start, start + (t.stop - t.start)) for t, start, _ in batch.chunks()])
    inputs = StepInputs(
        none, none, none, positions.int(), none, batch.query_starts, batch.context_lens, batch.slots, none, none, none,
        none, batch.block_tables.flatten(),
    )  # fmt: skip
    queries, pool = batch.queries.float(), batch.pool.float()
    out = torch.empty(queries.shape)
    workspace = allocate_workspace(limits, pool.shape[2], pool.shape[3], like=pool)
    tiles = plan_tiles(batch.shape, inputs, limits)
    paged_attention(queries, pool, tiles, queries.shape[-1] ** -0.5, workspace, out)
    return out


class AttentionRig:
    """CudaAttention with its own arena and buffers."""

    def __init__(
        self,
        driver: Driver,
        images: Iterable[KernelImage],
        facts: ModelFacts,
        limits: BatchLimits,
        device: DeviceFacts | None = None,
        *,
        last_split_combines: bool | None = None,
    ) -> None:
        self.driver, self.facts, self.limits = driver, facts, limits
        self.stream = driver.create_stream()
        self.kernels = Kernels(driver, self.stream, images)
        num_bytes = attention_bytes(facts, limits)
        self.arena = Arena(driver, ALIGNMENT + num_bytes)
        workspace = self.arena.take(BufferSpec((ALIGNMENT,), "uint8")).address + ALIGNMENT
        driver.fill_async(workspace, 0xFF, num_bytes, self.stream)  # NaN
        self.attention = CudaAttention(
            self.kernels, facts, limits, device or driver.facts, self.arena, last_split_combines=last_split_combines
        )
        arrivals = self.attention.arrivals
        driver.fill_async(arrivals.address, 0, arrivals.num_bytes, self.stream)

    def upload(self, tensor: Tensor) -> Buffer:
        """A copy in memory of its own."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        buffer = Buffer(self.driver.allocate(tensor.nbytes), tuple(tensor.shape), dtype)
        self.write(buffer, tensor)
        return buffer

    def write(self, buffer: Buffer, tensor: Tensor) -> None:
        pinned = self.driver.allocate_pinned(tensor.nbytes)
        torch.frombuffer(pinned.view, dtype=tensor.dtype)[:] = tensor.flatten()
        self.driver.copy_to_device_async(buffer.address, pinned.address, tensor.nbytes, self.stream)
        self.driver.synchronize(self.stream)
        self.driver.free_pinned(pinned)

    def read(self, buffer: Buffer) -> Tensor:
        pinned = self.driver.allocate_pinned(buffer.num_bytes)
        self.driver.copy_to_host_async(pinned.address, buffer.address, buffer.num_bytes, self.stream)
        self.driver.synchronize(self.stream)
        tensor = torch.frombuffer(pinned.view, dtype=TORCH_DTYPES[buffer.dtype]).clone().view(buffer.shape)
        self.driver.free_pinned(pinned)
        return tensor

    def load(self, batch: Batch) -> "DeviceBatch":
        """The batch in device memory; `out` has rows behind the step's."""
        facts, num_tokens = self.facts, batch.num_tokens
        out = torch.full((num_tokens + NUM_ROWS_AFTER, facts.num_heads * facts.head_dim), SENTINEL)
        unused = Buffer(0, (0,), "int32")
        tables = torch.full((self.limits.max_num_requests * self.limits.max_blocks_per_request,), NO_BLOCK)
        tables[: batch.block_tables.numel()] = batch.block_tables.flatten()
        header, query_starts, context_lens, slots, block_tables = (
            self.upload(array)
            for array in (batch.header, batch.query_starts, batch.context_lens, batch.slots, tables.int())
        )
        inputs = StepInputs(
            header, unused, unused, unused, unused, query_starts, context_lens, slots, unused, unused, unused, unused,
            block_tables,
        )  # fmt: skip
        qkv = self.upload(batch.qkv.view(num_tokens, facts.qkv_rows))
        keys, values = (self.upload(pool) for pool in batch.pool)
        return DeviceBatch(batch, qkv, keys, values, inputs, self.upload(out.to(batch.qkv.dtype)))

    def reload(self, loaded: "DeviceBatch", batch: Batch) -> None:
        """Another batch of as many tokens in the same memory."""
        inputs = loaded.inputs
        for buffer, tensor in (
            (loaded.qkv, batch.qkv),
            (loaded.keys, batch.pool[0]),
            (loaded.values, batch.pool[1]),
            (inputs.header, batch.header),
            (inputs.query_starts, batch.query_starts),
            (inputs.context_lens, batch.context_lens),
            (inputs.slots, batch.slots),
            (inputs.block_tables, batch.block_tables),
        ):
            self.write(buffer, tensor)

    def launch(self, loaded: "DeviceBatch") -> None:
        out = loaded.out.rows(0, loaded.batch.num_tokens)
        self.attention.attend(loaded.qkv, loaded.keys, loaded.values, loaded.inputs, out)

    def result(self, loaded: "DeviceBatch") -> Tensor:
        """[tokens, kv_heads, group, head_dim]; nothing behind it was touched."""
        rows = self.read(loaded.out)
        num_tokens = loaded.batch.num_tokens
        assert (rows[num_tokens:] == SENTINEL).all()
        return rows[:num_tokens].view(loaded.batch.queries.shape)

    def attend(self, batch: Batch, size: StepSize | None = None) -> Tensor:
        """Plan for the batch or a larger `size`, launch, and read the result."""
        loaded = self.load(batch)
        self.attention.plan(batch.shape.size if size is None else size)
        self.launch(loaded)
        result = self.result(loaded)
        loaded.free(self.driver)
        return result


@dataclass(frozen=True)
class DeviceBatch:
    """A batch in device memory."""

    batch: Batch
    qkv: Buffer
    keys: Buffer
    values: Buffer
    inputs: StepInputs[Buffer]
    out: Buffer

    def free(self, driver: Driver) -> None:
        inputs = self.inputs
        for buffer in (self.qkv, self.keys, self.values, self.out):
            driver.free(buffer.address)
        for buffer in (inputs.header, inputs.query_starts, inputs.context_lens, inputs.slots, inputs.block_tables):
            driver.free(buffer.address)


def assert_exact(found: Tensor, batch: Batch, device: str = "cpu") -> None:
    """Each element within the bound of its roundings."""
    exact, bound = exact_attention(batch, device)
    excess = ((found.double() - exact).abs() / bound).nan_to_num(nan=torch.inf)
    worst = excess.argmax().item()
    assert excess.max() <= 1, (
        f"{(excess > 1).sum()} of {excess.numel()} elements are off, element {worst} by {excess.max():.2f} bounds: "
        f"{found.flatten()[worst]} for {exact.flatten()[worst]}"
    )
