"""The model worker's way to the weights: wait for the loader, finish its work if it cannot, map them read-only.

Knows the board, the hand-over and the record of the load; does not know what the weights mean. Every life of a model
worker comes this way, so a mapping that has been used before is verified before it serves again.

    loader alive and beating       wait
    loader gone (its lock is free) take the lock, load what is missing, verify
    loader silent for 2 s          SIGKILL it, then as above
    sums differ from the load's    load everything again, verify

Two failures in a row, whoever's, end the service with exit code 3; faults of the files with 4, at once.
"""

import contextlib
import logging
import os
import signal
import time

from server.errors import EngineDead, StartupError
from server.launch.board import ExitCode, LoaderState, Role
from server.launch.service import Service
from server.launch.supervisor import wake_master
from server.weights.fill import complete_load, damaged_tensors
from server.weights.memory import WeightMemory, WeightStore, WritableMemory
from server.weights.record import LoadRecord
from server.weights.shard_index import name_some

logger = logging.getLogger(__name__)

LOADER_SILENCE_S = 2.0
MAX_ATTEMPTS = 2  # the loader's, and one to take over
_POLL_S = 0.002


def wait_for_weights(service: Service, store: WeightStore) -> WeightMemory:
    """All weights, mapped read-only and verified. On a GPU `store` must be on the model worker's device.

    Raises StartupError when the files are at fault, else EngineDead, after which another attempt may be made.
    """
    return _Weights(service, store).wait()


class _Weights:
    def __init__(self, service: Service, store: WeightStore) -> None:
        self._board = service.board
        self._plan = service.load_plan
        self._record = service.load_record
        self._hand_over = service.hand_over
        self._store = store
        self._num_bytes = service.layout.total_bytes
        self._has_killed = False

    def wait(self) -> WeightMemory:
        while True:
            while not self._record.is_complete:
                self._check_stop()
                if self._board.loader_state == LoaderState.CANNOT_SHARE:
                    return self._load_privately()
                lock_fd = self._record.try_lock()
                if lock_fd is None:
                    self._kill_silent_loader()
                    time.sleep(_POLL_S)
                    continue
                try:
                    self._take_over()
                finally:
                    os.close(lock_fd)
            self._board.loader_state = LoaderState.LOADED  # as the loader says itself, unless it died in between
            if (memory := self._map_verified()) is not None:
                return memory

    def _check_stop(self) -> None:
        if self._board.stop or self._board.halt_code:
            raise EngineDead("the weights will not be loaded: the service is stopping")

    def _kill_silent_loader(self) -> None:
        """It holds the lock, so the pid is still its own."""
        board = self._board
        silent_s = time.monotonic() - board.loader_beat
        if silent_s > LOADER_SILENCE_S and not self._has_killed:
            self._has_killed = True
            reason = f"the loader was killed after {silent_s:.1f} s of silence"
            logger.warning(reason)
            board.note_loader_failure(reason)
            with contextlib.suppress(ProcessLookupError):
                os.kill(board.loader_pid, signal.SIGKILL)

    def _take_over(self) -> None:
        """The caller holds the lock: nobody else writes."""
        board, record = self._board, self._record
        if record.is_complete or board.loader_state == LoaderState.CANNOT_SHARE:
            return  # the loader has just finished and let go of the lock
        self._check_stop()
        fd = self._hand_over.copy_memory()
        if fd is None:
            raise EngineDead("the loader ended before it had allocated memory")
        try:
            attempt = record.count_attempt()
            if attempt > MAX_ATTEMPTS:
                self._give_up("the model worker that took over died")
            logger.warning("taking over from the loader: %d chunks are missing", len(record.missing()))
            board.begin_stage(Role.MODEL, "take over")
            board.loader_state = LoaderState.LOADING
            memory = self._store.map_writable(fd, self._num_bytes)
            try:
                self._fill(memory, record)
            finally:
                memory.close()
        except (StartupError, _Halted):
            raise
        except Exception as error:
            self._check_stop()
            logger.exception("the weights could not be loaded")
            self._give_up(f"taking over failed too: {error!r}")
        finally:
            os.close(fd)
        board.loader_failure = b""

    def _give_up(self, what: str) -> None:
        first = self._board.loader_failure.decode(errors="replace") or "the loader ended early"
        reason = f"the weights could not be loaded in {MAX_ATTEMPTS} attempts: {first}; {what}"
        self._board.halt(ExitCode.ENGINE_FAILED, reason)
        wake_master(self._board)
        raise _Halted(reason)

    def _fill(self, memory: WritableMemory, record: LoadRecord) -> None:
        board = self._board
        board.bytes_total = self._plan.num_bytes

        def on_progress(num_bytes: int) -> None:
            board.bytes_loaded = num_bytes
            self._check_stop()

        complete_load(self._plan, memory, record, on_progress)

    def _map_verified(self) -> WeightMemory | None:
        """None if the content is not what was loaded; then it has been given up."""
        self._board.begin_stage(Role.MODEL, "map weights")
        fd = self._hand_over.copy_memory()
        assert fd is not None, "a complete load without memory"
        memory = self._store.map_read_only(fd, self._num_bytes)
        os.close(fd)  # this process keeps the mapping alone, which cannot be written
        if self._record.count_mapping() == 0:
            return memory  # the loader has just verified it
        damaged = damaged_tensors(self._plan, memory, self._record)
        if not damaged:
            return memory
        reason = f"the weights were damaged since they were loaded: {name_some(damaged)}"
        logger.error("%s; they are loaded again", reason)
        self._board.note_loader_failure(reason)
        memory.close()
        self._record.forget_content()
        return None

    def _load_privately(self) -> WeightMemory:
        """Memory that ends with this process, loaded by the same code. Its sums are held against the first load's."""
        record = LoadRecord(len(self._plan.chunks), len(self._plan.sources))
        if self._record.sums is not None:
            record.store_sums(self._record.sums)
        self._board.begin_stage(Role.MODEL, "load weights")
        memory = self._store.private_memory(self._num_bytes)
        self._fill(memory, record)
        memory.release_buffers()
        if record.sums is not None:
            self._record.store_sums(record.sums)
        return memory


class _Halted(EngineDead):
    """The service ends, and the board says why."""
