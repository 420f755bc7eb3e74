"""What a starting server recalls: nodes ever heard of, and the past within the window. Touches: store, history."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from eagle_eye.schema.frame import BadFrame, Frame
from eagle_eye.schema.rows import ROW_HEAD, read_row, row_head, template_of_row
from eagle_eye.server.history.history import History, Recorded, RecordedRow
from eagle_eye.server.ingest.decoding import KnownTemplate, Templates
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.ingest.remote_write.keeper import STREAM_PREFIX, is_ours, judged
from eagle_eye.server.model.batch import Batch, Row, batches_of
from eagle_eye.server.model.clock import Clock, corrected
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.identity import CLUSTER_MARK
from eagle_eye.server.model.records import AuditEntry, ForgottenNode, Incident, Node
from eagle_eye.server.store.store import FORGOTTEN_NODES, NODES, PAGE_LIMIT_MAX, Change, Store

FORGOTTEN_AT_ONCE_MAX = 100_000  # named in one request
FORGOTTEN_IN_ONE = 200  # per transaction: bounds how long other writers wait

_log = logging.getLogger(__name__)


class Forgetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which nodes to forget: those of ``nodes``, [] for all, to which everything else that is said applies, too.

    ``unheard_for_s``: nothing was heard of it for so long, by all that is known. ``introduced_by``: the remote-write
    token that named it first. ``force``: whatever stands against it. ``dry_run``: say what would be.
    """

    nodes: Annotated[list[str], Meta(max_length=FORGOTTEN_AT_ONCE_MAX)] = []
    unheard_for_s: Annotated[float, Meta(gt=0)] | None = None
    introduced_by: str = ""
    force: bool = False
    dry_run: bool = False
    reason: Annotated[str, Meta(max_length=1_000)] = ""


class RetainedNode(NamedTuple):
    """A node that is not forgotten, and why: one stable word, and a sentence."""

    node: str
    reason: str
    detail: str


class Forgotten(NamedTuple):
    """The result of a request to forget."""

    forgotten: list[str]
    kept: list[RetainedNode]


class KnownNodes:
    """The known nodes. A node heard within ``fresh_s`` is not forgotten. ``failed`` counts failures to record some."""

    def __init__(self, store: Store, fleet: Fleet, clock: Clock, fresh_s: float, failed: Callable[[], None]) -> None:
        self._store = store
        self._fleet = fleet
        self._clock = clock
        self._fresh_s = fresh_s
        self._failed = failed

    def recover(self, history: History) -> dict[str, float]:
        """Add the recorded nodes to the fleet, before the first new frame; return when nodes were forgotten."""
        forgotten_s = {one.node: one.forgotten_s for one in self._store.all(FORGOTTEN_NODES)}
        streams = history.streams()
        _retire(self._store, min((known.heard_s for known in streams), default=self._clock.now_s()))
        heard_s: dict[str, float] = {}
        by_agent: set[str] = set()
        for known in streams:
            if known.heard_s > forgotten_s.get(known.node, 0.0):
                heard_s[known.node] = max(known.heard_s, heard_s.get(known.node, 0.0))
                if not known.stream.startswith(STREAM_PREFIX):
                    by_agent.add(known.node)
        recorded = list(self._store.all(NODES))
        introduced_by = {node.node: node.introduced_by for node in recorded}
        if not self._fleet.clusters.home:
            self._fleet.clusters.home = next((node.cluster for node in recorded if node.cluster), "")
        for node in sorted(heard_s.keys() | introduced_by.keys()):
            by = introduced_by.get(node, "")
            unvouched = bool(by) or (node in heard_s and node not in by_agent)
            self._fleet.know(node, heard_s.get(node), by if unvouched else None, has_agent=node in by_agent)
        self.write_down(sorted(heard_s))
        return forgotten_s

    async def introduce(self, names: Sequence[str]) -> None:
        """Record nodes heard for the first time; if that fails, the next start does it: their frames are durable."""
        try:
            await asyncio.to_thread(self.write_down, names)
        except StoreUnavailable:
            _log.warning("nodes could not be written down", extra={"nodes": len(names), "first": names[0]})
            self._failed()

    def write_down(self, names: Sequence[str]) -> None:
        """Record each node that has no record yet. Raises StoreUnavailable."""

        def nodes(store: Store) -> Change:
            now_s = self._clock.now_s()
            return Change(
                nodes=tuple(
                    Node(
                        node=name,
                        state="in_service",
                        reason="",
                        updated_s=now_s,
                        known_since_s=now_s,
                        introduced_by=self._fleet.room.unvouched.token_of(name),
                        cluster=self._fleet.clusters.home if CLUSTER_MARK not in name else "",
                    )
                    for name in store.missing(NODES, names)
                )
            )

        self._store.update(nodes)

    def forget(self, who: str, asked: Forgetting) -> Forgotten:
        """Delete the records of nodes, a few at a time; call ``Fleet.forget`` afterwards. Raises StoreUnavailable."""
        names = list(dict.fromkeys(asked.nodes)) or [node.node for node in self._store.all(NODES)]
        done = Forgotten([], [])
        for first in range(0, len(names), FORGOTTEN_IN_ONE):
            part = names[first : first + FORGOTTEN_IN_ONE]
            found = Forgotten([], [])

            def change(store: Store, part: list[str] = part, found: Forgotten = found) -> Change:
                accused = _accused(store.open_incidents())
                for name in part:
                    node = store.get(NODES, name)
                    if node is not None and not self._is_asked_for(node, asked):
                        continue
                    kept = self._stands_against(name, node, accused)
                    if kept is not None and (kept.reason == "not_found" or not asked.force):
                        found.kept.append(kept)
                    else:
                        found.forgotten.append(name)
                if asked.dry_run:
                    return Change()
                now_s = self._clock.now_s()
                detail = f"{'forced: ' if asked.force else ''}{asked.reason}"[:4096]
                return Change(
                    forgotten_nodes=tuple(ForgottenNode(node=name, forgotten_s=now_s) for name in found.forgotten),
                    audit=tuple(
                        AuditEntry(time_s=now_s, who=who, verb="forget", subject=name, detail=detail)
                        for name in found.forgotten
                    ),
                )

            self._store.update(change)
            done.forgotten.extend(found.forgotten)
            done.kept.extend(found.kept)
        return done

    def _is_asked_for(self, node: Node, asked: Forgetting) -> bool:
        if asked.introduced_by and node.introduced_by != asked.introduced_by:
            return False
        if asked.unheard_for_s is None:
            return True
        presence = self._fleet.presence(node.node)
        heard_s = presence.received_s if presence is not None else node.known_since_s or 0.0
        return self._clock.now_s() - heard_s >= asked.unheard_for_s

    def _stands_against(self, name: str, node: Node | None, accused: dict[str, str]) -> RetainedNode | None:
        if node is None:
            return RetainedNode(name, "not_found", "no node is called that")
        now_s = self._clock.now_s()
        presence = self._fleet.presence(name)
        if presence is not None and presence.is_fresh(now_s, self._fresh_s):
            return RetainedNode(
                name, "heard", f"it was heard {max(now_s - presence.received_s, 0.0):.0f} s ago and would come back"
            )
        if node.state != "in_service":
            return RetainedNode(
                name, "out_of_service", f"it is {node.state}, and would be in service if it came back: readmit it"
            )
        if name in accused:
            return RetainedNode(name, "open_incident", f"incident {accused[name]} is open: resolve it")
        if node.check_id:
            return RetainedNode(name, "busy", f"its return waits for check {node.check_id}")
        return None


def _accused(incidents: Sequence[Incident]) -> dict[str, str]:
    """Return the nodes that open incidents name, each with one of them."""
    return {node: one.id for one in incidents for node in (*one.nodes, *([one.node] if one.node else []))}


def _retire(store: Store, oldest_s: float) -> None:
    """Delete records of nodes forgotten before anything that the history still has."""
    while store.retire(FORGOTTEN_NODES, "forgotten_s", oldest_s, PAGE_LIMIT_MAX) == PAGE_LIMIT_MAX:
        pass


ROWS_AT_ONCE = 2_048  # passed to the engine together: a large fleet's past has hundreds of thousands...
ROWS_FIRST = 64  # ...and fewer at first: while nodes are new, each row is routed alone


def recent_past(
    history: History,
    fleet: Fleet | None,
    templates: Templates,
    forgotten_s: Mapping[str, float],
    since_s: float,
    frames_max: int,
) -> Iterator[tuple[Frame, float] | Batch]:
    """Yield rows and (corrected frame, received_s) from ``since_s`` on, in the order of their times.

    The fleet, where one is given, knows each of them and, at the end, the nodes' clocks. Leaves out what nodes sent
    before they were forgotten. ``templates`` has those of the rows afterwards.
    """
    rows: list[Row] = []
    most = ROWS_FIRST
    clocks: dict[str, tuple[float, float | None]] = {}
    for one in history.replay(since_s, frames_max):
        known = templates.recall(template_of_row(one.raw)) if isinstance(one, RecordedRow) else None
        row = _row(known, one) if known is not None and isinstance(one, RecordedRow) else None
        if row is not None:
            if row.received_s > forgotten_s.get(row.resolved.node, 0.0):
                if fleet is not None:
                    fleet.heard_row(row.resolved, row.time_s, row.received_s)
                    clocks[row.resolved.node] = one.offset_s, row.resolved.hollow.base_s
                rows.append(row)
            if len(rows) >= most:
                yield from batches_of(rows)
                rows, most = [], min(2 * most, ROWS_AT_ONCE)
            continue
        frame = one.frame if isinstance(one, Recorded) else _frame(known, one)
        if frame is not None and one.received_s > forgotten_s.get(frame.node, 0.0):
            yield from batches_of(rows)  # keeps the node's earlier rows before it
            rows = []
            if fleet is not None:
                fleet.heard(frame, one.received_s, vouched=not is_ours(frame))
                clocks[frame.node] = one.offset_s, frame.base_s
            yield judged(corrected(frame, one.offset_s, one.received_s)), one.received_s
    if fleet is not None:
        for node, (offset_s, base_s) in clocks.items():
            fleet.know_clock(node, offset_s, base_s)
    yield from batches_of(rows)


def _row(known: KnownTemplate, one: RecordedRow) -> Row | None:
    """Return the row; None if it must be read alone, as a frame."""
    resolved = known.resolved
    if resolved.layout is None or len(one.raw) != ROW_HEAD.size + resolved.size:
        return None
    head = row_head(one.raw)
    return Row(resolved, head.sequence, head.time_s, one.received_s, one.offset_s, one.raw)


def _frame(known: KnownTemplate | None, one: RecordedRow) -> Frame | None:
    """Return the frame that the row represents; None if it cannot be read."""
    try:
        return None if known is None else read_row(known.resolved.template, one.raw).frame
    except BadFrame:
        return None
