"""Reading a trace folder (``eagle-eye-trace/1``) as the frames, job updates and labels that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle_eye.schema import events as event_catalogue
from eagle_eye.schema import metrics as metric_catalogue
from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.events import WHOLE_NODE, Event
from eagle_eye.schema.frame import WIRE_VERSION, Block, Frame, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.records import Job

FORMAT = "eagle-eye-trace/1"


class BadTrace(ValueError):  # noqa: N818 - it names the thing that is bad
    """A folder that is no usable trace; the message names the file and what was expected."""


class TraceNode(msgspec.Struct, frozen=True):
    """A node of the trace."""

    node: str
    gpus: int
    switch: str | None = None
    gpu_model: str | None = None


class TraceRank(msgspec.Struct, frozen=True):
    """A rank of the trace; ``pp`` is its pipeline stage."""

    rank: int
    node: str
    device: int
    dp: int = 0
    pp: int = 0
    tp: int = 0


class Header(msgspec.Struct, frozen=True):
    """``trace.json``."""

    format: str
    job: str
    interval_s: float
    start: float
    end: float
    nodes: list[TraceNode]
    ranks: list[TraceRank] = []


class Membership(msgspec.Struct, frozen=True):
    """One line of ``membership.jsonl``."""

    time: float
    attempt: int
    ranks: list[TraceRank]


class TraceEvent(msgspec.Struct, frozen=True):
    """One line of ``events.jsonl``; ``node`` None for the whole job."""

    time: float
    kind: str
    node: str | None = None
    device: int = WHOLE_NODE
    attributes: dict[str, Any] = {}


class Label(msgspec.Struct, frozen=True):
    """One line of ``faults.jsonl``: what was done to the job, and what is expected of us."""

    start: float
    end: float
    nodes: list[str]
    fault: str
    expect: str


@dataclass(frozen=True, slots=True)
class Step:
    """Something that becomes known at ``time_s``: a frame, or the scheduler's word on the job."""

    time_s: float
    frame: Frame | None = None
    job: Job | None = None


class Trace:
    """A trace on disk. Raises BadTrace where a file is missing, malformed or of another format."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.header = self._read_header()
        self._present = self._ranks_by_node()

    def labels(self) -> list[Label] | None:
        """Return the labels, None when the trace has none. The engine never sees them."""
        path = self.folder / "faults.jsonl"
        return self._lines(path, Label) if path.exists() else None

    def steps(self) -> Iterator[Step]:
        """Yield all that the trace tells, in order of time; frames of one moment in order of node."""
        steps = [*self._job_steps(), *self._frames()]
        yield from sorted(steps, key=lambda step: (step.time_s, step.job is None))

    def _read_header(self) -> Header:
        path = self.folder / "trace.json"
        try:
            header = msgspec.json.decode(path.read_bytes(), type=Header)
        except OSError as error:
            raise BadTrace(f"{path}: {error.strerror}; a trace is a folder with trace.json") from None
        except msgspec.DecodeError as error:
            raise BadTrace(f"{path}: {error}") from None
        if header.format != FORMAT:
            raise BadTrace(f"{path}: format {header.format!r}; this program reads {FORMAT!r}")
        if not header.interval_s > 0 or not header.end >= header.start:
            raise BadTrace(f"{path}: interval_s {header.interval_s}, start {header.start}, end {header.end}")
        return header

    def _lines(self, path: Path, shape: type[Any]) -> list[Any]:
        decoder = msgspec.json.Decoder(shape)
        result = []
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if line.strip():
                try:
                    result.append(decoder.decode(line))
                except msgspec.DecodeError as error:
                    raise BadTrace(f"{path}:{number}: {error}") from None
        return result

    def _memberships(self) -> list[Membership]:
        """Return who took part from when on, oldest first; [] when the trace does not say."""
        found = [Membership(self.header.start, 0, self.header.ranks)] if self.header.ranks else []
        later = self.folder / "membership.jsonl"
        if later.exists():
            found += self._lines(later, Membership)
        return sorted(found, key=lambda item: item.time)

    def _members(self, ranks: list[TraceRank]) -> list[MemberRank]:
        """Return the ranks with their peer group: pipeline stage and GPU model."""
        model = {node.node: node.gpu_model or "" for node in self.header.nodes}
        return [MemberRank(r.rank, r.node, r.device, f"pp{r.pp}/{model.get(r.node, '')}") for r in ranks]

    def _ranks_by_node(self) -> list[tuple[float, dict[str, list[Rank]]]]:
        """Return from when on which ranks ran on which node, newest first."""
        present = []
        for item in reversed(self._memberships()):
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

    def _job_steps(self) -> Iterator[Step]:
        def job(time_s: float, attempt: int, state: str, ranks: list[TraceRank]) -> Step:
            return Step(
                time_s,
                job=Job(
                    job=self.header.job,
                    attempt=attempt,
                    state=state,
                    ranks=self._members(ranks),
                    restart_owner="",
                    updated_s=time_s,
                ),
            )

        for item in self._memberships():
            yield job(item.time, item.attempt, "running", item.ranks)
        for event in self._events():
            if event.kind == "job_state":
                attempt = int(event.attributes.get("attempt", 0))
                yield job(event.time, attempt, str(event.attributes.get("state", "")), [])

    def _events(self) -> list[TraceEvent]:
        path = self.folder / "events.jsonl"
        return self._lines(path, TraceEvent) if path.exists() else []

    def _frames(self) -> Iterator[Step]:
        events: dict[str, list[TraceEvent]] = {}
        for event in self._events():
            if event.kind in event_catalogue.BY_KIND and event.kind != "job_state":
                nodes = [event.node] if event.node else [node.node for node in self.header.nodes]
                for node in nodes:
                    events.setdefault(node, []).append(event)
        table = self._samples()
        sequence = 0
        for node, rows in _by_node(table):
            waiting = sorted(events.pop(node, []), key=lambda event: event.time)
            for time_s, blocks in _blocks(rows):
                sequence += 1
                due = [event for event in waiting if event.time <= time_s]
                waiting = waiting[len(due) :]
                # An event is known when it happens; a row only when its interval has ended.
                yield from (self._frame(node, event.time, sequence, [], [event]) for event in due)
                yield self._frame(node, time_s, sequence, blocks, [])
            yield from (self._frame(node, event.time, sequence, [], [event]) for event in waiting)
        for node, left in events.items():
            yield from (self._frame(node, event.time, sequence, [], [event]) for event in left)

    def _frame(self, node: str, time_s: float, sequence: int, blocks: list[Block], events: list[TraceEvent]) -> Step:
        return Step(
            time_s,
            frame=Frame(
                version=WIRE_VERSION,
                node=node,
                boot_id="trace",
                stream="trace",
                sequence=sequence,
                time_s=time_s,
                interval_s=self.header.interval_s,
                agent_version="trace",
                job=self.header.job,
                ranks=next((nodes.get(node, []) for since_s, nodes in self._present if since_s <= time_s), []),
                blocks=blocks,
                events=[Event(e.time, e.kind, e.device, e.attributes) for e in events],
            ),
        )

    def _samples(self) -> pa.Table:
        path = self.folder / "samples.parquet"
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise BadTrace(f"{path}: {error}") from None
        missing = {"time", "node", "device"} - set(table.schema.names)
        if missing:
            raise BadTrace(f"{path}: no column {', '.join(sorted(missing))}")
        known = [n for n in table.schema.names if n in metric_catalogue.BY_NAME]
        table = table.select(["time", "node", "device", *known])
        return table.set_column(1, "node", pc.cast(table["node"], pa.string()))


def _by_node(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    for node in sorted(pc.unique(table["node"]).to_pylist()):
        yield node, table.filter(pc.equal(table["node"], node))


def _blocks(rows: pa.Table) -> Iterator[tuple[float, list[Block]]]:
    """Yield a node's rows, one moment at a time, in order of time; of two rows of one moment the last counts."""
    times = np.asarray(rows["time"], dtype=np.float64)
    devices = np.asarray(rows["device"], dtype=np.int64)
    metrics = [name for name in rows.schema.names if name in metric_catalogue.BY_NAME]
    values = np.array([np.asarray(rows[m].cast(pa.float64()).fill_null(np.nan)) for m in metrics]).reshape(
        len(metrics), len(times)
    )
    order = np.argsort(times, kind="stable")
    starts = np.flatnonzero(np.diff(times[order], prepend=-np.inf))
    for group in np.split(order, starts[1:]):
        last = {int(devices[i]): int(i) for i in group}
        blocks = []
        for scope, keys in (
            (Scope.DEVICE, sorted(k for k in last if k >= 0)),
            (Scope.NODE, [k for k in last if k == WHOLE_NODE]),
        ):
            chosen = [i for i, m in enumerate(metrics) if metric_catalogue.BY_NAME[m].scope is scope]
            if keys and chosen:
                cells = values[np.ix_(chosen, [last[k] for k in keys])]
                seen = ~np.isnan(cells).all(axis=1)
                names = [metrics[i] for i, ok in zip(chosen, seen, strict=True) if ok]
                blocks.append(Block(scope, list(keys), names, cells[seen].astype("<f8").tobytes()))
        yield float(times[group[0]]), blocks
