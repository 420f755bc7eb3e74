"""The engine's state for one attempt of one job: members, columns, steps, events, phases, pauses."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.progress.failed_start import UNREACHED
from eagle_eye.detectors.signs.peers import latest
from eagle_eye.detectors.signs.progress import QUIET_PHASES, newest_steps_s
from eagle_eye.detectors.types import (
    Beginning,
    Curve,
    Floats,
    Link,
    Pause,
    Reports,
    Series,
    Verdict,
    Window,
    WindowEvent,
)
from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.grid import STEP_METRICS, Columns, Grid, StepGrid
from eagle_eye.server.engine.judgement import REPORTED, CheckpointLog
from eagle_eye.server.engine.roster import INVENTORY, Named, Roster, Topology
from eagle_eye.server.model.records import Job

LASTING_STATES = frozenset({"running", "suspended"})  # in which a job's processes live on


class Advance:
    """The steps of one attempt: ``first_step`` (NaN: none), ``highest_step`` (-1: none).

    ``advanced_s`` is the end of the interval in which the last step finished, or the start of the attempt before any
    did. An attempt that its scheduler stops and runs again is treated as just started (``started_s``): no step is due
    yet, and its first may be one that was made before.
    """

    def __init__(self, started_s: float) -> None:
        self.started_s = self.advanced_s = started_s
        self.first_step, self.highest_step = math.nan, -1.0
        self._stopped = self._ended = False
        self._left_at_step = math.nan  # repeated by rows of ranks that have ended

    def take_word(self, job: Job) -> bool:
        """Apply a scheduler's or launcher's report of whether the attempt runs; return whether it began anew.

        Then its processes are new ones: only a suspended job's go on.
        """
        stopped, self._stopped = self._stopped, job.state != "running"
        self._ended = self._ended or job.state not in LASTING_STATES
        if not stopped or self._stopped:
            return False
        anew, self._ended = self._ended, False
        self.started_s = max(self.started_s, job.updated_s)
        self.advanced_s = max(self.advanced_s, job.updated_s)
        if self.highest_step >= 0:
            self._left_at_step = self.highest_step
        self.first_step, self.highest_step = math.nan, -1.0
        return anew

    def is_news(self, step: float) -> bool:
        """Whether no rank has finished the step before."""
        return step > self.highest_step and (self.highest_step >= 0 or step != self._left_at_step)

    def record_steps(self, time_s: float, lowest: float, highest: float) -> None:
        """Record the lowest and highest newly finished step that ranks report at a time."""
        if self.highest_step < 0:
            self.first_step = lowest
        self.highest_step = highest
        self.advanced_s = max(self.advanced_s, time_s)  # a clock that was set back reports earlier times


PAUSES_KEPT, PACES_KEPT = 64, 32
PAUSE_STEPS = 3.0  # a gap of more than this many times what its steps usually take holds a pause...
LONG_STEP_STEPS, LONG_STEP_S = 1.5, 10.0  # ...or, where steps are long, so many times and so much longer
STEPS_FOR_PACE = 5  # steps before the pace is known well enough to recognise a pause
STANDSTILLS = frozenset({"hang", "network_hang"})


class PauseLog:
    """Keeps the newest pauses, oldest first, and the pace of one attempt, which defines a pause.

    ``earlier`` are those of earlier attempts.
    """

    def __init__(self, earlier: Sequence[Pause] = ()) -> None:
        self._pauses: deque[Pause] = deque(earlier, maxlen=PAUSES_KEPT)
        self._paces: deque[float] = deque(maxlen=PACES_KEPT)
        self._gaps_s: deque[float] = deque(maxlen=PACES_KEPT)
        self._steps_seen = 0
        self._accused = False

    @property
    def pauses(self) -> tuple[Pause, ...]:
        """Pauses that ended well, oldest first."""
        return tuple(self._pauses)

    @property
    def pace_s(self) -> float | None:
        """The recent median time of a step; None before the second."""
        return sorted(self._paces)[len(self._paces) // 2] if self._paces else None

    @property
    def reports(self) -> Reports:
        """How often progress is heard of in this attempt; phases without due steps are left out."""
        gaps_s = sorted(self._gaps_s)
        return Reports(self._steps_seen, gaps_s[len(gaps_s) // 2] if gaps_s else 0.0)

    def note_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Record whether a verdict names a node as holding the job up in the current standstill."""
        self._accused = self._accused or any(v.fault in STANDSTILLS and v.nodes for v in verdicts)

    def note_steps(self, gap_s: float, steps: float, interval_s: float) -> None:
        """Record that ``steps`` steps finished after ``gap_s``; a gap far beyond the pace is kept as a pause.

        Steps of which no row arrived are none: after an outage of the server the newest rows arrive first.
        """
        self._steps_seen += 1
        pace_s = self.pace_s or math.inf
        usual_s = pace_s * steps
        longer_s = min(PAUSE_STEPS * usual_s, max(LONG_STEP_STEPS * usual_s, usual_s + LONG_STEP_S))
        if self._steps_seen > STEPS_FOR_PACE and gap_s > max(longer_s, 2 * interval_s):
            self._pauses.append(Pause("", gap_s - (steps - 1) * pace_s, self._accused))
        self._paces.append(gap_s / steps)
        self._gaps_s.append(gap_s)
        self._accused = False

    def note_phase(self, phase: str, seconds: float) -> None:
        """Record a phase without due steps, now that it has ended."""
        self._pauses.append(Pause(phase, seconds, self._accused))
        self._accused = False


UNREACHED_MAX = 16  # nodes of consecutive failed starts that are remembered


class Earlier(NamedTuple):
    """``curve`` is that of the last attempt that made steps, None if none did.

    ``mute_starts`` counts the immediately preceding attempts that passed the start deadline without a step,
    ``unreached`` lists the nodes named in such attempts as the only ones unable to reach the others. ``pauses`` are
    those that the job has made: a restart does not change what the program does.
    """

    curve: Curve | None = None
    mute_starts: int = 0
    unreached: tuple[str, ...] = ()
    pauses: tuple[Pause, ...] = ()

    @property
    def starts(self) -> tuple[int, tuple[str, ...]]:
        """What the immediately preceding attempts without a step imply for this one's start."""
        return self.mute_starts, self.unreached


NOTHING = Earlier()


class Before(Protocol):
    """The previous attempt, as far as it matters here."""

    started_s: float
    earlier: Earlier
    unreached: tuple[str, ...]
    course: PauseLog

    @property
    def curve(self) -> Curve:
        """The job's curve by step."""
        ...


def unreached_by(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """Return the nodes that verdicts name as the only ones unable to reach the others as the attempt started."""
    return next((verdict.nodes for verdict in verdicts if UNREACHED in verdict.kinds), ())


def inherited(before: Before | None, now_s: float, start_deadline_s: float) -> Earlier:
    """Return what an attempt that begins at ``now_s`` inherits from the previous one, None if there is none."""
    if before is None:
        return NOTHING
    if len(before.curve.number):
        return Earlier(before.curve, pauses=before.course.pauses)
    mute = now_s - before.started_s >= start_deadline_s
    unreached = (*before.earlier.unreached, *before.unreached)[-UNREACHED_MAX:]
    return Earlier(before.earlier.curve, before.earlier.mute_starts + mute, unreached, before.course.pauses)


EVENTS_KEPT = 4_096  # of one attempt; the first ones matter most, so later ones are dropped and counted
REPEATS_KEPT = 32  # of one kind, subject and device, so that one flooding node does not displace others
EVENT_SUBJECTS = ("code", "link", "process")  # the attribute that identifies the subject
UNJUDGED = frozenset({INVENTORY})  # a large job's GPU inventories alone would leave no room for events that are judged
ROWS_MIN = 16  # rows kept however long the interval
GRID_LINES_MAX = 1 << 18  # and however short: a window of 15 minutes at 300 rows a second
ENDS = frozenset({"process_exit", "training_error"})  # of processes
ROW_METRICS = frozenset({"train_step", *STEP_METRICS})
NO_NAMES = Named()
LATE_S = 1.0  # how long a row may be delayed before its line counts as complete without it


class JobTrack:
    """One attempt of one job, fed row by row; ``window`` is the detectors' view of it.

    ``earlier`` is inherited from earlier attempts, for comparison.
    """

    def __init__(
        self, job: str, attempt: int, interval_s: float, window_s: float, started_s: float, earlier: Earlier = NOTHING
    ) -> None:
        self.job = job
        self.attempt = attempt
        self.started_s = started_s
        self.earlier = earlier
        self._window_s = window_s
        self._roster = Roster()
        self._links: dict[tuple[str, str], int] = {}
        self._made_for: tuple[Topology | None, int, int] = (None, -1, -1)
        self._switches: tuple[str, ...] = ()
        self._made_links: tuple[Link, ...] = ()
        self._lines_max = sys.maxsize
        self._make_grids(interval_s)
        self._steps = StepGrid()
        self._fed_until_s = -math.inf
        self.interval_s = interval_s
        self._interval_settled = False
        self._events: deque[WindowEvent] = deque()
        self._repeats: dict[tuple[str, str | None, int, str], int] = {}
        self.course = PauseLog(earlier.pauses)
        self._steps_made = Advance(started_s)
        self._resumed_s = -math.inf  # when a rank last entered a phase with steps
        self.checkpoints = CheckpointLog()
        self.touched_s = started_s  # the newest row or report about the job
        self.held_up_by: frozenset[int] = frozenset()  # according to the launcher
        self._exits: dict[int, WindowEvent] = {}  # by rank, according to the launcher
        self._processes_since_s = -math.inf  # when the scheduler last ran it again
        self.unreached: tuple[str, ...] = ()  # the nodes known to be the only ones unable to reach the others
        self.resting = False  # over: rows of members that do not name it are not its own
        self.declared = False  # whether a scheduler or launcher named the members
        self._declared: dict[int, tuple[str, int]] = {}  # node and device of each rank that it named
        self.events_dropped_total = 0

    def adopt_interval(self, interval_s: float, *, for_good: bool) -> None:
        """Use an agent's interval for the grid, until one is set ``for_good``: that of the first rows."""
        settled, self._interval_settled = self._interval_settled, self._interval_settled or for_good
        if not settled and interval_s != self.interval_s:
            self._make_grids(interval_s)
            self.interval_s = interval_s

    def release(self) -> None:
        """Drop all rows and steps except the curve, which the next attempt inherits."""
        self._steps = StepGrid(self._steps.curve().copied())
        self._make_grids(self.interval_s)

    def _make_grids(self, interval_s: float) -> None:
        asked = math.ceil(min(self._window_s / interval_s, GRID_LINES_MAX))
        depth = min(max(asked, ROWS_MIN), self._lines_max)
        self._grids_of = {scope: Grid(scope, interval_s, depth) for scope in Scope}
        self._devices, self._node_rows, self._link_rows = (self._grids_of[scope] for scope in Scope)
        self._devices.add_columns(self._roster.series_count)
        self._node_rows.add_columns(len(self._roster.nodes))
        self._link_rows.add_columns(len(self._links))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The attempt's members, in the order they became known."""
        return self._roster.nodes

    @property
    def series(self) -> tuple[Series, ...]:
        """The device rows, in column order."""
        return self._roster.series

    @property
    def metrics(self) -> frozenset[str]:
        """The metrics that any member sent in this attempt."""
        return frozenset(name for grid in self._grids_of.values() for name in grid.names())

    @property
    def memo(self) -> dict[Any, Any]:
        """Cached results that depend only on the members: emptied when a member joins or changes."""
        return self._roster.memo

    @property
    def ranked(self) -> bool:
        """Whether the placement of ranks is known."""
        return self._roster.ranked

    @property
    def last_step(self) -> float | None:
        """The highest step that any rank finished in this attempt; None before the first."""
        return self._steps_made.highest_step if self._steps_made.highest_step >= 0 else None

    @property
    def first_step(self) -> float | None:
        """The first step seen to finish in this attempt; None before it."""
        return None if math.isnan(self._steps_made.first_step) else self._steps_made.first_step

    @property
    def events(self) -> tuple[WindowEvent, ...]:
        """The attempt's events, oldest first, as agents reported them."""
        return tuple(self._events)

    @property
    def advanced_s(self) -> float:
        """The end of the interval in which the last step finished, or the start of the attempt before any did."""
        return self._steps_made.advanced_s

    @property
    def pace_s(self) -> float | None:
        """What a step takes: the median of the newest that ranks reported, else of those seen; None before two were.

        Frames come in whole intervals: the time between two says little about steps as short as these.
        """
        reported_s = newest_steps_s(self.curve)
        return reported_s if math.isfinite(reported_s) else self.course.pace_s

    @property
    def bytes_per_line(self) -> int:
        """Memory for one more line of observations, in bytes."""
        return sum(grid.bytes_per_line for grid in self._grids_of.values())

    @property
    def bytes_per_step(self) -> int:
        """Memory for one more step of all ranks, in bytes."""
        return self._steps.bytes_per_line

    def limit_steps(self, steps: int, curve_steps: int) -> None:
        """Keep at most ``steps`` steps of each rank, and ``curve_steps`` of the job as a whole; see StepGrid."""
        self._steps.limit(steps, curve_steps)

    def limit(self, lines: int) -> None:
        """Keep at most this many lines; see Grid."""
        self._lines_max = lines
        for grid in self._grids_of.values():
            grid.limit(lines)

    @property
    def late_total(self) -> int:
        """Number of rows that came too late to be placed."""
        return self._devices.late_total + self._node_rows.late_total + self._link_rows.late_total

    @property
    def ranks(self) -> tuple[MemberRank, ...]:
        """The members with a rank, by rank."""
        return self._roster.ranks

    @property
    def curve(self) -> Curve:
        """The job's curve by step."""
        return self._steps.curve()

    def take_word(self, job: Job) -> bool:
        """Apply a scheduler's or launcher's report on the attempt; return whether it began anew: see ``begin_anew``."""
        self.held_up_by = frozenset(job.held_up_by)
        places = {rank.rank: (rank.node, rank.device) for rank in job.ranks} if job.exits else {}
        for one in job.exits:
            if one.rank in places and one.rank not in self._exits:
                node, device = places[one.rank]
                attributes = {"rank": one.rank, "exit_code": one.exit_code}
                self._exits[one.rank] = WindowEvent(job.updated_s, node, device, "process_exit", attributes)
        return self._steps_made.take_word(job)

    def begin_anew(self, earlier: Earlier) -> None:
        """Forget what is about processes that have ended; members and what happened to their nodes stay.

        ``earlier`` is inherited from these processes. What is reported of them later is left out.
        """
        self.earlier, self.course, self.unreached = earlier, PauseLog(earlier.pauses), ()
        self._processes_since_s = self._steps_made.started_s
        self._steps = StepGrid()
        self._make_grids(self.interval_s)
        self._roster.forget_ranks()
        self._events = deque(event for event in self._events if event.kind not in ENDS)

    def declare(self, ranks: Iterable[MemberRank]) -> None:
        """Set the members as reported by the scheduler; rows of others are not this job's."""
        self.declared = True
        for rank in ranks:
            self._declared[rank.rank] = (rank.node, rank.device)
            self.add_series(rank.node, rank.device, rank.rank, rank.role)

    def superseded_by(self, ranks: Iterable[MemberRank]) -> bool:
        """Whether these are other members, or elsewhere, than those declared, and no step was made with those."""
        if not self.declared or self.last_step is not None:
            return False
        placed = {rank.rank: (rank.node, rank.device) for rank in ranks}
        return bool(placed) and placed != self._declared

    def is_member(self, node: str) -> bool:
        """Whether the node takes part in this attempt."""
        return node in self._roster

    def add_node(self, node: str) -> None:
        """Make the node a member."""
        if self._roster.add_node(node):
            self._node_rows.add_columns(1)

    def add_series(self, node: str, device: int, rank: int = -1, role: str = "") -> int:
        """Add a device row of the node and return its column."""
        self.add_node(node)
        column, new = self._roster.add_series(node, device, rank, role)
        if new:
            self._devices.add_columns(1)
        return column

    def set_silence(self, column: int, seconds: float) -> None:
        """Record how long the live process of a rank has been silent; its agent has thereby reported the rank."""
        self._roster.silent_s[column], self._roster.named[column] = seconds, True

    def node_column(self, node: str) -> int:
        """Return a member's column among the node rows."""
        return self._roster.node_index(node)

    def add_link(self, node: str, link: str) -> int:
        """Add a link of the node and return its column."""
        column = self._links.get((node, link))
        if column is None:
            column = self._links[node, link] = self._link_rows.add_columns(1)
        return column

    def write(
        self,
        time_s: float,
        scope: Scope,
        metrics: Sequence[str],
        columns: slice | Columns,
        values: Floats,
        *,
        more: bool = False,
    ) -> None:
        """Place rows of one time in columns, each named once; ``values`` is (metrics, columns).

        ``more``: these are further metrics of the previous rows, already counted if they came too late.
        """
        self.touched_s = max(self.touched_s, time_s)
        grid = self._grids_of[scope]
        line = grid.line(time_s, 0 if more else values.shape[1])
        if line is None:
            return
        grid.write(line, metrics, columns, values)
        if scope is Scope.DEVICE and "train_step" in metrics:
            self._advance(time_s, values[metrics.index("train_step")])
        elif scope is Scope.NODE and REPORTED in metrics:
            self.checkpoints.record_rows(time_s, metrics, columns, values)

    def add_event(self, event: WindowEvent) -> None:
        """Store an event of this attempt; a phase event also changes its rank's phase."""
        if event.kind in UNJUDGED or (event.kind in ENDS and event.time_s < self._processes_since_s):
            return
        if event.kind in ("phase", "checkpoint_begin", "checkpoint_end") and event.node is not None:
            self._note_phase(event.node, event)
            return
        what = next((event.attributes[key] for key in EVENT_SUBJECTS if key in event.attributes), "")
        claim = (event.kind, event.node, event.device, str(what))
        repeats = self._repeats[claim] = self._repeats.get(claim, 0) + 1
        if repeats > REPEATS_KEPT or len(self._events) >= EVENTS_KEPT:
            self.events_dropped_total += 1
            return
        self._events.append(event)

    def window(
        self,
        now_s: float,
        heard_s: NDArray[np.float64],
        farewell: NDArray[np.bool_],
        watching_since_s: float,
        topology: Topology | None = None,
        named: Named = NO_NAMES,
    ) -> Window:
        """Return the detectors' view at ``now_s``; ``heard_s`` and ``farewell`` are the nodes', in their order."""
        device = self._devices.views()
        self._feed_steps(now_s, device)
        switches, links = self._hung_on(topology)
        return Window(
            now_s=now_s,
            job=self.job,
            attempt=self.attempt,
            started_s=self._steps_made.started_s,
            interval_s=self.interval_s,
            times_s=self._devices.times(),
            nodes=self.nodes,
            series=self.series,
            members_memo=self._roster.memo,
            role_of=self._roster.roles,
            node_of=self._roster.node_of,
            device=device,
            node=self._node_rows.views(),
            node_times_s=self._node_rows.times(),
            link=self._link_rows.views(),
            link_times_s=self._link_rows.times(),
            links=links,
            switches=switches,
            models=named.models,
            model_of=named.model_of,
            heard_s=heard_s,
            farewell=farewell,
            silent_s=self._roster.silent_s.copy(),
            watching_since_s=watching_since_s,
            phase=tuple(self._roster.phase),
            phase_since_s=self._roster.phase_since_s.copy(),
            first_step=self._steps_made.first_step,
            last_step=self._steps_made.highest_step if self._steps_made.highest_step >= 0 else math.nan,
            advanced_s=self._steps_made.advanced_s,
            steps=self._steps.steps(),
            curve=self._steps.curve(),
            earlier=self.earlier.curve,
            beginning=Beginning(self._roster.named.copy(), self.held_up_by, *self.earlier.starts),
            pauses=self.course.pauses,
            reports=self.course.reports,
            events=(*self._events, *self._unseen_exits()),
        )

    def latest(self, since_s: float = -math.inf) -> dict[str, dict[tuple[str, int], float]]:
        """Return each metric's newest value by (node, device), NaN for none since then; device -1 for node metrics."""
        result: dict[str, dict[tuple[str, int], float]] = {}
        devices, nodes = [(one.node, one.device) for one in self.series], [(node, -1) for node in self.nodes]
        for grid, keys in ((self._devices, devices), (self._node_rows, nodes)):
            for name in grid.names():
                result[name] = dict(zip(keys, grid.latest(name, since_s).tolist(), strict=True))
        return result

    def _hung_on(self, topology: Topology | None) -> tuple[tuple[str, ...], tuple[Link, ...]]:
        """Return the switch of each node, and the links with theirs; recomputed only when a member joined."""
        made_for = (topology, len(self.nodes), len(self._links))
        if self._made_for != made_for:
            known = topology or Topology()
            self._switches = tuple(known.switch_of_node.get(node, "") for node in self.nodes)
            of_link = known.switch_of_link
            self._made_links = tuple(Link(*one, of_link.get(one[0], {}).get(one[1], "")) for one in self._links)
            self._made_for = made_for
        return self._switches, self._made_links

    def _unseen_exits(self) -> list[WindowEvent]:
        """Return the exits that only the launcher has reported: agents know more of those that they have seen."""
        exits = {r: event for r, event in self._exits.items() if event.time_s >= self._processes_since_s}
        if not exits:
            return []
        seen = [event for event in self._events if event.kind == "process_exit"]
        ranks = {(event.node, event.attributes.get("rank")) for event in seen}
        places = {(event.node, event.device) for event in seen}
        return [
            event
            for rank, event in exits.items()
            if (event.node, rank) not in ranks and (event.node, event.device) not in places
        ]

    def _feed_steps(self, now_s: float, device: Mapping[str, Floats]) -> None:
        """Pass lines to the step grid once no further row is likely, and all of them once every rank is as far."""
        times_s = self._devices.times()
        steps = device.get("train_step")
        if steps is None:
            return
        first = int(np.searchsorted(times_s, self._fed_until_s, side="right"))
        if first == len(times_s):
            return
        views = {name: view for name, view in device.items() if name in ROW_METRICS}
        # Agents tick at different moments; a rank that has reached a later line adds to no earlier one.
        come = np.asarray(np.logical_or.accumulate(np.isfinite(steps[first:])[::-1])[::-1].all(axis=1))
        level = self._steps.completed_by(latest(steps[first:], len(times_s) - first))
        for line in range(first, len(times_s)):
            time_s = float(times_s[line])
            whole = come[line - first] or now_s >= time_s + self.interval_s / 2 + LATE_S
            if not (whole or level):
                return
            self._steps.add_row(time_s, {name: view[line] for name, view in views.items()}, self._roster.roles)
            if whole:
                self._fed_until_s = time_s

    def _advance(self, time_s: float, steps: Floats) -> None:
        known = steps[np.isfinite(steps)]
        if len(known) == 0:
            return
        highest = float(known.max())
        if not self._steps_made.is_news(highest):
            return
        if self._steps_made.highest_step >= 0:
            self._note_gap(time_s, highest - self._steps_made.highest_step)
        self._steps_made.record_steps(time_s, float(known.min()), highest)

    def set_clock_forward(self, by_s: float, before_s: float) -> None:
        """Adjust for a clock that was set forward after ``before_s``: the length of a standstill stays.

        A step reported since then was reported by the new clock, and stays.
        """
        if self._steps_made.advanced_s <= before_s:
            self._steps_made.advanced_s += by_s

    def _note_gap(self, time_s: float, steps: float) -> None:
        """Record the time to this step; a pause if it was much longer than the job's pace.

        A phase without due steps that has begun since, even in the row of the step itself, ends that time.
        """
        quiet_s = math.inf
        if not frozenset(QUIET_PHASES).isdisjoint(self._roster.phase):  # rarely: a loop over all ranks takes long
            since_s = zip(self._roster.phase, self._roster.phase_since_s.tolist(), strict=True)
            quiet_s = min(began_s for phase, began_s in since_s if phase in QUIET_PHASES)
        gap_s = min(time_s, quiet_s) - max(self._steps_made.advanced_s, self._resumed_s)
        if gap_s > 0:
            self.course.note_steps(gap_s, steps, self.interval_s)

    def _note_phase(self, node: str, event: WindowEvent) -> None:
        """Set the phase that the event begins for a rank, or for all ranks of the node if the event names none."""
        for column in self._roster.columns_of(node, event.device):
            if event.kind == "phase":
                self._enter_phase(column, str(event.attributes.get("name", "")), event.time_s)
            elif event.kind == "checkpoint_begin":
                self._enter_phase(column, "checkpoint", event.time_s)
            elif self._roster.phase[column] == "checkpoint":
                self._enter_phase(column, "train", event.time_s)

    def _enter_phase(self, column: int, name: str, time_s: float) -> None:
        """Record a rank's change of phase; the end of a quiet phase ends a pause well."""
        since_s = float(self._roster.phase_since_s[column])
        if time_s < since_s:
            return
        before = self._roster.phase[column]
        if before in QUIET_PHASES and name != before:
            self.course.note_phase(before, time_s - since_s)
        if name not in QUIET_PHASES:
            self._resumed_s = max(self._resumed_s, time_s)
        self._roster.phase[column] = name
        self._roster.phase_since_s[column] = time_s
