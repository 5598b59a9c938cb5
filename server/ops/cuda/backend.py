"""The one door to the cuda backend: everything outside this package gets its operations here."""

from collections.abc import Iterable, Mapping

from server.errors import StartupError
from server.models.facts import ModelFacts
from server.models.rope import inverse_frequencies
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import Driver, KernelImage, Stream
from server.ops.cuda.operations import CudaOperations
from server.ops.cuda.sizes import kv_pool_spec
from server.ops.cuda.support import why_unsupported
from server.ops.cuda.tiles import NO_TABLE, GemmTable
from server.ops.interface import BatchLimits, Operations


def create_backend(
    facts: ModelFacts,
    weights: Mapping[str, Buffer],
    limits: BatchLimits,
    *,
    vocab_limit: int,
    driver: Driver,
    stream: Stream,
    images: Iterable[KernelImage],
    gemms: GemmTable = NO_TABLE,
    kv_pool_address: int | None = None,
    records_steps: bool = True,
) -> Operations[Buffer]:
    """Operations whose work goes to `stream`; KV pool and buffers are allocated and kernels loaded here.

    weights: as of weights.weight_buffers; they need not hold the model yet. vocab_limit: ids from there on have no text
    and are never sampled. images: the kernels for the driver's device. gemms: how each projection is best computed on
    it. kv_pool_address: memory of kv_pool_spec's size, which is allocated if None. records_steps: whether it offers
    graphs.
    Raises StartupError if this backend cannot serve the model, OutOfDeviceMemory, KeyError if a kernel is missing.
    """
    reason = why_unsupported(facts)
    if reason is not None:
        raise StartupError(f"{reason}; use backend = torch")
    pool_spec = kv_pool_spec(facts, limits)
    return CudaOperations(
        facts,
        weights,
        limits,
        inverse_frequencies(facts),
        vocab_limit,
        driver=driver,
        stream=stream,
        images=images,
        gemms=gemms,
        kv_pool=None if kv_pool_address is None else Buffer(kv_pool_address, pool_spec.shape, pool_spec.dtype),
        records_steps=records_steps,
    )
