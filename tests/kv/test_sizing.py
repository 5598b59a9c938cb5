import pytest

from server.errors import StartupError
from server.kv.sizing import (
    MIB,
    MemoryBudget,
    count_blocks,
    pool_bytes_on_device,
    resolve_max_model_len,
)
from server.settings.schema import KVSettings

GIB = 1 << 30


def kv_settings(pool_mib: int = 0, fraction: float = 0.9, reserve_mib: int = 1024) -> KVSettings:
    return KVSettings(
        block_size=16, pool_mib=pool_mib, device_memory_fraction=fraction, reserve_mib=reserve_mib, prefix_cache=True
    )


def test_pool_takes_what_fraction_weights_activations_and_reserve_leave() -> None:
    memory = MemoryBudget(total_bytes=100 * GIB, free_bytes=99 * GIB, weights_bytes=15 * GIB, activation_bytes=2 * GIB)
    assert pool_bytes_on_device(kv_settings(), memory) == (90 - 15 - 2 - 1) * GIB


def test_pool_is_bounded_by_what_others_leave_free() -> None:
    memory = MemoryBudget(total_bytes=100 * GIB, free_bytes=40 * GIB, weights_bytes=15 * GIB)
    assert pool_bytes_on_device(kv_settings(), memory) == (40 - 15 - 1) * GIB


def test_pool_mib_is_taken_as_asked() -> None:
    memory = MemoryBudget(total_bytes=100 * GIB, free_bytes=99 * GIB, weights_bytes=15 * GIB)
    assert pool_bytes_on_device(kv_settings(pool_mib=100), memory) == 100 * MIB


@pytest.mark.parametrize("pool_mib", [0, 9000])
def test_pool_that_does_not_fit_beside_the_weights_is_refused_with_the_numbers(pool_mib: int) -> None:
    free_bytes = (15 if pool_mib == 0 else 20) * GIB
    memory = MemoryBudget(total_bytes=24 * GIB, free_bytes=free_bytes, weights_bytes=15 * GIB)
    with pytest.raises(StartupError) as caught:
        pool_bytes_on_device(kv_settings(pool_mib=pool_mib), memory)
    for part in ("kv.pool_mib", "24576 MiB", f"{free_bytes // MIB} MiB", "15360 MiB", "1024 MiB", "0.9"):
        assert part in str(caught.value)


def test_blocks_are_counted_in_whole_ones() -> None:
    block_bytes = 57_344 * 16
    assert count_blocks(100 * block_bytes + block_bytes - 1, 57_344, 16) == 100
    assert count_blocks(10, 57_344, 16) == 1  # only scratch


def test_model_len_is_the_model_limit_or_what_the_pool_holds() -> None:
    assert resolve_max_model_len(0, 32_768, 10_000, 16) == 32_768
    assert resolve_max_model_len(0, 32_768, 101, 16) == 1600
    assert resolve_max_model_len(512, 32_768, 101, 16) == 512
    assert resolve_max_model_len(0, 32, 3, 16) == 32


def test_model_len_beyond_the_model_is_refused() -> None:
    with pytest.raises(StartupError, match=r"engine\.max_model_len: 4097 asked for, the model's own limit is 4096"):
        resolve_max_model_len(4097, 4096, 10_000, 16)


@pytest.mark.parametrize(("asked", "num_blocks"), [(2048, 101), (0, 4), (0, 1)])
def test_pool_that_holds_no_sensible_request_is_refused_with_the_numbers(asked: int, num_blocks: int) -> None:
    with pytest.raises(StartupError) as caught:
        resolve_max_model_len(asked, 32_768, num_blocks, 16)
    for part in (str(asked or 64), f"the pool has {num_blocks - 1}", f"{(num_blocks - 1) * 16} tokens", "kv.pool_mib"):
        assert part in str(caught.value)
