"""The one door to the cuda backend: everything outside this package gets its operations here."""

from collections.abc import Iterable, Mapping

from server.errors import StartupError
from server.models.facts import ModelFacts
from server.models.rope import inverse_frequencies
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.driver import Driver, KernelImage, Stream
from server.ops.cuda.operations import CudaOperations
from server.ops.cuda.sizes import why_unsupported
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
    records_steps: bool = True,
) -> Operations[Buffer]:
    """Operations whose work goes to `stream`; KV pool and buffers are allocated and kernels loaded here.

    weights: as of weights.weight_buffers; they need not hold the model yet. vocab_limit: ids from there on have no text
    and are never sampled. images: the kernels for the driver's device. records_steps: whether it offers graphs.
    Raises StartupError if this backend cannot serve the model, OutOfDeviceMemory, KeyError if a kernel is missing.
    """
    reason = why_unsupported(facts)
    if reason is not None:
        raise StartupError(f"{reason}; use backend = torch")
    ops = CudaOperations(
        facts,
        weights,
        limits,
        inverse_frequencies(facts),
        vocab_limit,
        driver=driver,
        stream=stream,
        images=images,
    )
    if not records_steps:
        ops.max_graph_requests = 0
    return ops
