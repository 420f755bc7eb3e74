"""Records a job's frames, as the server stored them, as a trace, and writes its folder. Touches: the folder."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.events import WHOLE_NODE
from eagle_eye.schema.frame import Block, Frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.backtest.trace import (
    EVENTS_FILE,
    FORMAT,
    HEADER_FILE,
    LABELS_FILE,
    LINKS_FILE,
    MEMBERSHIP_FILE,
    SAMPLES_FILE,
    SILENCE_COLUMN,
    BadTrace,
    Header,
    Label,
    MembershipLine,
    TraceEvent,
    TraceLink,
    TraceNode,
    TraceRank,
)
from eagle_eye.server.engine.roster import Topology
from eagle_eye.server.history.history import Opening

SAMPLE_METRICS = (*catalogue.names(Scope.DEVICE), *catalogue.names(Scope.NODE))
LINK_METRICS = catalogue.names(Scope.LINK)
Column = Sequence[Any] | np.ndarray[Any, Any]


class TraceWriter:
    """Writes one trace, as a context manager; the folder appears whole when ``finish`` returns, or not at all.

    Raises BadTrace when ``folder`` exists already: a trace is never overwritten.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists():
            raise BadTrace(f"{folder} exists already; a trace is not overwritten: name another folder or remove it")
        self.folder = folder
        self._draft = folder.with_name(f".{folder.name}.partial")
        self._tables: dict[str, pq.ParquetWriter] = {}

    def __enter__(self) -> Self:
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for table in self._tables.values():
            table.close()
        shutil.rmtree(self._draft, ignore_errors=True)

    def samples(self, columns: Mapping[str, Column]) -> None:
        """Add device and node rows: ``time``, ``node``, ``device`` (-1: a node row) and any metrics; NaN unobserved.

        All columns are of one length. A metric that the catalogue lacks is a KeyError.
        """
        self._append(SAMPLES_FILE, ("device", pa.int16()), (*SAMPLE_METRICS, SILENCE_COLUMN), columns)

    def links(self, columns: Mapping[str, Column]) -> None:
        """Add link rows: ``time``, ``node``, ``link`` and any link metrics, as ``samples`` does."""
        self._append(LINKS_FILE, ("link", pa.dictionary(pa.int32(), pa.string())), LINK_METRICS, columns)

    def finish(
        self,
        header: Header,
        events: Iterable[TraceEvent] = (),
        memberships: Iterable[MembershipLine] = (),
        labels: Iterable[Label] | None = None,
    ) -> None:
        """Write the rest and move the folder into place. ``labels`` None: the trace has none."""
        if SAMPLES_FILE not in self._tables:
            self.samples({"time": [], "node": [], "device": []})
        for table in self._tables.values():
            table.close()
        self._tables.clear()
        (self._draft / HEADER_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(header), indent=1) + b"\n")
        reported: list[TraceEvent] = sorted(events, key=lambda event: event.time)
        members: list[MembershipLine] = sorted(memberships, key=lambda one: one.time)
        self._lines(EVENTS_FILE, reported)
        self._lines(MEMBERSHIP_FILE, members)
        if labels is not None:
            self._lines(LABELS_FILE, labels, even_empty=True)
        self._draft.rename(self.folder)

    def _append(self, name: str, key: tuple[str, Any], metrics: Sequence[str], columns: Mapping[str, Column]) -> None:
        unknown = columns.keys() - {"time", "node", key[0], *metrics}
        if unknown:
            raise KeyError(f"no such column of {name}: {', '.join(sorted(unknown))}")
        fields = {
            "time": pa.float64(),
            "node": pa.dictionary(pa.int32(), pa.string()),
            key[0]: key[1],
            **{metric: _kind(metric) for metric in metrics},
        }
        rows = len(columns["time"])
        table = self._tables.get(name)
        if table is None:
            table = pq.ParquetWriter(self._draft / name, pa.schema(list(fields.items())), compression="zstd")
            self._tables[name] = table
        arrays = [
            pa.array(columns[field], from_pandas=True).cast(kind, safe=False)
            if field in columns
            else pa.nulls(rows, kind)
            for field, kind in fields.items()
        ]
        table.write_table(pa.table(arrays, schema=pa.schema(list(fields.items()))))

    def _lines(self, name: str, records: Iterable[msgspec.Struct], even_empty: bool = False) -> None:
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        if lines or even_empty:
            (self._draft / name).write_bytes(lines)


def _kind(metric: str) -> Any:
    spec = catalogue.BY_NAME.get(metric)
    return pa.float64() if spec is not None and spec.exact else pa.float32()


CHUNK_ROWS = 20_000
_STAGE = re.compile(r"pp(\d{1,6})\b")


class Recorder:
    """Takes frames in any order and writes the trace of one job through ``writer``; ``rows`` counts."""

    def __init__(self, writer: TraceWriter, opening: Opening) -> None:
        self._writer = writer
        self._opening = opening
        self._samples = _Rows((*SAMPLE_METRICS, SILENCE_COLUMN))
        self._links = _Rows(LINK_METRICS)
        self._events: list[TraceEvent] = []
        self._devices: dict[str, set[int]] = {}
        self._ports: dict[str, set[str]] = {}
        self._members: dict[int, dict[int, TraceRank]] = {}
        self._roles: dict[int, str] = {}
        self._begun_s: dict[int, float] = {}
        self._intervals: Counter[float] = Counter()
        self._first_s, self._last_s = float("inf"), float("-inf")
        self.frames = self.rows = 0

    @property
    def nodes(self) -> int:
        """Number of nodes that sent something."""
        return len(self._devices)

    @property
    def events(self) -> int:
        """Number of events that the nodes reported."""
        return len(self._events)

    def add_frame(self, frame: Frame) -> None:
        """Add one frame, its times on the server's clock."""
        self.frames += 1
        self._devices.setdefault(frame.node, set())
        self._first_s, self._last_s = min(self._first_s, frame.time_s), max(self._last_s, frame.time_s)
        self._events += (
            TraceEvent(event.time_s, event.kind, frame.node, event.device, event.attributes) for event in frame.events
        )
        self._take_ranks(frame)
        if frame.blocks or not frame.events:  # a frame with only events was sent early because of them
            self._intervals[frame.interval_s] += 1
            self._take_rows(frame)

    def finish(self, start_s: float, end_s: float) -> Header:
        """Write what is left; the trace covers ``start_s`` to ``end_s`` as far as anything was recorded."""
        self._flush(self._samples, least=1)
        self._flush(self._links, least=1)
        interval_s = self._intervals.most_common(1)[0][0] if self._intervals else 1.0
        begin_s = min(max(start_s, self._first_s - interval_s), self._last_s)
        memberships = self._memberships(begin_s)
        first = next((one for one in memberships if one.time <= begin_s), None)
        header = Header(
            format=FORMAT,
            job=self._opening.job,
            interval_s=interval_s,
            start=begin_s,
            end=max(min(end_s, self._opening.now_s), self._last_s),
            nodes=[self._node(node) for node in sorted(self._devices)],
            ranks=first.ranks if first else [],
        )
        self._writer.finish(header, [*self._events, *self._states(begin_s)], memberships)
        return header

    def _take_ranks(self, frame: Frame) -> None:
        for rank in frame.ranks:
            members = self._members.setdefault(rank.attempt, {})
            members[rank.rank] = TraceRank(rank.rank, frame.node, rank.device, role=rank.role)
            self._begun_s[rank.attempt] = min(self._begun_s.get(rank.attempt, frame.time_s), frame.time_s)

    def _take_rows(self, frame: Frame) -> None:
        silent = {rank.device: rank.silent_s for rank in frame.ranks if rank.silent_s > 0}
        seen: set[int] = set()
        for block in frame.blocks:
            if block.scope is Scope.LINK:
                self._links.add(frame.time_s, frame.node, block)
                self._ports.setdefault(frame.node, set()).update(str(key) for key in block.keys)
            else:
                self._samples.add(frame.time_s, frame.node, block)
                seen.update(key for key in block.keys if isinstance(key, int))
        missing = sorted(silent.keys() - seen)
        if missing or not seen:
            # That the agent was heard deserves a row, even without observations.
            bare = missing or [WHOLE_NODE]
            self._samples.add(frame.time_s, frame.node, Block(Scope.DEVICE, list(bare), [], b""))
        self._samples.set_silence(frame.node, frame.time_s, silent)
        self._devices[frame.node].update(key for key in seen if key >= 0)
        self._flush(self._samples, CHUNK_ROWS)
        self._flush(self._links, CHUNK_ROWS)

    def _flush(self, rows: _Rows, least: int) -> None:
        if rows.count >= least:
            self.rows += rows.count
            key = "link" if rows is self._links else "device"
            (self._writer.links if rows is self._links else self._writer.samples)(rows.columns(key))
            rows.clear()

    def _node(self, node: str) -> TraceNode:
        topology: Topology = self._opening.topology
        of_link: Mapping[str, str] = topology.switch_of_link.get(node, {})
        names = sorted(self._ports.get(node, set()) | of_link.keys())
        return TraceNode(
            node=node,
            gpus=len(self._devices[node]),
            switch=topology.switch_of_node.get(node),
            gpu_model=self._opening.gpu_models.get(node) if self._models_known() else None,
            links=[TraceLink(name, of_link.get(name)) for name in names],
        )

    def _models_known(self) -> bool:
        """Return whether all nodes' models are known: a model missing for some would separate them from their peers."""
        return self._devices.keys() <= self._opening.gpu_models.keys()

    def _memberships(self, begin_s: float) -> list[MembershipLine]:
        """Return the members of each attempt seen, from when the scheduler or else the agents reported them."""
        for rank in self._opening.ranks:
            if self._members and self._opening.attempt in self._members:
                self._members[self._opening.attempt].setdefault(
                    rank.rank, TraceRank(rank.rank, rank.node, rank.device, role=rank.role)
                )
        stages = _stages({rank.role for ranks in self._members.values() for rank in ranks.values()})
        begun_s = dict(self._begun_s)
        for said in self._opening.states:
            if said.attempt in begun_s:
                begun_s[said.attempt] = min(begun_s[said.attempt], said.time_s)
        first = min(begun_s, default=0)
        return [
            MembershipLine(
                time=begin_s if attempt == first else max(begun_s[attempt], begin_s),
                attempt=attempt,
                ranks=[
                    TraceRank(r.rank, r.node, r.device, pp=stages[r.role], role=r.role)
                    for r in sorted(ranks.values(), key=lambda rank: rank.rank)
                ],
            )
            for attempt, ranks in sorted(self._members.items())
        ]

    def _states(self, begin_s: float) -> Iterator[TraceEvent]:
        for said in self._opening.states:
            yield TraceEvent(
                time=max(said.time_s, begin_s),
                kind="job_state",
                attributes={"state": said.state, "attempt": said.attempt},
            )


class _Rows:
    """Rows of one table, gathered as arrays until there are enough to write."""

    def __init__(self, metrics: Sequence[str]) -> None:
        self._metrics = metrics
        self._index = {metric: i for i, metric in enumerate(metrics)}
        self._cells = np.full((CHUNK_ROWS, len(metrics)), np.nan)
        self.clear()

    def clear(self) -> None:
        """Remove all rows."""
        self._cells[:] = np.nan
        self.count = 0
        self._times: list[float] = []
        self._nodes: list[str] = []
        self._keys: list[int | str] = []

    def add(self, time_s: float, node: str, block: Block) -> None:
        """Add a block's rows, one for each key."""
        rows = len(block.keys)
        if self.count + rows > len(self._cells):
            self._cells = np.vstack([self._cells, np.full((max(rows, CHUNK_ROWS), len(self._metrics)), np.nan)])
        if block.metrics:
            columns = [self._index[metric] for metric in block.metrics]
            values = np.frombuffer(block.values, dtype="<f8").reshape(len(block.metrics), rows)
            self._cells[self.count : self.count + rows, columns] = values.T
        self._times += [time_s] * rows
        self._nodes += [node] * rows
        self._keys += block.keys
        self.count += rows

    def set_silence(self, node: str, time_s: float, silent: Mapping[int, float]) -> None:
        """Record in a node's newest rows for how long the ranks of some devices have been silent."""
        for row in range(self.count - 1, -1, -1) if silent else ():
            if (self._nodes[row], self._times[row]) != (node, time_s):
                return
            device = self._keys[row]
            if isinstance(device, int) and device in silent:
                self._cells[row, self._index[SILENCE_COLUMN]] = silent[device]

    def columns(self, key: str) -> dict[str, Any]:
        """Return the rows as columns; metrics without any value are left out."""
        cells = self._cells[: self.count]
        seen = ~np.isnan(cells).all(axis=0)
        values = {metric: cells[:, i] for i, metric in enumerate(self._metrics) if seen[i]}
        return {"time": self._times, "node": self._nodes, key: self._keys, **values}


def _stages(roles: set[str]) -> dict[str, int]:
    """Return a pipeline stage for each role: the one in its name, else its index among all roles."""
    named = {role: match for role in roles if (match := _STAGE.match(role))}
    if len(named) == len(roles):
        return {role: int(match[1]) for role, match in named.items()}
    return {role: place for place, role in enumerate(sorted(roles))}
