"""The attention kernels by themselves, run by the interpreter: any number of splits, and how splits are combined."""

import math
from random import Random

import pytest
import torch

from server.kernels import attention as kernels
from server.ops.cuda.attention import MAX_SPLITS
from server.ops.cuda.kernels import Kernels
from server.ops.interface import HEADER_FIELDS, BatchLimits
from tests.ops import host_interpreter
from tests.ops.attention_rig import SENTINEL, AttentionRig, assert_exact, attention_facts, make_batch
from tests.ops.host_driver import HostDriver, allocate_buffer, as_tensor, to_device
from tests.ops.host_kernels import host_images

NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM = 2, 3, 64
NUM_HEADS = NUM_KV_HEADS * GROUP_SIZE
LIMITS = BatchLimits(8, 4, 512, 60, 16)


@pytest.mark.parametrize("num_splits", [2, 3, 5, MAX_SPLITS])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_any_number_of_splits_gives_the_attention_of_the_whole(num_splits: int, dtype: str) -> None:
    torch.manual_seed(num_splits)
    facts = attention_facts(num_kv_heads=NUM_KV_HEADS, group_size=GROUP_SIZE, head_dim=HEAD_DIM, dtype=dtype)
    rig = AttentionRig(HostDriver(), host_images(), facts, LIMITS)
    batch = make_batch(facts, LIMITS, [(0, 1), (127, 1), (128, 1), (400, 1)], num_decodes=4)
    loaded = rig.load(batch)
    # What the memory held before is NaN: an empty split's mean must not be read.
    partial = allocate_buffer(rig.driver, (4 * NUM_HEADS * num_splits, HEAD_DIM), "float32")
    partial_lse = allocate_buffer(rig.driver, (4 * NUM_HEADS * num_splits,), "float32")
    as_tensor(partial).fill_(torch.nan)
    as_tensor(partial_lse).fill_(torch.nan)
    decode = rig.kernels.get("attend_decode", facts.dtype, HEAD_DIM=HEAD_DIM, IS_SPLIT=True, COMBINES=False)
    inputs = loaded.inputs
    pool = (loaded.qkv, loaded.keys, loaded.values, inputs.header, inputs.slots, inputs.block_tables)
    sizes = (HEAD_DIM**-0.5 * math.log2(math.e), NUM_KV_HEADS, GROUP_SIZE, 4)
    arrivals = rig.attention.arrivals
    decode(
        (NUM_KV_HEADS, 4, num_splits), *pool, inputs.context_lens, loaded.out, partial, partial_lse, arrivals, *sizes
    )
    assert not as_tensor(partial_lse).isnan().any()
    combine = rig.kernels.get("combine_splits", facts.dtype, HEAD_DIM=HEAD_DIM)
    combine((NUM_HEADS, 4, 1), partial, partial_lse, inputs.header, loaded.out, num_splits)
    assert_exact(rig.result(loaded), batch)


@pytest.mark.parametrize("order", ["first to last", "last to first", "random", "request by request"])
@pytest.mark.parametrize("num_splits", [2, 5, MAX_SPLITS])
def test_the_last_split_combines_what_a_kernel_of_its_own_would(
    num_splits: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, whichever split is last; and the arrivals are 0 again for the next layer."""
    orders = {
        "first to last": list,
        "last to first": lambda indices: list(indices)[::-1],
        "random": lambda indices: Random(num_splits).sample(found := list(indices), len(found)),
        "request by request": lambda indices: sorted(indices, key=lambda index: (index[1], -index[2], index[0])),
    }
    torch.manual_seed(num_splits)
    facts = attention_facts(num_kv_heads=NUM_KV_HEADS, group_size=GROUP_SIZE, head_dim=HEAD_DIM)
    rig = AttentionRig(HostDriver(), host_images(), facts, LIMITS)
    batch = make_batch(facts, LIMITS, [(0, 1), (127, 1), (400, 1)], num_decodes=3)
    loaded = rig.load(batch)
    inputs, arrivals = loaded.inputs, rig.attention.arrivals
    pool = (loaded.qkv, loaded.keys, loaded.values, inputs.header, inputs.slots, inputs.block_tables)
    sizes = (HEAD_DIM**-0.5 * math.log2(math.e), NUM_KV_HEADS, GROUP_SIZE, 4)
    parts = [
        allocate_buffer(rig.driver, (4 * NUM_HEADS * num_splits, *width), "float32") for width in ((HEAD_DIM,), ())
    ]
    results = []
    for combines in (False, True):
        for part in parts:
            as_tensor(part).fill_(torch.nan)
        as_tensor(loaded.out).fill_(SENTINEL)
        if combines:
            monkeypatch.setattr(host_interpreter, "program_order", orders[order])
        decode = rig.kernels.get("attend_decode", facts.dtype, HEAD_DIM=HEAD_DIM, IS_SPLIT=True, COMBINES=combines)
        # A grid for four requests, of which there are three.
        decode((NUM_KV_HEADS, 4, num_splits), *pool, inputs.context_lens, loaded.out, *parts, arrivals, *sizes)
        if not combines:
            combine = rig.kernels.get("combine_splits", facts.dtype, HEAD_DIM=HEAD_DIM)
            combine((NUM_HEADS, 4, 1), *parts, inputs.header, loaded.out, num_splits)
        results.append(rig.result(loaded))
        assert as_tensor(arrivals).count_nonzero() == 0
    assert torch.equal(*results)
    assert_exact(results[1], batch)


@pytest.mark.parametrize("num_splits", [1, 2, 33, MAX_SPLITS])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_means_are_combined_by_their_weights(num_splits: int, head_dim: int) -> None:
    torch.manual_seed(num_splits)
    num_requests, num_heads = 3, 2
    means = torch.randn(num_requests, num_heads, num_splits, head_dim)
    lse = torch.randn(num_requests, num_heads, num_splits) * 20 + 500  # far beyond what 2**x takes
    is_empty = torch.rand(lse.shape) < 0.4
    is_empty[:, :, 0] = False
    lse[is_empty], means[is_empty] = -torch.inf, torch.nan
    weights = torch.softmax(lse.double() * math.log(2), -1)
    expected = (weights[..., None] * means.double().nan_to_num(nan=0.0)).sum(2)

    driver = HostDriver()
    combine = Kernels(driver, driver.create_stream(), host_images()).get("combine_splits", "float16", HEAD_DIM=head_dim)
    out = allocate_buffer(driver, (num_requests, num_heads, head_dim), "float16")
    header = to_device(driver, torch.tensor([num_requests, num_requests, num_requests, 1], dtype=torch.int32))
    combine((num_heads, num_requests, 1), to_device(driver, means), to_device(driver, lse), header, out, num_splits)
    torch.testing.assert_close(as_tensor(out).double(), expected, rtol=2**-11 * 1.01, atol=1e-5)


def test_kernels_know_the_places_of_the_header() -> None:
    for place, name in enumerate(HEADER_FIELDS):
        assert getattr(kernels, name.upper()).value == place
