"""How many KV blocks there are and how long a request may be: arithmetic on bytes, done before anything is allocated.

Knows bytes and tokens. Does not know devices, models or the pool's buffer.
"""

from dataclasses import dataclass

from server.errors import StartupError
from server.kv.block_pool import SCRATCH_BLOCK
from server.settings.schema import KVSettings

MIB = 1 << 20
MIN_MODEL_LEN = 64  # a shorter context serves nobody: better no start than a server that refuses every prompt


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of one device. `free_bytes` is what is free before weights and pool are allocated there.

    `activation_bytes` bounds what a step needs besides weights and pool, as far as `kv.reserve_mib` does not cover it.
    """

    total_bytes: int
    free_bytes: int
    weights_bytes: int
    activation_bytes: int = 0


def pool_bytes_on_device(settings: KVSettings, memory: MemoryBudget) -> int:
    """Bytes for the KV pool beside the weights. Raises StartupError when they leave nothing, or less than asked for."""
    reserve_bytes = settings.reserve_mib * MIB
    usable_bytes = min(int(memory.total_bytes * settings.device_memory_fraction), memory.free_bytes)
    left_bytes = usable_bytes - memory.weights_bytes - memory.activation_bytes - reserve_bytes
    asked_bytes = settings.pool_mib * MIB
    if left_bytes <= 0 or asked_bytes > left_bytes:
        raise StartupError(
            f"kv.pool_mib: {settings.pool_mib or 'all that is left'} asked for, {left_bytes // MIB} MiB are left: "
            f"{usable_bytes // MIB} MiB usable (the device has {memory.total_bytes // MIB} MiB, "
            f"{memory.free_bytes // MIB} MiB of them free, kv.device_memory_fraction is "
            f"{settings.device_memory_fraction:g}), minus weights {memory.weights_bytes // MIB} MiB, "
            f"activations {memory.activation_bytes // MIB} MiB, kv.reserve_mib {settings.reserve_mib} MiB; "
            "free device memory, raise the fraction, lower the reserve or serve a smaller model"
        )
    return asked_bytes or left_bytes


def count_blocks(pool_bytes: int, kv_bytes_per_token: int, block_size: int) -> int:
    """Blocks of `block_size` tokens that fit in `pool_bytes`, the scratch block among them; at least that one."""
    return max(pool_bytes // (kv_bytes_per_token * block_size), SCRATCH_BLOCK + 1)


def resolve_max_model_len(asked: int, model_limit: int, num_blocks: int, block_size: int) -> int:
    """Prompt and output tokens that one request may have; `asked` 0 means as many as model and pool allow.

    Raises StartupError when `asked` exceeds the model's limit or the pool, or when the pool holds no sensible request.
    """
    pool_limit = (num_blocks - 1) * block_size
    if asked > model_limit:
        raise StartupError(f"engine.max_model_len: {asked} asked for, the model's own limit is {model_limit}")
    min_len = asked or min(model_limit, MIN_MODEL_LEN)
    if pool_limit < min_len:
        raise StartupError(
            f"engine.max_model_len: a request of {min_len} tokens needs {-(-min_len // block_size)} KV blocks of "
            f"{block_size} tokens, the pool has {num_blocks - 1}, which hold {pool_limit} tokens; "
            "raise kv.pool_mib or kv.device_memory_fraction, or lower engine.max_model_len"
        )
    return asked or min(model_limit, pool_limit)
