"""Records a job's frames, as the server stored them, as a trace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eagle_eye.schema.events import WHOLE_NODE
from eagle_eye.schema.frame import Block, Frame
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.backtest.trace_format import (
    FORMAT,
    SILENCE_COLUMN,
    Header,
    MembershipLine,
    TraceEvent,
    TraceLink,
    TraceNode,
    TraceRank,
)
from eagle_eye.server.backtest.writer import LINK_METRICS, SAMPLE_METRICS, TraceWriter
from eagle_eye.server.engine.roster import Topology
from eagle_eye.server.history.history import Opening

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

    def take(self, frame: Frame) -> None:
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
