"""Everything the engine knows of one attempt of one job: members, columns, events, phases, pauses."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from eagle_eye.detectors.progress import QUIET_PHASES
from eagle_eye.detectors.types import Floats, Happening, Pause, Series, Window
from eagle_eye.schema.action import MemberRank
from eagle_eye.server.engine.grid import Grid

EVENTS_KEPT = 4_096  # of one attempt; the first ones count most, so later ones are dropped and counted
PAUSES_KEPT = 64
GRID_LINES_MIN = 16  # rows kept however long the interval
PAUSE_STEPS = 3.0  # a gap between steps longer than this many typical ones is a pause
STEPS_FOR_PACE = 5  # steps before the pace is known well enough to call a gap a pause


class JobTrack:
    """One attempt of one job, fed row by row; ``window`` is what detectors see of it."""

    def __init__(self, job: str, attempt: int, interval_s: float, window_s: float, started_s: float) -> None:
        self.job = job
        self.attempt = attempt
        self.started_s = started_s
        self._window_s = window_s
        self._devices, self._node_rows = self._grids(interval_s)
        self.interval_s = interval_s
        self._series: list[Series] = []
        self._columns: dict[tuple[str, int], int] = {}
        self._roles: list[int] = []
        self._role_ids: dict[str, int] = {}
        self._nodes: dict[str, int] = {}
        self._phase: list[str] = []
        self._phase_since_s: list[float] = []
        self._silent_s: list[float] = []
        self._events: deque[Happening] = deque()
        self._pauses: deque[Pause] = deque(maxlen=PAUSES_KEPT)
        self._highest_step = -1.0
        self._advanced_s = started_s
        self.touched_s = started_s  # the newest row or word about the job
        self._steps_seen = 0
        self._paces: deque[float] = deque(maxlen=32)
        self.declared = False  # whether a scheduler or launcher named the members
        self.events_dropped_total = 0

    def adopt_interval(self, interval_s: float) -> None:
        """Take the agents' interval for the grid's; a job can be declared before any agent was heard."""
        if interval_s != self.interval_s and not len(self._devices.times()) and not len(self._node_rows.times()):
            self._devices, self._node_rows = self._grids(interval_s)
            self._devices.add_columns(len(self._series))
            self._node_rows.add_columns(len(self._nodes))
            self.interval_s = interval_s

    def _grids(self, interval_s: float) -> tuple[Grid, Grid]:
        depth = max(math.ceil(self._window_s / interval_s), GRID_LINES_MIN)
        return Grid(interval_s, depth), Grid(interval_s, depth)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The attempt's members, in the order they became known."""
        return tuple(self._nodes)

    @property
    def series(self) -> tuple[Series, ...]:
        """The device rows, in column order."""
        return tuple(self._series)

    @property
    def ranked(self) -> bool:
        """Whether anybody said which ranks run where."""
        return any(series.rank >= 0 for series in self._series)

    @property
    def last_step(self) -> float | None:
        """The highest step that any rank finished in this attempt; None before the first."""
        return self._highest_step if self._highest_step >= 0 else None

    @property
    def advanced_s(self) -> float:
        """The end of the interval in which a step finished last; the start of the attempt before any did."""
        return self._advanced_s

    @property
    def pace_s(self) -> float | None:
        """The typical time from step to step; None before two steps were seen."""
        return sorted(self._paces)[len(self._paces) // 2] if self._paces else None

    @property
    def late_total(self) -> int:
        """Rows that came too late to be placed."""
        return self._devices.late_total + self._node_rows.late_total

    def ranks(self) -> list[MemberRank]:
        """Return the members with a rank, by rank."""
        known = (MemberRank(s.rank, s.node, s.device) for s in self._series if s.rank >= 0)
        return sorted(known, key=lambda member: member.rank)

    def declare(self, ranks: Iterable[MemberRank]) -> None:
        """Take the scheduler's word for who the members are; rows of others are not this job's."""
        self.declared = True
        for rank in ranks:
            self.add_series(rank.node, rank.device, rank.rank, rank.role)

    def is_member(self, node: str) -> bool:
        """Whether the node takes part in this attempt."""
        return node in self._nodes

    def add_node(self, node: str) -> None:
        """Make the node a member."""
        if node not in self._nodes:
            self._nodes[node] = self._node_rows.add_columns(1)

    def add_series(self, node: str, device: int, rank: int = -1, role: str = "") -> int:
        """Make a device row of the node known and return its column."""
        column = self._columns.get((node, device))
        if column is None:
            self.add_node(node)
            column = self._devices.add_columns(1)
            self._columns[node, device] = column
            self._series.append(Series(node, device, rank))
            self._roles.append(0)
            self._phase.append("")
            self._phase_since_s.append(-math.inf)
            self._silent_s.append(0.0)
        elif rank >= 0 and self._series[column].rank != rank:
            self._series[column] = Series(node, device, rank)
        if role or rank >= 0:
            self._roles[column] = self._role_ids.setdefault(role, len(self._role_ids))
        return column

    def set_silence(self, node: str, device: int, seconds: float) -> None:
        """Note for how long a rank's living process has said nothing."""
        self._silent_s[self._columns[node, device]] = seconds

    def write_devices(
        self, time_s: float, node: str, devices: Sequence[int], metrics: Sequence[str], values: Floats
    ) -> None:
        """Place device rows of a node; ``values`` is (metrics, devices). Devices no rank uses join without one."""
        columns = np.array([self.add_series(node, device) for device in devices], dtype=np.intp)
        self.touched_s = max(self.touched_s, time_s)
        line = self._devices.line(time_s)
        if line is None:
            return
        for metric, row in zip(metrics, values, strict=True):
            self._devices.write(line, metric, columns, row)
        if "train_step" in metrics:
            self._advance(time_s, values[list(metrics).index("train_step")])

    def write_node(self, time_s: float, node: str, metrics: Sequence[str], values: Floats) -> None:
        """Place a node's own row; ``values`` is (metrics,)."""
        self.touched_s = max(self.touched_s, time_s)
        line = self._node_rows.line(time_s)
        if line is None:
            return
        column = np.array([self._nodes[node]], dtype=np.intp)
        for metric, value in zip(metrics, values, strict=True):
            self._node_rows.write(line, metric, column, np.asarray([value]))

    def add_event(self, event: Happening) -> None:
        """Keep an event of this attempt; a phase event also moves its rank."""
        if event.kind == "phase" and event.node is not None:
            column = self._columns.get((event.node, event.device))
            if column is not None:
                self._enter_phase(column, str(event.attributes.get("name", "")), event.time_s)
            return
        if len(self._events) >= EVENTS_KEPT:
            self.events_dropped_total += 1
            return
        self._events.append(event)

    def window(
        self,
        now_s: float,
        heard_s: Mapping[str, float],
        farewell: Mapping[str, bool],
        watching_since_s: float,
    ) -> Window:
        """Return what detectors may see at ``now_s``; views, not copies."""
        return Window(
            now_s=now_s,
            job=self.job,
            attempt=self.attempt,
            started_s=self.started_s,
            interval_s=self.interval_s,
            times_s=self._devices.times(),
            nodes=self.nodes,
            series=self.series,
            role_of=np.array(self._roles, dtype=np.intp),
            device={name: self._devices.view(name) for name in self._devices.names()},
            node={name: self._node_rows.view(name) for name in self._node_rows.names()},
            heard_s=np.array([heard_s.get(node, -math.inf) for node in self._nodes]),
            farewell=np.array([farewell.get(node, False) for node in self._nodes], dtype=np.bool_),
            silent_s=np.array(self._silent_s),
            watching_since_s=watching_since_s,
            phase=tuple(self._phase),
            phase_since_s=np.array(self._phase_since_s),
            pauses=tuple(self._pauses),
            events=tuple(self._events),
        )

    def latest(self) -> dict[str, dict[tuple[str, int], float]]:
        """Return each metric's newest value by (node, device); device -1 for node metrics."""
        result: dict[str, dict[tuple[str, int], float]] = {}
        for name in self._devices.names():
            values = self._devices.latest(name)
            result[name] = {(s.node, s.device): float(v) for s, v in zip(self._series, values, strict=True)}
        for name in self._node_rows.names():
            values = self._node_rows.latest(name)
            result[name] = {(node, -1): float(values[column]) for node, column in self._nodes.items()}
        return result

    def _advance(self, time_s: float, steps: Floats) -> None:
        known = steps[np.isfinite(steps)]
        if len(known) == 0:
            return
        highest = float(known.max())
        if highest <= self._highest_step:
            return
        if self._highest_step >= 0:
            self._note_gap(time_s, highest - self._highest_step)
        self._highest_step = highest
        self._advanced_s = time_s

    def _note_gap(self, time_s: float, steps: float) -> None:
        """Keep the time to this step as a pause when it was much longer than the job's pace."""
        gap_s = time_s - max(self._advanced_s, max(self._phase_since_s, default=-math.inf))
        if gap_s <= 0 or any(phase in QUIET_PHASES for phase in self._phase):
            return
        self._steps_seen += 1
        pace_s = self.pace_s or math.inf
        if self._steps_seen > STEPS_FOR_PACE and gap_s > max(PAUSE_STEPS * pace_s, 2 * self.interval_s):
            self._pauses.append(Pause("", gap_s))
        self._paces.append(gap_s / steps)

    def _enter_phase(self, column: int, name: str, time_s: float) -> None:
        """Note a rank's change of phase; a quiet phase that ended is a pause that ended well."""
        since_s = self._phase_since_s[column]
        if time_s < since_s:
            return
        if self._phase[column] in QUIET_PHASES and name != self._phase[column]:
            self._pauses.append(Pause(self._phase[column], time_s - since_s))
        self._phase[column] = name
        self._phase_since_s[column] = time_s
