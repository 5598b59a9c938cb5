"""Rotary position embedding with Qwen3's norm of heads before it, and the way of K and V into the pool.

Pairs element i with i + HEAD_DIM / 2, as Llama does. Everything is in fp32 and rounded once.
"""

import triton
import triton.language as tl

from server.kernels.early_launch import launch_dependents, wait_for_predecessor
from server.kernels.spec import KernelSpec, Variant

HEADS_PER_TILE = 16  # a group's query heads and its k: one tile for every group of up to 15


@triton.jit
def _rotated_halves(
    low, high, cosines, sines, low_weights, high_weights, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr
):
    """Heads [n, HEAD_DIM] in two halves, normed if the model has norms there, and turned by their token's angles."""
    if HAS_NORM:
        squares = tl.sum(low * low + high * high, 1)
        scale = (1.0 / tl.sqrt_rn(squares / HEAD_DIM + eps))[:, None]
        low *= scale * low_weights
        high *= scale * high_weights
    return low * cosines - high * sines, high * cosines + low * sines


@triton.jit
def rotate_and_store(
    qkv,
    positions,
    kv_rows,
    inverse_frequencies,
    q_norm,
    k_norm,
    keys,
    values,
    num_kv_heads,
    group_size,
    eps,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """q and k of qkv are normed and rotated in place; k and v go to row kv_rows[t]. grid (tokens, num_kv_heads, 1).

    A row of qkv: per KV head its `group_size` query heads, k and v, each HEAD_DIM. keys, values: the layer's pool
    [rows, num_kv_heads, HEAD_DIM]. Without norm q_norm and k_norm [HEAD_DIM] are not read.
    """
    wait_for_predecessor(EARLY)
    launch_dependents(EARLY)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    group = qkv + (token.to(tl.int64) * num_kv_heads + kv_head) * (group_size + 2) * HEAD_DIM
    pool_offset = (tl.load(kv_rows + token).to(tl.int64) * num_kv_heads + kv_head) * HEAD_DIM
    pair = tl.arange(0, HALF)[None, :]
    # NOTE: angles reach 1e5. tl.sin and tl.cos reduce them exactly (libdevice); fast approximations would not.
    angles = tl.load(positions + token).to(tl.float32) * tl.load(inverse_frequencies + pair)
    cosines = tl.cos(angles)
    sines = tl.sin(angles)
    for begin in range(0, group_size + 1, HEADS):
        heads = begin + tl.arange(0, HEADS)[:, None]
        is_head = (heads <= group_size) & (pair < HALF)
        is_key = (heads == group_size) & (pair < HALF)
        where = group + heads * HEAD_DIM + pair
        low = tl.load(where, mask=is_head, other=0.0).to(tl.float32)
        high = tl.load(where + HALF, mask=is_head, other=0.0).to(tl.float32)
        low_weights = 1.0
        high_weights = 1.0
        if HAS_NORM:
            is_query = heads < group_size
            low_weights = tl.where(is_query, tl.load(q_norm + pair), tl.load(k_norm + pair)).to(tl.float32)
            high_weights = tl.where(is_query, tl.load(q_norm + HALF + pair), tl.load(k_norm + HALF + pair))
            high_weights = high_weights.to(tl.float32)
        low, high = _rotated_halves(low, high, cosines, sines, low_weights, high_weights, eps, HEAD_DIM, HAS_NORM)
        low = low.to(qkv.dtype.element_ty)
        high = high.to(qkv.dtype.element_ty)
        tl.store(where, low, mask=is_head)
        tl.store(where + HALF, high, mask=is_head)
        key = keys + pool_offset + heads * 0 + pair
        tl.store(key, low, mask=is_key)
        tl.store(key + HALF, high, mask=is_key)
    column = tl.arange(0, HEAD_DIM)
    value = tl.load(group + (group_size + 1) * HEAD_DIM + column)
    tl.store(values + pool_offset + column, value)


SPECS = (
    KernelSpec(
        name="rotate_and_store",
        function="rotate_and_store",
        parameters={
            "qkv": "*T",
            "positions": "*i32",
            "kv_rows": "*i32",
            "inverse_frequencies": "*fp32",
            "q_norm": "*T",
            "k_norm": "*T",
            "keys": "*T",
            "values": "*T",
            "num_kv_heads": "i32",
            "group_size": "i32",
            "eps": "fp32",
        },
        variants=tuple(
            Variant({"HEAD_DIM": head_dim, "HAS_NORM": has_norm, "HEADS": HEADS_PER_TILE})
            for head_dim in (64, 128)
            for has_norm in (False, True)
        ),
        aligned={"positions": 4, "kv_rows": 4},
    ),
)
