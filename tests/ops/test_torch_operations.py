"""Each operation of the torch backend against float64, on random input, in fp32 and bf16."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from server.models.facts import DType, ModelFacts
from server.ops.interface import ON_HOST, BatchLimits, Linear, StepShape, StepSize
from server.ops.sampling import SamplingUse
from server.ops.torch.backend import create_backend
from server.ops.torch.operations import TorchOperations
from server.ops.torch.weights import TORCH_DTYPES

FACTS = ModelFacts(
    architecture="Qwen3ForCausalLM",
    vocab_size=50,
    hidden_size=48,
    intermediate_size=36,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=128,
    rms_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    qkv_bias=True,
    out_bias=False,
    qk_norm=True,
    tied_head=True,
    dtype="float32",
)
LIMITS = BatchLimits(max_batched_tokens=32, max_num_requests=4, max_model_len=64, num_blocks=17, block_size=8)
# Two decodes, then two prefill chunks: (start, tokens, blocks).
CHUNKS = ((20, 1, (3, 9, 1)), (8, 1, (2, 4)), (5, 7, (16, 7)), (0, 9, (11, 12)))
SLOTS = (2, 0, 3, 1)
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
NO_SAMPLING = SamplingUse(penalty=False, min_tokens=False, top_k_or_top_p=False, min_p=False, logprobs=False)


@dataclass(frozen=True)
class Bench:
    """A backend in the middle of a step of CHUNKS, and where the step's tokens are."""

    ops: TorchOperations
    token_ids: list[int]
    positions: list[int]
    owners: list[int]

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(self.ops.weights["embed.weight"].dtype)

    def pool_row(self, chunk: int, position: int) -> int:
        return CHUNKS[chunk][2][position // LIMITS.block_size] * LIMITS.block_size + position % LIMITS.block_size


@pytest.fixture(params=DTYPES)
def bench(request: pytest.FixtureRequest) -> Bench:
    torch.manual_seed(0)
    dtype: DType = request.param
    table = torch.randn(FACTS.vocab_size, FACTS.hidden_size).to(TORCH_DTYPES[dtype])
    ops = create_backend(replace(FACTS, dtype=dtype), {"embed.weight": table}, LIMITS, vocab_limit=FACTS.vocab_size)
    assert isinstance(ops, TorchOperations)
    host = ops.next_staging()
    bench = Bench(ops, [], [], [])
    for index, (start, length, block_ids) in enumerate(CHUNKS):
        for position in range(start, start + length):
            row = len(bench.positions)
            host.token_ids[row], host.token_slots[row] = (7 * row) % FACTS.vocab_size, ON_HOST
            host.positions[row], host.kv_rows[row] = position, bench.pool_row(index, position)
            bench.token_ids.append(host.token_ids[row])
            bench.positions.append(position)
            bench.owners.append(index)
        host.slots[index] = SLOTS[index]
        host.context_lens[index], host.query_starts[index + 1] = start + length, len(bench.positions)
        for column, block_id in enumerate(block_ids):
            host.block_tables[SLOTS[index] * LIMITS.max_blocks_per_request + column] = block_id
    host.sample_rows[0], host.sample_rows[1] = 1, 17
    starts, lengths = tuple(chunk[0] for chunk in CHUNKS), tuple(chunk[1] for chunk in CHUNKS)
    size = StepSize(len(bench.positions), 2, len(CHUNKS) - 2, 2)
    columns = LIMITS.max_blocks_per_request
    ops.begin_step(StepShape(starts, lengths, 2, 2, 0, False, NO_SAMPLING, LIMITS.max_num_requests, columns, size))
    return bench


def assert_rounded(found: Tensor, exact: Tensor) -> None:
    """Within one rounding of the dtype, and a little of fp32 on the way."""
    tolerance = 1e-5 if found.dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=1e-5)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + FACTS.rms_eps).sqrt() * weight.double()


def rotated(x: Tensor, position: int) -> Tensor:
    """x [..., head_dim], pair (i, i + half) turned by position * theta^(-2i / head_dim)."""
    half = FACTS.head_dim // 2
    angles = position * FACTS.rope_theta ** (-torch.arange(half).double() / half)
    turned = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), -1).double()) * torch.polar(
        torch.ones(half).double(), angles
    )
    return torch.cat((turned.real, turned.imag), -1)


def test_embed_reads_the_rows_of_the_token_ids(bench: Bench) -> None:
    table = bench.ops.weights["embed.weight"]
    out = torch.empty(len(bench.token_ids), FACTS.hidden_size)
    bench.ops.embed(table, out)
    assert torch.equal(out, table[bench.token_ids].float())


def test_rms_norm_rounds_once(bench: Bench) -> None:
    x, weight = torch.randn(18, FACTS.hidden_size) * 5, torch.randn(FACTS.hidden_size)
    out = bench.random(18, FACTS.hidden_size)
    bench.ops.rms_norm(x, weight, out)
    assert_rounded(out, rms_norm(x, weight))


def test_add_rms_norm_keeps_the_sum_in_fp32(bench: Bench) -> None:
    residual, weight = torch.randn(18, FACTS.hidden_size), torch.randn(FACTS.hidden_size)
    delta, out = bench.random(18, FACTS.hidden_size, scale=1e-3), bench.random(18, FACTS.hidden_size)
    total = residual.double() + delta.double()
    bench.ops.add_rms_norm(residual, delta, weight, out)
    torch.testing.assert_close(residual.double(), total, rtol=1e-6, atol=1e-6)
    assert_rounded(out, rms_norm(total, weight))


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(bench: Bench, has_bias: bool) -> None:
    x, weight = bench.random(18, FACTS.hidden_size), bench.random(30, FACTS.hidden_size, scale=0.2)
    bias = bench.random(30) if has_bias else None
    out = bench.random(18, 30) * float("nan")
    bench.ops.linear(x, Linear(weight, bias), out)
    exact = x.double() @ weight.double().T
    assert_rounded(out, exact + bias.double() if bias is not None else exact)


@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_and_store(bench: Bench, has_norm: bool) -> None:
    num_tokens, layer = len(bench.positions), 1
    qkv = bench.random(num_tokens, FACTS.qkv_rows)
    groups = qkv.clone().view(num_tokens, FACTS.num_kv_heads, FACTS.group_size + 2, FACTS.head_dim)
    q_norm, k_norm = torch.randn(FACTS.head_dim), torch.randn(FACTS.head_dim)
    before = bench.ops.kv_pool.clone()
    bench.ops.rotate_and_store(layer, qkv, *(q_norm, k_norm) if has_norm else (None, None))
    out = qkv.view(groups.shape)
    keys, values = bench.ops.kv_pool[layer]
    for token, (position, owner) in enumerate(zip(bench.positions, bench.owners, strict=True)):
        q, k, v = groups[token].split((FACTS.group_size, 1, 1), dim=1)
        if has_norm:
            q, k = rms_norm(q, q_norm), rms_norm(k, k_norm)
        row = bench.pool_row(owner, position)
        assert_rounded(out[token, :, : FACTS.group_size], rotated(q, position))
        assert_rounded(keys[row], rotated(k, position).squeeze(1))
        assert torch.equal(values[row], v.squeeze(1))
    written = [bench.pool_row(owner, p) for p, owner in zip(bench.positions, bench.owners, strict=True)]
    others = [row for row in range(keys.shape[0]) if row not in written]
    assert torch.equal(bench.ops.kv_pool[:, :, others], before[:, :, others])
    assert torch.equal(bench.ops.kv_pool[0], before[0])


def test_attend_sees_the_past_of_its_own_request_only(bench: Bench) -> None:
    num_tokens, layer = len(bench.positions), 1
    pool = bench.ops.kv_pool
    pool.copy_(torch.full_like(pool, float("nan")))
    for chunk, (start, length, _) in enumerate(CHUNKS):
        for position in range(start + length):
            pool[layer, :, bench.pool_row(chunk, position)] = bench.random(2, FACTS.num_kv_heads, FACTS.head_dim)
    qkv = bench.random(num_tokens, FACTS.qkv_rows, scale=2.0)
    out = bench.random(num_tokens, FACTS.num_heads * FACTS.head_dim)
    bench.ops.attend(layer, qkv, out)
    groups = qkv.view(num_tokens, FACTS.num_kv_heads, FACTS.group_size + 2, FACTS.head_dim)[:, :, : FACTS.group_size]
    for token, (position, owner) in enumerate(zip(bench.positions, bench.owners, strict=True)):
        rows = [bench.pool_row(owner, past) for past in range(position + 1)]
        keys, values = (pool[layer, part, rows].double().transpose(0, 1) for part in range(2))
        weights = (groups[token].double() @ keys.transpose(1, 2) * FACTS.head_dim**-0.5).softmax(-1)
        exact = (weights @ values).flatten()
        # Attention weights are rounded to bf16 before they meet the values.
        tolerance = 1e-5 if out.dtype == torch.float32 else 2**-6
        torch.testing.assert_close(out[token].double(), exact, rtol=tolerance, atol=tolerance)


def test_gate_pairs_the_halves_of_each_block(bench: Bench) -> None:
    gate_up, out = bench.random(18, 2 * FACTS.intermediate_size), bench.random(18, FACTS.intermediate_size)
    bench.ops.gate(gate_up, out)
    gate, up = gate_up.double().view(18, FACTS.num_mlp_blocks, 2, -1).unbind(2)
    assert_rounded(out, (gate * gate.sigmoid() * up).flatten(1))


def test_linear_add_norm_is_its_parts(bench: Bench) -> None:
    x, weight = bench.random(18, 48), bench.random(FACTS.hidden_size, 48, scale=0.2)
    norm_weight, bias = torch.randn(FACTS.hidden_size), bench.random(FACTS.hidden_size)
    residual, delta = torch.randn(18, FACTS.hidden_size), bench.random(18, FACTS.hidden_size)
    expected, normed, out = residual.clone(), torch.empty_like(delta), torch.empty_like(delta)
    bench.ops.linear(x, Linear(weight, bias), delta)
    bench.ops.add_rms_norm(expected, delta, norm_weight, normed)
    delta.fill_(float("nan"))
    bench.ops.linear_add_norm(x, Linear(weight, bias), delta, residual, norm_weight, out)
    assert torch.equal(residual, expected)
    assert torch.equal(out, normed)


def test_gated_linear_is_its_parts(bench: Bench) -> None:
    x, width = bench.random(18, FACTS.hidden_size), FACTS.intermediate_size
    weight = bench.random(2 * width, FACTS.hidden_size, scale=0.2)
    gate_up, expected, out = bench.random(18, 2 * width), bench.random(18, width), bench.random(18, width)
    bench.ops.linear(x, Linear(weight, None), gate_up)
    bench.ops.gate(gate_up, expected)
    gate_up.fill_(float("nan"))
    bench.ops.gated_linear(x, Linear(weight, None), gate_up, out)
    assert torch.equal(out, expected)


def test_gather_samples_takes_the_rows_of_the_step(bench: Bench) -> None:
    x, out = bench.random(18, FACTS.hidden_size), bench.random(2, FACTS.hidden_size)
    bench.ops.gather_samples(x, out)
    assert torch.equal(out, x[[1, 17]])


def test_logits_are_fp32(bench: Bench) -> None:
    x, head = bench.random(2, FACTS.hidden_size), bench.ops.weights["embed.weight"]
    out = torch.empty(2, FACTS.vocab_size)
    bench.ops.logits(x, head, out)
    tolerance = 1e-5 if x.dtype == torch.float32 else 2**-8  # on a CPU a bf16 GEMM gives bf16
    torch.testing.assert_close(out.double(), x.double() @ head.double().T, rtol=tolerance, atol=1e-4)
