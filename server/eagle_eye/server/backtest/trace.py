"""Reads a trace folder (``eagle-eye-trace/1``) as frames, job updates and labels."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from eagle_eye.schema import events as event_catalogue
from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.events import WHOLE_NODE, Event
from eagle_eye.schema.frame import WIRE_VERSION, Block, Frame, Rank
from eagle_eye.schema.names import did_you_mean
from eagle_eye.server.backtest.trace_clocks import clock_offsets
from eagle_eye.server.backtest.trace_format import (
    EVENTS_FILE,
    FORMAT,
    HEADER_FILE,
    LABELS_FILE,
    LINKS_FILE,
    MEMBERSHIP_FILE,
    MEMBERSHIP_LINE_BYTES_MAX,
    SAMPLES_FILE,
    BadTrace,
    Header,
    Label,
    MembershipLine,
    TraceEvent,
    TraceRank,
    read_header,
    read_lines,
)
from eagle_eye.server.backtest.trace_rows import TableRows, TraceRows, link_rows, sample_rows
from eagle_eye.server.engine.roster import Topology
from eagle_eye.server.model.records import Job

__all__ = ["FORMAT", "BadTrace", "Header", "Label", "MembershipLine", "Step", "Trace", "TraceEvent", "TraceRank"]

DAY_S = 86_400.0
IDLE_S_MAX = DAY_S  # maximum time that the header may extend beyond the trace's data
SLACK_S = 10.0  # rows this far outside of the header's range are not reported
_JOB, _EVENT, _ROWS = 0, 1, 2  # order of what becomes known at the same moment


@dataclass(frozen=True, slots=True)
class Step:
    """Something that becomes known at ``time_s``: a frame, or the scheduler's report on the job."""

    time_s: float
    frame: Frame | None = None
    job: Job | None = None


class _Reported(NamedTuple):
    """An item of a file, with its sort keys; ``node`` is "" for the job."""

    time_s: float
    node: str
    kind: int
    what: Job | Event | list[Block]
    silent: dict[int, float] = {}  # noqa: RUF012 - never changed


_by_time = attrgetter("time_s")
_by_time_said = attrgetter("time")
_in_order = itemgetter(0, 1, 2)


class Trace:
    """A trace on disk. Raises BadTrace where a file is missing, malformed or of another format.

    ``ignored`` counts, by reason, what ``steps`` left out, once it has been exhausted. ``clock_offsets`` has, from its
    first step on, how many seconds nodes' clocks are ahead of the others'; their data is moved back by as much.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header = read_header(folder)
        self.ignored: Counter[str] = Counter()
        self.clock_offsets: dict[str, float] = {}
        self._memberships = self._read_memberships()
        self._present = self._ranks_by_node()

    def labels(self) -> list[Label] | None:
        """Return the labels, None when the trace has none. The engine never sees them.

        Raises BadTrace for one that no verdict could fulfil: an unknown fault, expectation or node.
        """
        path = self.folder / LABELS_FILE
        if not path.exists():
            return None
        found = read_lines(path, Label)
        known = {node.node for node in self.header.nodes}
        for label in found:
            for node in label.nodes:
                if node not in known:
                    hint = did_you_mean(node, known) or f"; {HEADER_FILE} names its nodes"
                    raise BadTrace(f"{path}: label {label.fault!r}: the trace has no node {node[:80]!r}{hint}")
        return found

    def members_at(self, time_s: float) -> list[MemberRank]:
        """Return the ranks that the trace names for this time, with their peer groups; [] where it names none."""
        latest = next((item for item in reversed(self._memberships) if item.time <= time_s), None)
        return [] if latest is None else self._members(latest.ranks)

    def topology(self) -> Topology:
        """Return which nodes are on which switch, as far as the trace says."""
        return Topology(
            switch_of_node={node.node: node.switch for node in self.header.nodes if node.switch},
            switch_of_link={
                node.node: {link.link: switch for link in node.links if (switch := link.switch or node.switch)}
                for node in self.header.nodes
                if node.links
            },
        )

    def steps(self) -> Iterator[Step]:
        """Yield the trace's contents in order of time; frames of one moment in order of node.

        An event is known when it happens, a row only when its interval has ended.
        """
        self.ignored.clear()
        events = read_lines(self.folder / EVENTS_FILE, TraceEvent)
        rows = [sample_rows(self.folder / SAMPLES_FILE)]
        if (links := self.folder / LINKS_FILE).exists():
            rows.append(link_rows(links))
        events = self._set_right(rows, events)
        self._check_reach(rows, events)
        tables = [moments for one in rows for moments in one.moments(self.ignored)]
        sequence = 0
        for reported in heapq.merge(self._job_words(events), self._events(events), _rows(tables), key=_in_order):
            if isinstance(reported.what, Job):
                yield Step(reported.time_s, job=reported.what)
            else:
                sequence += 1
                yield Step(reported.time_s, frame=self._frame(reported, sequence, reported.what))

    def _set_right(self, rows: list[TableRows], events: list[TraceEvent]) -> list[TraceEvent]:
        """Shift the data of nodes with a wrong clock to the others' time."""
        spacing_s, interval_s = rows[0].spacing_s(), self.header.interval_s
        if 900.0 <= spacing_s / interval_s <= 1_100.0:
            what = f"rows of a node are {spacing_s:g} apart where interval_s is {interval_s:g}: are they milliseconds?"
            raise BadTrace(f"{self.folder / SAMPLES_FILE}: column 'time': {what} Expected Unix seconds")
        self.clock_offsets = clock_offsets(rows[0].spans(), interval_s)
        for one in rows:
            one.shift(self.clock_offsets)
        if not self.clock_offsets:
            return events
        return [
            msgspec.structs.replace(event, time=event.time - self.clock_offsets.get(event.node or "", 0.0))
            for event in events
        ]

    def _check_reach(self, rows: list[TableRows], events: list[TraceEvent]) -> None:
        """Refuse a header with a time range that the data does not cover; count the rows outside of it."""
        start_s, end_s = self.header.start, self.header.end
        spans = [span for one in rows for span in one.spans().values()]
        reported = [time_s for span in spans for time_s in span]
        reported += [event.time for event in events]
        reported += [item.time for item in self._memberships if item.time > start_s]
        where = self.folder / HEADER_FILE
        for name, beyond_s in (
            ("end", end_s - max(reported, default=start_s)),
            ("start", min(reported, default=start_s) - start_s),
        ):
            if beyond_s > IDLE_S_MAX:
                side = "after the last" if name == "end" else "before the first"
                raise BadTrace(
                    f"{where}: {name} is {getattr(self.header, name):.0f}, {beyond_s / DAY_S:.1f} days {side} row or"
                    f" event; at most {IDLE_S_MAX / DAY_S:g} day of silence is judged: set {name} nearer to it"
                )
        slack_s = max(SLACK_S, self.header.interval_s)
        if spans and all(span.first_s > end_s + slack_s or span.last_s < start_s - slack_s for span in spans):
            first_s, last_s = min(span.first_s for span in spans), max(span.last_s for span in spans)
            raise BadTrace(
                f"{where}: start {start_s:.0f} and end {end_s:.0f} hold none of the rows, which are of {first_s:.0f} to"
                f" {last_s:.0f}; expected Unix seconds in both files"
            )
        for one in rows:
            before, after = one.outside(start_s - slack_s, end_s + slack_s)
            for count, side in ((before, "before the trace's start"), (after, "after the trace's end")):
                if count:
                    self.ignored[f"row {side}"] += count

    def _read_memberships(self) -> list[MembershipLine]:
        """Return the members over time, oldest first; [] when the trace does not say."""
        found = read_lines(self.folder / MEMBERSHIP_FILE, MembershipLine, MEMBERSHIP_LINE_BYTES_MAX)
        start = self.header.start
        if self.header.ranks and not any(item.time <= start for item in found):
            found.append(MembershipLine(start, 0, self.header.ranks))
        return sorted(found, key=_by_time_said)

    def _members(self, ranks: list[TraceRank]) -> list[MemberRank]:
        """Return the ranks with their peer group: the job's own, else pipeline stage and GPU model."""
        model = {node.node: node.gpu_model or "" for node in self.header.nodes}
        return [MemberRank(r.rank, r.node, r.device, r.role or f"pp{r.pp}/{model.get(r.node, '')}") for r in ranks]

    def _ranks_by_node(self) -> list[tuple[float, dict[str, list[Rank]]]]:
        """Return which ranks ran on which node from when on, newest first."""
        present = []
        for item in reversed(self._memberships):
            nodes: dict[str, list[Rank]] = {}
            for member in self._members(item.ranks):
                rank = Rank(
                    job=self.header.job,
                    rank=member.rank,
                    world_size=len(item.ranks),
                    device=member.device,
                    attempt=item.attempt,
                    role=member.role,
                )
                nodes.setdefault(member.node, []).append(rank)
            present.append((item.time, nodes))
        return present

    def _job_words(self, events: list[TraceEvent]) -> list[_Reported]:
        said = [(item.time, item.attempt, "running", item.ranks) for item in self._memberships]
        said += (
            (event.time, self._attempt(event), str(event.attributes.get("state", "")), [])
            for event in events
            if event.kind == "job_state"
        )
        jobs = [
            Job(
                job=self.header.job,
                attempt=attempt,
                state=state,
                ranks=self._members(ranks),
                restart_owner="",
                updated_s=time_s,
            )
            for time_s, attempt, state, ranks in said
        ]
        return sorted((_Reported(job.updated_s, "", _JOB, job) for job in jobs), key=_by_time)

    def _attempt(self, event: TraceEvent) -> int:
        """Return the attempt of a job_state event: if it names none, the one in progress then."""
        named = event.attributes.get("attempt")
        if isinstance(named, int | float) and math.isfinite(named):
            return int(named)
        begun = [item.attempt for item in self._memberships if item.time <= event.time]
        return max(begun, default=0)

    def _events(self, events: list[TraceEvent]) -> list[_Reported]:
        found: list[_Reported] = []
        for event in events:
            if event.kind not in event_catalogue.BY_KIND:
                self.ignored[f"event of unknown kind {event.kind[:80]!r}"] += 1
            elif event.kind != "job_state":
                device = WHOLE_NODE if event.device is None else event.device
                one = Event(event.time, event.kind, device, event.attributes)
                nodes = [event.node] if event.node else [known.node for known in self.header.nodes]
                found += (_Reported(event.time, node, _EVENT, one) for node in nodes)
        return sorted(found, key=_in_order)

    def _frame(self, reported: _Reported, sequence: int, what: Event | list[Block]) -> Frame:
        time_s, node = reported.time_s, reported.node
        ranks = next((nodes.get(node, []) for since_s, nodes in self._present if since_s <= time_s), [])
        if reported.silent:
            ranks = [msgspec.structs.replace(rank, silent_s=reported.silent.get(rank.device, 0.0)) for rank in ranks]
        return Frame(
            version=WIRE_VERSION,
            node=node,
            boot_id="trace",
            stream="trace",
            sequence=sequence,
            time_s=time_s,
            interval_s=self.header.interval_s,
            agent_version="trace",
            job=self.header.job,
            ranks=ranks,
            blocks=what if isinstance(what, list) else [],
            events=[what] if isinstance(what, Event) else [],
        )


def _rows(tables: list[Iterator[TraceRows]]) -> Iterator[_Reported]:
    """Yield one set of blocks for each node and moment, from all tables."""
    blocks: list[Block] = []
    silent: dict[int, float] = {}
    time_s, node = math.nan, ""
    for moment in heapq.merge(*tables, key=itemgetter(0, 1)):
        if blocks and (moment.time_s != time_s or moment.node != node):
            yield _Reported(time_s, node, _ROWS, blocks, silent)
            blocks, silent = [], {}
        time_s, node = moment.time_s, moment.node
        blocks.append(moment.block)
        silent = moment.silent or silent
    if blocks:
        yield _Reported(time_s, node, _ROWS, blocks, silent)
