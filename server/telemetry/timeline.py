"""The start-up timeline as people and machines read it: rows, the path that everyone waited for, a checklist, restarts.

Computed from the board when asked, in any process. Knows no HTTP and nothing of what a stage does.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from server.launch.board import Board, ModelState, Role
from server.launch.stages import Stage, Track
from server.telemetry.stage_table import CHECKLIST, NO_FACTS, PARENTS, STAGES, ChecklistItem, StageFacts

_EXPECTED_ON = "H200"
_WORTH_A_WORD_S = 1e-3  # in the log
_GPU_FOLDER = Path("/proc/driver/nvidia/gpus")


class Row(msgspec.Struct, frozen=True):
    """One stage of one process. Seconds since exec; `end_s` null: still running.

    `rate` in bytes per second. `expected_s` null: nothing is known of this machine, or of this stage. `passed` null:
    not yet. `is_critical`: everyone waited for it.
    """

    role: str
    pid: int
    stage: str
    begin_s: float
    end_s: float | None
    seconds: float
    bytes: int
    rate: float | None
    expected_s: float | None
    check: str
    passed: bool | None
    is_critical: bool = False


class Segment(msgspec.Struct, frozen=True):
    """A piece of the critical path. Joined, they reach from exec to ready without a gap; `stage` null: unnamed time."""

    role: str
    stage: str | None
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.begin_s


class Process(msgspec.Struct, frozen=True):
    """`covered`: share of the time from its fork (exec for the master) to its ready that has a named stage."""

    role: str
    begin_s: float
    ready_s: float | None
    covered: float


class Item(msgspec.Struct, frozen=True):
    """A step of the checklist. `elsewhere_s`: see ChecklistItem."""

    item: str
    elsewhere_s: float
    expected_s: float | None
    measured_s: float
    passed: bool | None
    note: str


class Graphs(msgspec.Struct, frozen=True):
    """Recorded graphs of the running model worker."""

    captured: int
    wanted: int
    complete: bool


class Restart(msgspec.Struct, frozen=True):
    """The last replacement of a dead process; `down_s` from the last sign of life, at `began_s`, until it was ready.

    A model worker that died with its arbiter has no stage before its fork: what happened until then is the arbiter's.
    """

    count: int
    began_s: float | None
    down_s: float | None
    stages: list[Row]


class Startup(msgspec.Struct, frozen=True):
    """Everything. `ready_s` is the first moment at which a request could be answered, in seconds since exec.

    `pids`: of the processes that live now.
    """

    ready_s: float | None
    device: str
    backend: str
    pids: dict[str, int]
    stages: list[Row]
    critical_path: list[Segment]
    processes: list[Process]
    checklist: list[Item]
    graphs: Graphs
    restarts: dict[str, Restart]


def ready_at(board: Board) -> float | None:
    """When the first start was over: an engine with a token, and a web worker that listens. None: not yet."""
    model_ready_at = board.start[Role.MODEL].ready_at
    return max(model_ready_at, board.web_ready_at) if model_ready_at and board.web_ready_at else None


def running_stages(board: Board) -> list[str]:
    """Which stages run now, of starts and restarts, those that only wait for others last: "loader weights for 12 s"."""
    now, found = time.monotonic(), []
    for role in Role:
        *_, stage = [None, *board.track(role).rows()]
        if stage is not None and not stage.end:
            name = stage.name.decode()
            is_waiting = STAGES.get((role, name), NO_FACTS).waits_for is not None
            found.append((is_waiting, f"{role.name.lower()} {name} for {now - stage.begin:.0f} s"))
    return [text for _, text in sorted(found, key=lambda item: item[0])]


def read_startup(board: Board, backend: str) -> Startup:
    """The view of this moment. `backend`: what is expected holds for the cuda backend alone."""
    view = _View(board, _device_name(board), backend == "cuda")
    path = view.critical_path()
    rows = [msgspec.structs.replace(row, is_critical=_is_on(path, row)) for row in view.rows(board.start)]
    done_at = ready_at(board)
    return Startup(
        ready_s=view.seconds(done_at) if done_at else None,
        device=view.device,
        backend=backend,
        pids={"master": board.master_pid, "arbiter": board.arbiter_pid, "model": board.model_pid},
        stages=rows,
        critical_path=path,
        processes=view.processes(),
        checklist=[_checklist_row(item, rows) for item in CHECKLIST],
        graphs=_graphs(board),
        restarts={role.name.lower(): view.restart(role) for role in (Role.MODEL, Role.ARBITER)},
    )


def _is_on(path: list[Segment], row: Row) -> bool:
    end_s = row.begin_s + row.seconds
    return any(
        (part.role, part.stage) == (row.role, row.stage) and row.begin_s < part.end_s and part.begin_s < end_s
        for part in path
    )


def describe_start(board: Board) -> Iterator[str]:
    """A line per process and one for the critical path, for the log. Call when it is ready."""
    view = _View(board, "", False)
    for role in Role:
        rows = [row for row in view.rows(board.start) if row.role == role.name.lower()]
        if rows:
            stages = ", ".join(f"{row.stage} {row.seconds:.3f}" for row in rows)
            yield f"{role.name.lower()} from {rows[0].begin_s:.3f} s on: {stages}"
    path = [part for part in view.critical_path() if part.seconds >= _WORTH_A_WORD_S]
    stages = ", ".join(f"{part.role} {part.stage or '?'} {part.seconds:.3f}" for part in path)
    yield f"everyone waited for: {stages}"


@dataclass(frozen=True, slots=True)
class _Span:
    """A stage with an end: of a dead process, the moment in which its successor's first stage begins."""

    role: Role
    stage: Stage
    end: float
    is_unfinished: bool

    @property
    def facts(self) -> StageFacts:
        return STAGES.get((self.role, self.stage.name.decode()), NO_FACTS)


class _View:
    """One reading of the board."""

    def __init__(self, board: Board, device: str, has_kernels: bool) -> None:
        self._board = board
        self._now = time.monotonic()
        self._is_expected = has_kernels and _EXPECTED_ON in device
        self.device = device

    def seconds(self, moment: float) -> float:
        """Since exec."""
        return round(float(moment - self._board.started_at), 6)

    def rows(self, tracks: list[Track]) -> list[Row]:
        """Of all roles, in the order in which they began."""
        spans = [span for role in Role for span in self._spans(tracks, role)]
        return [self._row(span) for span in sorted(spans, key=lambda span: span.stage.begin)]

    def processes(self) -> list[Process]:
        """One per role that has begun."""
        found = []
        for role in Role:
            spans = self._spans(self._board.start, role)
            if spans:
                ready_at = self._board.start[role].ready_at
                begin, end = spans[0].stage.begin, ready_at or self._now
                named_s = sum(span.end - span.stage.begin for span in spans)
                covered = round(named_s / (end - begin), 4) if end > begin else 1.0
                ready_s = self.seconds(ready_at) if ready_at else None
                found.append(Process(role.name.lower(), self.seconds(begin), ready_s, covered))
        return found

    def restart(self, role: Role) -> Restart:
        """The last one of `role`."""
        board = self._board
        num_starts = board.num_engine_starts if role == Role.MODEL else board.num_arbiter_starts
        spans = self._spans(board.restart, role)
        begin, ready_at = (board.restart[role].lost_at, board.restart[role].ready_at) if spans else (0.0, 0.0)
        return Restart(
            count=max(0, num_starts - 1),
            began_s=self.seconds(begin) if spans else None,
            down_s=round(ready_at - begin, 6) if ready_at else None,
            stages=[self._row(span) for span in spans],
        )

    def critical_path(self) -> list[Segment]:
        """Backwards from ready: through a process's stages, from a wait to its cause, from a fork to the parent.

        Empty until the service is ready.
        """
        moment = ready_at(self._board)
        if moment is None:
            return []
        role = Role.WEB if moment == self._board.web_ready_at else Role.MODEL
        path: list[Segment] = []
        while moment > self._board.started_at:
            role, moment = self._step_back(role, moment, path)
        return path[::-1]

    def _step_back(self, role: Role, moment: float, path: list[Segment]) -> tuple[Role, float]:
        """Add what `role` did just before `moment`; where to go on."""
        spans = [span for span in self._spans(self._board.start, role) if span.stage.begin < moment]
        if not spans:
            if role == Role.MASTER:
                return self._add(path, role, None, self._board.started_at, moment)
            return PARENTS[role], moment
        last = spans[-1]
        if last.end < moment:
            return self._add(path, role, None, last.end, moment)
        name = last.stage.name.decode()
        if last.facts.waits_for:
            # What was waited for may have come before its stage was over.
            awaited = min(self._end_of(*last.facts.waits_for), moment)
            if awaited > last.stage.begin:
                if awaited < moment:
                    self._add(path, role, name, awaited, moment)
                return last.facts.waits_for[0], awaited
        return self._add(path, role, name, last.stage.begin, moment)

    def _add(self, path: list[Segment], role: Role, stage: str | None, begin: float, end: float) -> tuple[Role, float]:
        path.append(Segment(role.name.lower(), stage, self.seconds(begin), self.seconds(end)))
        return role, begin

    def _end_of(self, role: Role, name: str) -> float:
        """When that stage ended, "": when the role was ready; 0.0: never."""
        if not name:
            return float(self._board.start[role].ready_at)
        return max(
            (span.end for span in self._spans(self._board.start, role) if span.stage.name.decode() == name), default=0.0
        )

    def _spans(self, tracks: list[Track], role: Role) -> list[_Span]:
        stages = list(tracks[role].rows())
        ends = [stage.begin for stage in stages[1:]] + [self._now]
        return [_Span(role, stage, stage.end or ends[index], not stage.end) for index, stage in enumerate(stages)]

    def _row(self, span: _Span) -> Row:
        stage, facts = span.stage, span.facts
        seconds = span.end - stage.begin
        is_running = span.is_unfinished and span.end == self._now
        return Row(
            role=span.role.name.lower(),
            pid=stage.pid,
            stage=stage.name.decode(),
            begin_s=self.seconds(stage.begin),
            end_s=None if is_running else self.seconds(span.end),
            seconds=round(seconds, 6),
            bytes=stage.num_bytes,
            rate=round(stage.num_bytes / seconds) if stage.num_bytes and seconds else None,
            expected_s=self._expected_s(facts, stage.num_bytes),
            check=facts.check,
            passed=None if is_running else not span.is_unfinished,
        )

    def _expected_s(self, facts: StageFacts, num_bytes: int) -> float | None:
        if not self._is_expected:
            return None
        return round(num_bytes / facts.expected_rate, 4) if facts.expected_rate else facts.expected_s


def _checklist_row(item: ChecklistItem, rows: list[Row]) -> Item:
    names = {(role.name.lower(), stage) for role, stage in item.stages}
    own = [row for row in rows if (row.role, row.stage) in names]
    expected = [row.expected_s for row in own if row.expected_s is not None]
    results = {row.passed for row in own}
    return Item(
        item=item.name,
        elsewhere_s=item.elsewhere_s,
        expected_s=round(sum(expected), 4) if expected or not item.stages else None,
        measured_s=round(sum(row.seconds for row in own), 6),
        passed=False if False in results else None if None in results or (item.stages and not own) else True,
        note=item.note,
    )


def _graphs(board: Board) -> Graphs:
    is_complete = board.model_state == ModelState.READY and board.num_graphs >= board.num_graphs_wanted
    return Graphs(board.num_graphs, board.num_graphs_wanted, is_complete)


def _device_name(board: Board) -> str:
    """As the driver calls the first GPU, found without asking it; "" without one."""
    if board.device_name:
        return str(board.device_name.decode())
    for path in sorted(_GPU_FOLDER.glob("*/information")):
        for line in path.read_text().splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return ""
