"""Replays the recent past at start: reads back what is within detection's window. Touches: history, fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from eagle_eye.schema.frame import BadFrame, Frame
from eagle_eye.schema.rows import ROW_HEAD, read_row, row_head, template_of_row
from eagle_eye.server.history.history import History, Recorded, RecordedRow
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.ingest.remote_write.keeper import is_ours, judged
from eagle_eye.server.ingest.templates import KnownTemplate, Templates
from eagle_eye.server.model.batch import Batch, Row, batches_of
from eagle_eye.server.model.node_clocks import corrected

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
