"""How large an engine's steps, KV pool and queues are: settings and bytes become the limits that its parts receive.

Arithmetic only. Does not know devices.
"""

from server.kv.sizing import count_blocks, resolve_max_model_len
from server.launch.service import Service
from server.ops.interface import BatchLimits
from server.scheduler.budget import SchedulerLimits


def batch_limits(service: Service, pool_bytes: int) -> BatchLimits:
    """Of steps over a KV pool of `pool_bytes`. Raises StartupError if the pool holds no sensible request."""
    resolved, block_size = service.resolved, service.settings.kv.block_size
    num_blocks = count_blocks(pool_bytes, service.checkpoint.facts.kv_bytes_per_token, block_size)
    asked_len = service.settings.engine.max_model_len
    max_model_len = resolve_max_model_len(asked_len, resolved.max_model_len, num_blocks, block_size)
    return _limits(service, num_blocks, max_model_len)


def largest_batch_limits(service: Service) -> BatchLimits:
    """Of steps over a pool that is not known yet: what is needed beside it is at most what these need."""
    return _limits(service, 1, service.resolved.max_model_len)


def _limits(service: Service, num_blocks: int, max_model_len: int) -> BatchLimits:
    return BatchLimits(
        max_batched_tokens=max(service.resolved.max_batched_tokens, service.resolved.max_prefill_tokens),
        max_num_requests=service.settings.engine.max_num_requests,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=service.settings.kv.block_size,
        max_mixed_tokens=service.resolved.max_batched_tokens,
    )


def scheduler_limits(service: Service, limits: BatchLimits) -> SchedulerLimits:
    """Of the scheduler in front of such steps."""
    engine, resolved = service.settings.engine, service.resolved
    return SchedulerLimits(
        max_model_len=limits.max_model_len,
        max_num_requests=limits.max_num_requests,
        max_batched_tokens=resolved.max_batched_tokens,
        max_waiting_requests=engine.max_waiting_requests,
        max_waiting_tokens=engine.max_waiting_tokens,
        max_prefill_tokens=resolved.max_prefill_tokens,
        usual_batched_tokens=resolved.usual_batched_tokens,
        max_steps_behind=engine.max_steps_behind,
    )
