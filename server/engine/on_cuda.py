"""The cuda backend of one model worker, from its context to its operations, with as much as possible done beforehand.

Contexts of one GPU are made one after the other, so the loader's, which everybody waits for, comes first. Operations
are built on the mapped weights while those are still arriving: whoever uses them before `wait_for_weights` has returned
computes with whatever is there.
"""

import os
import time
from collections.abc import Callable

from server.engine.limits import batch_limits, largest_batch_limits
from server.engine.weights import wait_for_weights
from server.errors import EngineDead, StartupError
from server.kernels.manifest import REBUILD, built_folder, read_manifest
from server.kv import sizing
from server.launch.board import Board, LoaderState, Role
from server.launch.hand_over import send_memory
from server.launch.service import Service
from server.models.vocabulary import Vocabulary
from server.ops.cuda.backend import create_backend
from server.ops.cuda.buffer import Buffer
from server.ops.cuda.cublas import load_cublas
from server.ops.cuda.driver import Driver, KernelImage
from server.ops.cuda.nvidia import NvidiaDriver
from server.ops.cuda.sizes import activation_bound_bytes, kv_pool_spec, max_graph_requests
from server.ops.cuda.tiles import GemmTable
from server.ops.cuda.weights import weight_buffers
from server.ops.interface import Operations
from server.runner.graphs import graph_sizes
from server.weights.device_memory import DeviceMemory, DeviceStore, SumKernels

HAND_OVER_LIMIT_S = 5.0  # then this worker makes its context all the same; the load deadline bounds everything
FREE_MEMORY_LIMIT_S = 5.0  # a predecessor that was killed with its arbiter gives its memory back in 0.2 s
_POLL_S = 0.001


def load_libraries() -> None:
    """In the arbiter: mapping cuBLAS takes 0.06 s, needs no device, and is inherited by every model worker."""
    load_cublas()


def build_operations(service: Service, vocabulary: Vocabulary) -> tuple[Operations[Buffer], Callable[[], None]]:
    """Operations, and what to call before their results count: it returns when the weights are there and verified.

    Raises StartupError for what no restart can mend, else EngineDead.
    """
    board, settings, facts = service.board, service.settings, service.checkpoint.facts
    board.begin_stage(Role.MODEL, "wait for memory")
    _wait_for_memory(service)
    board.begin_stage(Role.MODEL, "context")
    driver = NvidiaDriver.open(sync_launches=settings.debug.sync_launches, early_launch=settings.debug.early_launch)
    board.device_name = driver.facts.name.encode()[:63]
    board.begin_stage(Role.MODEL, "libraries")
    driver.prepare_gemms()
    images, gemms = _kernels(board, driver)
    store = DeviceStore(driver, SumKernels.among(images))
    memory, wait = _map_weights(service, store)
    board.begin_stage(Role.MODEL, "pool, kernels")
    board.kv_pool_bytes = board.kv_pool_bytes or _pool_bytes(service, driver)
    limits = batch_limits(service, board.kv_pool_bytes)
    kv_pool_address = _map_pool(service, driver, kv_pool_spec(facts, limits).num_bytes)
    _wait_for_free_memory(driver, activation_bound_bytes(facts, limits))
    ops = create_backend(
        facts,
        weight_buffers(memory.address, service.layout, memory),
        limits,
        vocab_limit=min(vocabulary.num_token_ids, facts.vocab_size),
        driver=driver,
        stream=driver.create_stream(),
        images=images,
        gemms=gemms,
        kv_pool_address=kv_pool_address,
        records_steps=not settings.debug.sync_launches,  # a replayed graph does not say which of its launches failed
    )
    return ops, wait


def _wait_for_memory(service: Service) -> None:
    """Until the loader has made its context and allocated the weights' memory, or will not."""
    board, deadline = service.board, time.monotonic() + HAND_OVER_LIMIT_S
    while (fd := service.hand_over.copy_memory()) is None and board.loader_state != LoaderState.CANNOT_SHARE:
        if board.stop or board.halt_code:
            raise EngineDead("the weights will not be loaded: the service is stopping")
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_S)
    if fd is not None:
        os.close(fd)


def _kernels(board: Board, driver: Driver) -> tuple[tuple[KernelImage, ...], GemmTable]:
    """Those for this GPU, and the table of its GEMMs.

    That none fit is permanent, but not if they were rebuilt under a running service.
    """
    try:
        manifest = read_manifest(built_folder())
        if manifest is None:
            raise StartupError(f"no compiled kernels are in {built_folder()}: {REBUILD}")
        return manifest.images(driver.facts.arch), manifest.gemm_table(driver.facts.arch)
    except StartupError as error:
        if not board.ready_at:
            raise
        raise EngineDead(f"the kernels have changed since the service started, start it again: {error}") from error


def _map_weights(service: Service, store: DeviceStore) -> tuple[DeviceMemory, Callable[[], None]]:
    """The mapping that operations use, and what waits until its content is complete and verified."""
    fd = service.hand_over.copy_memory() if store.can_share else None
    if fd is None:
        memory = wait_for_weights(service, store)
        assert isinstance(memory, DeviceMemory)
        return memory, lambda: None
    mapped = store.map_read_only(fd, service.layout.total_bytes)
    os.close(fd)

    def wait() -> None:
        wait_for_weights(service, store).close()  # a mapping of the same memory, for the check

    return mapped, wait


def _pool_bytes(service: Service, driver: Driver) -> int:
    """From what the GPU has with the weights on it, or on their way to it."""
    facts, limits = service.checkpoint.facts, largest_batch_limits(service)
    free_bytes, total_bytes = driver.memory_info()
    num_graphs = len(graph_sizes(max_graph_requests(limits), limits))
    activation_bytes = activation_bound_bytes(facts, limits, num_graphs)
    weights_bytes = service.layout.total_bytes
    memory = sizing.MemoryBudget(total_bytes, free_bytes + weights_bytes, weights_bytes, activation_bytes)
    return sizing.pool_bytes_on_device(service.settings.kv, memory)


def _map_pool(service: Service, driver: Driver, num_bytes: int) -> int:
    """The KV pool: the predecessor's, whose content counts for nothing, or a new one for all successors."""
    if not driver.facts.can_share_memory:
        _wait_for_free_memory(driver, num_bytes)
        return driver.allocate(num_bytes)
    rounded_bytes = driver.facts.shareable_bytes(num_bytes)
    fd = service.pool_hand_over.copy_memory()
    if fd is None:
        fd = driver.create_shareable(rounded_bytes)
        send_memory(service.pool_sender, fd)
    try:
        return driver.map_shareable(fd, rounded_bytes, writable=True)
    finally:
        os.close(fd)


def _wait_for_free_memory(driver: Driver, num_bytes: int) -> None:
    deadline = time.monotonic() + FREE_MEMORY_LIMIT_S
    while (free_bytes := driver.memory_info()[0]) < num_bytes:
        if time.monotonic() > deadline:
            raise EngineDead(
                f"{num_bytes // sizing.MIB} MiB are needed beside weights and KV pool, {free_bytes // sizing.MIB} MiB "
                f"of the GPU are free after {FREE_MEMORY_LIMIT_S:.0f} s: end what else uses it (nvidia-smi lists it)"
            )
        time.sleep(_POLL_S)
