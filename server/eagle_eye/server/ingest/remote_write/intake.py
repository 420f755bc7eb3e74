"""Converts a request's series to samples of nodes by timestamp. Pure: time is an argument.

A series' labels are parsed once; from then on it is looked up by their bytes. Series without samples for twice FORGET_S
are forgotten. A ``Cell`` combines the series of one metric; ``NodeRows`` are a node's rows by scrape timestamp, its
scrape interval and its XIDs.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.driver_facts import DCGM_FACTS, NVML_RECOVERY_FACTS
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Block, block
from eagle_eye.schema.metrics import MetricKind, Scope
from eagle_eye.schema.names import is_name
from eagle_eye.server.ingest.remote_write.mapping import (
    TARGET_UP,
    EventRule,
    Exporter,
    MappedRow,
    Rule,
    Table,
    Use,
    row_of,
)
from eagle_eye.server.ingest.remote_write.wire import Malformed, Sample, WireSeries, labels
from eagle_eye.server.model.clock import AGE_S_MAX, AHEAD_S_MAX
from eagle_eye.server.model.identity import NameClaims, Naming, NoName, with_plain_names
from eagle_eye.server.model.records import Watched

# One or more series combined into one metric of one row, for each timestamp. A node's series reach the server in
# several requests, over connections of different speed. The value for a timestamp is complete once every participating
# series has a sample for it: a sum without one of its ports would look like a drop. A series that ended (a stale
# marker), or sent nothing for MEMBER_GONE_S while others did, no longer participates.

MEMBER_GONE_S = 300.0  # five scrapes a minute apart
RATE_GAP_S_MAX = 600.0  # a rate over a longer gap says nothing about its timestamp
WAITING_MAX = 4  # concurrent timestamps waiting for their last series

Identity = tuple[int, tuple[str, ...]]  # of a series in a cell: the index of its origin in the rule, and its own labels


@dataclass(slots=True, eq=False)
class Member:
    """One series' part in a cell.

    Its last sample was at ``time_s``; the last with a value was ``reading`` at ``read_s``. ``width`` is the size of the
    group that the series describes, if its rule needs it.
    """

    cell: Cell
    use: Use
    identity: Identity
    width: float = 0.0
    time_s: float = -math.inf
    read_s: float = -math.inf
    reading: float = math.nan
    first: float = 0.0  # part of a total that existed before the member joined


@dataclass(slots=True, eq=False)
class Cell:
    """The value of one metric in one row. ``born_s`` is the timestamp of its first sample."""

    rule: Rule
    is_total: bool
    members: dict[Identity, Member] = field(default_factory=dict)
    born_s: float = math.inf
    _newest_s: float = -math.inf
    _open: dict[float, dict[Identity, float]] = field(default_factory=dict)

    def member(self, use: Use, labels: tuple[str, ...]) -> Member:
        """Return the part of the series with these labels of ``rule.each``, creating one if needed."""
        identity = (use.order, labels)
        return self.members.get(identity) or Member(self, use, identity)

    def add_sample(self, member: Member, time_s: float, reading: float) -> float | None:
        """Add a series' sample (NaN: no value); return the cell's value if it is complete now.

        The timestamp is later than the member's last.
        """
        if member.identity not in self.members:
            if self.is_total and member.time_s == -math.inf and time_s > self.born_s and not math.isnan(reading):
                member.first = reading
            self.members[member.identity] = member
        self.born_s = min(self.born_s, time_s)
        part = _part(member, time_s, reading)
        member.time_s = time_s
        if not math.isnan(reading):
            member.read_s, member.reading = time_s, reading
        parts = self._open.get(time_s)
        if parts is None:
            parts = self._begin(time_s)
        parts[member.identity] = part
        if len(parts) < len(self.members) or (self._many and time_s == self.born_s):
            return None
        del self._open[time_s]
        return self._value(parts)

    def end(self, member: Member) -> None:
        """Record that the series has ended."""
        self.members.pop(member.identity, None)
        member.reading = math.nan

    @property
    def _many(self) -> bool:
        """Whether more than one series may participate; their number is unknown at first."""
        return bool(self.rule.each) or len(self.rule.origins) > 1

    def _begin(self, time_s: float) -> dict[Identity, float]:
        if len(self._open) >= WAITING_MAX:
            del self._open[min(self._open)]
        # Measured by timestamps of other series: after an outage all series were silent.
        gone = [key for key, member in self.members.items() if self._newest_s - member.time_s > MEMBER_GONE_S]
        for key in gone:
            del self.members[key]
        self._newest_s = max(self._newest_s, time_s)
        parts = self._open[time_s] = {}
        return parts

    def _value(self, parts: dict[Identity, float]) -> float | None:
        value = self._combined({key: part for key, part in parts.items() if not math.isnan(part)}, len(parts))
        if value is None:
            return None
        if self.rule.complement:
            value = 1.0 - value
        if self.rule.equals:
            return float(value in self.rule.equals)
        if self.rule.most == 1.0 and any(origin.rate for origin in self.rule.origins):
            return min(1.0, max(0.0, value))  # scrapes and counters are read at slightly different times
        return value

    def _combined(self, parts: dict[Identity, float], asked: int) -> float | None:
        """Return the combined parts; None if incomplete. ``asked`` series were to participate."""
        rule = self.rule
        if not parts:
            return None
        if rule.combine == "first":
            return parts[min(parts)]
        if rule.combine == "max":
            return max(parts.values())
        if len(parts) < asked:
            return None
        if rule.combine == "widest":
            return _widest(self.members, parts)
        if rule.combine == "ratio":
            over = sum(part for (order, _), part in parts.items() if rule.origins[order].over)
            above = sum(part for (order, _), part in parts.items() if not rule.origins[order].over)
            both = len({order for order, _ in parts}) == len(rule.origins)
            return above / over if both and over > 0.0 else None
        total = sum(parts.values())
        if rule.per:
            place = rule.each.index(rule.per)
            total /= len({labels[place] for _, labels in parts})
        return total


def _part(member: Member, time_s: float, reading: float) -> float:
    """Return what a reading adds to its cell; NaN if undefined: the first of a rate, or a counter reset."""
    origin = member.use.origin
    if not origin.rate:
        return (reading - member.first) * origin.factor
    grown, elapsed_s = reading - member.reading, time_s - member.read_s
    if not grown >= 0.0 or not elapsed_s <= RATE_GAP_S_MAX:
        return math.nan
    return grown / elapsed_s * origin.factor


def _widest(members: dict[Identity, Member], parts: dict[Identity, float]) -> float:
    """Return the mean over the series of the widest group; width is 0 where a series does not report it."""
    widths = {key: members[key].width for key in parts}
    widest = max(widths.values())
    chosen = [parts[key] for key, width in widths.items() if width == widest]
    return sum(chosen) / len(chosen)


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

    def set_value(
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


FORGET_S = 1800.0
# DCGM's blank values: 0x7ffffffffffffff0 and 2^47 with those after them, and the 32-bit ones.
BLANK_MIN = 1e14
HEALTH_FAILS = 20.0  # DCGM_HEALTH_RESULT_FAIL; a warning is 10
BLANKS_32 = (float(0x7FFFFFF0), float(0x7FFFFFFF))


@dataclass(slots=True)
class Taken:
    """The result of taking a request's samples.

    ``moments`` are those not durable yet. ``left_out`` counts samples that map to nothing, by reason; ``refused`` those
    that the sender should not have sent, with ``complaint`` about the first of them. ``moved`` counts samples with
    implausible times, by node. ``of_cells`` are series of nodes whose jobs other cells judge, by cell.
    """

    moments: dict[NodeSample, None] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    of_cells: dict[str, list[WireSeries]] = field(default_factory=dict)
    complaint: str = ""

    def refuse(self, reason: str, samples: int, detail: str) -> None:
        """Count samples as refused."""
        self.refused[reason] += samples
        self.complaint = self.complaint or detail


def _stated(rule: EventRule, code: float, text: str) -> StatedCode | None:
    """Return what a gauge states; None: an error of DCGM's health that is no fact of the table."""
    if rule.states == "code":
        attributes: dict[str, object] = {"code": int(code)} if code else {}
        if code and text:
            attributes["text"] = text[:TEXT_CHARS_MAX]
        return StatedCode("", code, rule.kind, attributes)
    if rule.states == "recovery_action":
        fact = NVML_RECOVERY_FACTS.get(int(code))
        said = f"DCGM: GPU recovery action 0x{int(code):x}"
        return StatedCode(rule.states, code, rule.kind, {"what": fact, "text": said} if fact is not None else {})
    if text not in DCGM_FACTS:
        return None if code >= HEALTH_FAILS else StatedCode("health", 0.0, rule.kind, {})
    fails = code >= HEALTH_FAILS
    attributes = {"what": DCGM_FACTS[text], "text": f"DCGM: health: {text}"} if fails else {}
    return StatedCode(f"health {text}", float(fails), rule.kind, attributes)


class RefusedSamples(NamedTuple):
    """The reason why a node's samples are refused; ``sender``: the sender must change something.

    ``departs``: the machine is heard under another name, so that this one falls silent.
    """

    reason: str
    detail: str
    sender: bool
    departs: bool = False


class _Known(NamedTuple):
    """A parsed series: its node, and its parts in metrics, its event, or its target's state.

    ``node`` None: the series is ignored for a ``reason``; with a ``name`` only for now. ``in_cell``: it was another
    cell's when it was parsed, and was not looked at further.
    """

    node: NodeRows | None
    name: str
    job: str | None = None
    parts: tuple[tuple[MappedRow, Member], ...] = ()
    model: str = ""  # the GPU's NVML name
    gpu: tuple[int, str] | None = None  # its index and UUID
    event: tuple[EventRule, int, str] | None = None
    target: str = ""
    blanks: bool = False
    reason: str = ""
    in_cell: bool = False


# Returns the other cell that judges the job on a node, "" for none. None: the series' labels name no job.
CellOf = Callable[[str, str | None], str]


def own_cell(_node: str, _job: str | None) -> str:
    """Return that no other cell judges anything."""
    return ""


class RemoteWriteIntake:
    """All series and nodes with recent samples.

    ``naming`` names the nodes, ``claims`` holds what only one machine of a name can have. While two machines report
    under one name, nothing that either says is taken: the node says goodbye, and is not heard until one has left.
    ``interval_s`` returns a node's interval known from before the server's start, None if unknown; ``watched`` returns
    the remembered state of its devices.
    """

    def __init__(
        self,
        table: Table,
        naming: Naming,
        claims: NameClaims,
        job_labels: Sequence[str],
        series_max: int,
        nodes_max: int,
        interval_s: Callable[[str], float | None],
        watched: Callable[[str], Mapping[int, Watched]],
    ) -> None:
        self._table = table
        self._naming = naming
        self._claims = claims
        self._job_labels = job_labels
        self._series_max = series_max
        self._nodes_max = nodes_max
        self._interval_s = interval_s
        self._watched = watched
        self._nodes: dict[str, NodeRows] = {}
        self._series: dict[bytes, _Known] = {}
        self._older: dict[bytes, _Known] = {}
        self._turned_s = -math.inf

    @property
    def series_count(self) -> int:
        """Number of known series."""
        return len(self._series) + len(self._older)

    def add_series(
        self,
        series: Iterable[WireSeries],
        now_s: float,
        admit: Callable[[str], RefusedSamples | None],
        taken: Taken,
        offset_s: float = 0.0,
        cell_of: CellOf = own_cell,
    ) -> None:
        """Take samples and add to ``taken``; ``admit(node)`` returns why a node's are refused, else None.

        What other cells judge by ``cell_of`` is put aside for them.

        ``offset_s`` is added to their times. A time that is implausible even then becomes the current one.
        """
        self._turn(now_s)
        answers: dict[str, RefusedSamples | None] = {}

        def asked(node: str) -> RefusedSamples | None:
            if node not in answers:
                answers[node] = admit(node)
            return answers[node]

        for one in series:
            try:
                known = self._find(one, asked, cell_of)
            except Malformed as error:
                taken.refuse(error.reason, len(one.samples), f"a series of {one.name}: {error}")
                continue
            if known.name and (cell := cell_of(known.name, known.job)):
                taken.of_cells.setdefault(cell, []).append(one)
                continue
            no = asked(known.name) if known.name and (known.node is not None or not known.target) else None
            if no is not None and no.sender:
                taken.refuse(no.reason, len(one.samples), no.detail)
            elif no is not None or known.node is None:
                taken.left_out[no.reason if no is not None else known.reason] += len(one.samples)
                if known.node is not None:
                    known.node.touched_s = now_s
                    if no is not None and no.departs and not known.node.departed:
                        taken.moments[known.node.say_goodbye(now_s, known.job)] = None
            else:
                self._take_series(one, known, known.node, now_s, taken, offset_s)

    def _take_series(
        self, one: WireSeries, known: _Known, node: NodeRows, now_s: float, taken: Taken, offset_s: float
    ) -> None:
        node.touched_s = now_s
        if known.job is not None:
            node.note_job(known.job, now_s)
        for sample in one.samples:
            time_s = _plausible_s(sample, offset_s, now_s)
            if time_s is None:
                taken.refuse("time", 1, f"a sample of {one.name} is of 1970 or before ({sample.time_ms} ms)")
                continue
            if time_s != sample.time_ms / 1000.0:
                taken.moved[node.name] += 1
            if known.target:
                node.note_target(known.target, sample.value)
            elif not self._is_of_one_machine(known, node, time_s, taken):
                taken.left_out["identity"] += 1
            elif known.event is not None:
                self._take_code(known, node, sample, time_s, taken)
            else:
                for reason in self._take_value(known, node, sample, time_s, taken):
                    taken.left_out[reason] += 1
        if node.lost:
            taken.left_out["row_lost"] += node.lost
            node.lost = 0

    def _is_of_one_machine(self, known: _Known, node: NodeRows, time_s: float, taken: Taken) -> bool:
        """Return whether a sample is of the machine that has the node's name, as far as its GPU's UUID tells."""
        if known.gpu is not None:
            index, uuid = known.gpu
            interval_s = node.interval_s or INTERVAL_UNKNOWN_S
            if not self._claims.heard(node.name, f"GPU {index}", uuid, time_s, interval_s):
                return False
            node.uuids[index] = uuid
        if self._claims.is_disputed(node.name, time_s):
            if not node.departed:
                taken.moments[node.say_goodbye(time_s, known.job)] = None
            return False
        node.departed = False
        return True

    def _take_value(self, known: _Known, node: NodeRows, sample: Sample, time_s: float, taken: Taken) -> set[str]:
        """Take a sample into each of its metrics; return the reasons for those that it could not be used for."""
        reasons: set[str] = set()
        reading = sample.value
        if reading is not None and not math.isfinite(reading):
            reasons.add("not_a_number")
            reading = math.nan
        elif reading is not None and known.blanks and _is_blank(reading):
            reasons.add("blank")
            reading = math.nan
        for row, member in known.parts:
            rule = member.cell.rule
            if time_s <= member.time_s:
                if not self._retry(node, time_s, known.job, taken):
                    reasons.add("duplicate" if time_s == member.time_s else "out_of_order")
            elif reading is None:
                reasons.add("ended")
                member.cell.end(member)
            else:
                if member.use.origin.rate and reading < member.reading:
                    reasons.add("counter_reset")
                value = member.cell.add_sample(member, time_s, reading)
                if value is not None and not 0.0 <= value <= rule.most:
                    reasons.add("out_of_range")
                elif value is not None:
                    taken.moments[node.set_value(row, rule.to, time_s, known.job, value, known.model)] = None
        return reasons

    def _take_code(self, known: _Known, node: NodeRows, sample: Sample, time_s: float, taken: Taken) -> None:
        assert known.event is not None  # noqa: S101 - checked by the caller
        rule, device, text = known.event
        code = sample.value
        if code is None and rule.states == "health":
            code = 0.0  # the error is part of the series' name: it is over
        if code is None:
            taken.left_out["ended"] += 1  # if its labels describe the code, the next code is another series
        elif not math.isfinite(code) or not 0.0 <= code < 1 << 16:
            taken.left_out["blank" if _is_blank(code) else "out_of_range"] += 1
        else:
            stated = _stated(rule, code, text)
            if stated is None:
                taken.left_out["unmapped"] += 1
                return
            moment = node.note_code(device, time_s, known.job, stated)
            if moment is not None:
                taken.moments[moment] = None
            else:
                self._retry(node, time_s, known.job, taken)

    def _retry(self, node: NodeRows, time_s: float, job: str | None, taken: Taken) -> bool:
        """Take a sample that was sent before: it counts if its data is not durable yet."""
        moment = node.moment(time_s, job)
        if moment is None or moment.is_kept:
            return False
        taken.moments[moment] = None
        return True

    def _find(self, one: WireSeries, asked: Callable[[str], RefusedSamples | None], cell_of: CellOf) -> _Known:
        """Parse and return the series. Raises Malformed, also where there are too many."""
        known = self._series.get(one.key)
        if known is not None and not known.in_cell:
            return known
        known = known or self._older.pop(one.key, None)
        if known is not None and known.in_cell and not cell_of(known.name, known.job):
            self._series.pop(one.key, None)
            known = None
        if known is None:
            if self.series_count >= self._series_max:
                detail = f"{self._series_max} series are known, which is the most (remote_write.series_max)"
                raise Malformed("series_limit", detail)
            known = self._known(one, asked, cell_of)
        if known.node is not None or not known.name or known.in_cell:  # else: of a node that is refused at present
            self._series[one.key] = known
        return known

    def _known(self, one: WireSeries, asked: Callable[[str], RefusedSamples | None], cell_of: CellOf) -> _Known:
        found = with_plain_names(labels(one.key))
        try:
            name = self._naming.node(found).name
            job = next((found[label] for label in self._job_labels if found.get(label)), None)
            if job is not None and not is_name(job):
                raise Malformed("job", f"the label's value {job[:80]!r} is no name of a job")
            job = None if job is None else self._naming.in_cluster(job, found)
        except NoName as error:
            raise Malformed("node", f"{error} (docs/how-to/prometheus.md)") from None
        if cell_of(name, job):
            return _Known(None, name, job, in_cell=True)
        if one.name == TARGET_UP:
            # Named by scrape labels only: this must not create a node from an unrelated exporter, and while it says
            # nothing about a node no permission is needed.
            target = f"{found.get('job', '')} {found.get('instance', '')}"
            return _Known(self._nodes.get(name), name, target=target, reason="unmapped")
        if asked(name) is not None:
            return _Known(None, name)
        event = self._table.events.get(one.name)
        if event is None:
            return self._measuring(one.name, name, job, found)
        exporter = self._table.exporters[event.exporter]
        row = row_of(exporter, found)
        if row is None or any(found.get(label) for label in exporter.without):
            return _Known(None, "", reason="part_of_a_gpu" if row is not None else "no_row")
        told = (event, int(row.key), found.get(event.text, ""))
        return _Known(self._node(name), name, job, event=told, gpu=_gpu(exporter, row, found))

    def _measuring(self, series: str, name: str, job: str | None, found: Mapping[str, str]) -> _Known:
        parts: list[tuple[MappedRow, Member]] = []
        reason, blanks, model, gpu = "unmapped", False, "", None
        for use in self._table.metrics[series]:
            if not use.fits(found):
                continue
            row = row_of(use.exporter, found)
            if row is None or any(found.get(label) for label in use.exporter.without):
                reason = "part_of_a_gpu" if row is not None else "no_row"
                continue
            cell = self._node(name).cell(use.rule, row)
            if cell is None:
                raise Malformed("rows_limit", f"node {name} has too many rows; see docs/how-to/prometheus.md")
            member = cell.member(use, tuple(found.get(label, "") for label in use.rule.each))
            member.width = _width(use.rule, found)
            parts.append((row, member))
            blanks, model = use.exporter.blanks, found.get(use.exporter.model, "")
            gpu = _gpu(use.exporter, row, found)
        if not parts:
            return _Known(None, "", reason=reason)
        return _Known(self._node(name), name, job, tuple(parts), blanks=blanks, model=model, gpu=gpu)

    def _node(self, name: str) -> NodeRows:
        found = self._nodes.get(name)
        if found is None:
            if len(self._nodes) >= self._nodes_max:
                raise Malformed(
                    "too_many_nodes", f"{self._nodes_max} nodes are known, which is the most (ingest.nodes_max)"
                )
            found = self._nodes[name] = NodeRows(
                name, interval_s=self._interval_s(name), watched=dict(self._watched(name))
            )
            self._naming.add(name)
        return found

    def _turn(self, now_s: float) -> None:
        """Forget the series without samples since the turn before the last."""
        if now_s - self._turned_s < FORGET_S:
            return
        before_s, self._turned_s = self._turned_s, now_s
        self._older, self._series = self._series, {}
        for name in [name for name, node in self._nodes.items() if node.touched_s < before_s]:
            del self._nodes[name]
            self._naming.discard(name)


def _plausible_s(sample: Sample, offset_s: float, now_s: float) -> float | None:
    """Return a sample's time plus the offset, or the current one where it cannot be; None where it has none."""
    time_s = sample.time_ms / 1000.0 + offset_s
    plausible = now_s - AGE_S_MAX <= time_s <= now_s + AHEAD_S_MAX
    if sample.time_ms <= 0 and (offset_s or not plausible):
        return None
    return time_s if plausible else now_s


def _gpu(exporter: Exporter, row: MappedRow, found: Mapping[str, str]) -> tuple[int, str] | None:
    uuid = found.get(exporter.uuid, "")
    return (int(row.key), uuid) if uuid else None


def _is_blank(value: float) -> bool:
    return value >= BLANK_MIN or BLANKS_32[0] <= value <= BLANKS_32[1]


def _width(rule: Rule, found: Mapping[str, str]) -> float:
    said = next((found[label] for label in rule.of if label in found), "")
    return float(said) if said.isascii() and said.isdigit() and len(said) < 10 else 0.0
