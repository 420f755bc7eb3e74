"""Converts a request's series to samples of nodes by timestamp. Pure: time is an argument.

A series' labels are parsed once; from then on it is looked up by their bytes. Series without samples for twice FORGET_S
are forgotten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from eagle_eye.schema.driver_facts import DCGM_FACTS, NVML_RECOVERY_FACTS
from eagle_eye.schema.names import is_name
from eagle_eye.server.ingest.remote_write.cells import Member
from eagle_eye.server.ingest.remote_write.mapping import (
    TARGET_UP,
    EventRule,
    Exporter,
    MappedRow,
    Rule,
    Table,
    row_of,
)
from eagle_eye.server.ingest.remote_write.rows import (
    INTERVAL_UNKNOWN_S,
    TEXT_CHARS_MAX,
    NodeRows,
    NodeSample,
    StatedCode,
)
from eagle_eye.server.ingest.remote_write.wire import Malformed, Sample, WireSeries, labels
from eagle_eye.server.model.clock import AGE_S_MAX, AHEAD_S_MAX
from eagle_eye.server.model.identity import NameClaims, Naming, NoName, with_plain_names
from eagle_eye.server.model.records import Watched

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

    def take(
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
                value = member.cell.take(member, time_s, reading)
                if value is not None and not 0.0 <= value <= rule.most:
                    reasons.add("out_of_range")
                elif value is not None:
                    taken.moments[node.note(row, rule.to, time_s, known.job, value, known.model)] = None
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
