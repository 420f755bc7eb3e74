"""One node's state built from its samples: rows by scrape timestamp, its scrape interval, its XIDs. Pure."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Block, block
from eagle_eye.schema.metrics import MetricKind, Scope
from eagle_eye.server.ingest.remote_write.cells import Cell
from eagle_eye.server.ingest.remote_write.mapping import MappedRow, Rule
from eagle_eye.server.model.records import Watched

# Timestamps kept open: a scrape arrives within seconds, and a node may have two exporters, each scraped twice.
MOMENTS_OPEN = 6
MOMENTS_MAX = 64  # while the history accepts nothing; beyond it the oldest is lost, and counted
LINKS_MAX = 256  # per node; as many ports as an agent reports
CELLS_MAX = 16_384  # per node: sixteen GPUs and 256 ports have 2,500
# The longest of the newest gaps is the interval: two Prometheus servers make short gaps between long ones.
GAPS_KEPT = 3
GAP_S_MAX = 300.0  # a longer gap was an outage, not the interval
INTERVAL_UNKNOWN_S = 60.0  # reported until the interval is known: as slow as sites scrape
# A code not seen before on a device is new only when the device has been watched for this long; before that it
# may be days old: the gauge keeps the last code.
XID_WATCHED_S = 60.0
XID_WATCHED_INTERVALS = 3.0
MODEL_EVERY_S = 3600.0
JOB_FRESH_S = 300.0  # how long a job label counts for the node's other series
TARGETS_MAX = 16  # exporters remembered per node
TEXT_CHARS_MAX = 200  # of an event's description


class StatedCode(NamedTuple):
    """What a gauge says of a device: its value, and the event that a new value is; without attributes it is none.

    ``gauge`` "": the device's last error; 0 is a state without news unless another came before.
    """

    gauge: str
    code: float
    kind: str
    attributes: Mapping[str, object]


@dataclass(slots=True, eq=False)
class NodeSample:
    """The data of a node at one timestamp. ``version`` counts changes, ``kept`` is the last durable one.

    ``watched`` are the devices whose remembered state it has changed.
    """

    node: NodeRows
    time_s: float
    job: str | None
    values: dict[Scope, dict[int | str, dict[str, float]]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    watched: dict[int, Watched] = field(default_factory=dict)
    version: int = 0
    kept: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether all of its data is durable."""
        return self.version == self.kept

    def blocks(self) -> Iterator[Block]:
        """Yield the rows by scope."""
        for scope, rows in self.values.items():
            yield block(scope, rows)  # type: ignore[arg-type]  # keys of one scope are of one type


@dataclass(slots=True, eq=False)
class NodeRows:
    """One node; ``interval_s`` is None until its interval is known. ``watched`` are its devices, from earlier data."""

    name: str
    touched_s: float = -math.inf  # by the server's clock
    interval_s: float | None = None
    watched: dict[int, Watched] = field(default_factory=dict)
    targets: dict[str, bool] = field(default_factory=dict)  # scraped by Prometheus there, and whether each answers
    uuids: dict[int, str] = field(default_factory=dict)  # of the GPUs whose series say it
    departed: bool = False  # it has said goodbye
    _cells: dict[tuple[Scope, int | str, str], Cell] = field(default_factory=dict)
    _links: Counter[str] = field(default_factory=Counter)  # how many links have a cell of each metric
    _moments: dict[tuple[float, str | None], NodeSample] = field(default_factory=dict)
    _newest_s: dict[Scope, float] = field(default_factory=dict)
    _gaps_s: dict[Scope, deque[float]] = field(default_factory=dict)
    _codes_s: dict[tuple[int, str], float] = field(default_factory=dict)  # when each gauge's newest code was reported
    _models_s: dict[int, float] = field(default_factory=dict)  # when each device's model was reported
    _job: tuple[float, str] | None = None
    lost: int = 0  # timestamps dropped before they were durable

    def cell(self, rule: Rule, row: MappedRow) -> Cell | None:
        """Return the cell of a metric in a row; None where the node has too many."""
        key = (row.scope, row.key, rule.to)
        found = self._cells.get(key)
        if found is None:
            if len(self._cells) >= CELLS_MAX or self._links[rule.to] >= LINKS_MAX:
                return None
            if row.scope is Scope.LINK:
                self._links[rule.to] += 1
            found = self._cells[key] = Cell(rule, catalogue.BY_NAME[rule.to].kind is MetricKind.COUNTER)
        return found

    def moment(self, time_s: float, job: str | None) -> NodeSample | None:
        """Return the open sample of a timestamp, or None."""
        return self._moments.get((time_s, job))

    def note(
        self, row: MappedRow, metric: str, time_s: float, job: str | None, value: float, model: str = ""
    ) -> NodeSample:
        """Set a value in a row of a timestamp's sample and return the sample.

        Like agents, it reports the row's GPU ``model`` every hour, if known.
        """
        found = self._open(row.scope, time_s, job)
        if row.scope is Scope.DEVICE:
            device = int(row.key)
            watched = self._watched(device, time_s)
            if self.watched.get(device) is not watched:
                self._watch(found, device, watched)
        found.values.setdefault(row.scope, {}).setdefault(row.key, {})[metric] = value
        if model and time_s - self._models_s.get(int(row.key), -math.inf) >= MODEL_EVERY_S:
            self._models_s[int(row.key)] = time_s
            found.events.append(Event(time_s, "inventory", int(row.key), {"model": model[:TEXT_CHARS_MAX]}))
        found.version += 1
        return found

    def note_code(self, device: int, time_s: float, job: str | None, stated: StatedCode) -> NodeSample | None:
        """Take the value of a device's gauge; return the sample to store for it, None if nothing changed.

        Adds the value's event if it is new.
        """
        before = self._watched(device, time_s)
        last_s, last = before.last(stated.gauge)
        if time_s <= self._codes_s.get((device, stated.gauge), -math.inf if last_s is None else last_s):
            return None
        self._codes_s[device, stated.gauge] = time_s
        if stated.code == last:
            return None
        if last is not None:
            news = True
        else:
            watched_s = time_s - before.since_s
            news = watched_s >= max(XID_WATCHED_S, XID_WATCHED_INTERVALS * (self.interval_s or INTERVAL_UNKNOWN_S))
        found = self._open(Scope.DEVICE, time_s, job)
        if stated.gauge:
            gauges = {**before.gauges, stated.gauge: (time_s, stated.code)}
            self._watch(found, device, msgspec.structs.replace(before, gauges=gauges))
        else:
            self._watch(found, device, msgspec.structs.replace(before, time_s=time_s, code=stated.code))
        if stated.attributes and news and (stated.code or last):
            found.events.append(Event(time_s, stated.kind, device, dict(stated.attributes)))
        found.version += 1
        return found

    def say_goodbye(self, time_s: float, job: str | None) -> NodeSample:
        """Return the sample to store for a node that is no longer heard under this name; its silence is no fault."""
        self.departed = True
        found = self._open(Scope.NODE, time_s, job)
        found.events.append(Event(time_s, "agent_stop", -1, {"reason": "not heard under this name"}))
        found.version += 1
        return found

    def note_target(self, target: str, up: float | None) -> None:
        """Record whether Prometheus could scrape an exporter of the node; this says nothing about the node.

        ``up`` None: the series has ended.
        """
        if up is not None and (target in self.targets or len(self.targets) < TARGETS_MAX):
            self.targets[target] = up != 0.0

    def note_job(self, job: str, now_s: float) -> None:
        """Record a job label on one of the node's series."""
        self._job = (now_s, job)

    def labelled_job(self, now_s: float) -> str | None:
        """Return the job that recent labels name for the node."""
        return self._job[1] if self._job is not None and now_s - self._job[0] <= JOB_FRESH_S else None

    def _watched(self, device: int, time_s: float) -> Watched:
        """Return what is known of a device: nothing of a GPU that has replaced another."""
        before, uuid = self.watched.get(device), self.uuids.get(device, "")
        if before is None or (uuid and before.uuid and before.uuid != uuid):
            return Watched(time_s, uuid=uuid)
        return before if not uuid or before.uuid else msgspec.structs.replace(before, uuid=uuid)

    def _watch(self, moment: NodeSample, device: int, now: Watched) -> None:
        self.watched[device] = moment.watched[device] = now

    def _open(self, scope: Scope, time_s: float, job: str | None) -> NodeSample:
        newest_s = self._newest_s.get(scope)
        if newest_s is None or time_s > newest_s:
            self._newest_s[scope] = time_s
            if newest_s is not None and time_s - newest_s <= GAP_S_MAX:
                self._pace(scope, time_s - newest_s)
        found = self._moments.get((time_s, job))
        if found is None:
            self._let_go()
            found = self._moments[time_s, job] = NodeSample(self, time_s, job)
        return found

    def _pace(self, scope: Scope, gap_s: float) -> None:
        gaps_s = self._gaps_s.setdefault(scope, deque(maxlen=GAPS_KEPT))
        gaps_s.append(gap_s)
        known = [max(gaps) for gaps in self._gaps_s.values() if len(gaps) > 1]
        if known:
            self.interval_s = min(known)

    def _let_go(self) -> None:
        """Make room for one more timestamp: drop the oldest durable one, or else the oldest of all."""
        if len(self._moments) < MOMENTS_OPEN:
            return
        durable = [key for key, moment in self._moments.items() if moment.is_kept]
        if durable:
            del self._moments[min(durable, key=_time)]
        elif len(self._moments) >= MOMENTS_MAX:
            del self._moments[min(self._moments, key=_time)]
            self.lost += 1


def _time(key: tuple[float, str | None]) -> float:
    return key[0]
