"""Bulk decoding of the common request of a large fleet: a single row of numbers whose template is known.

Requests that are unusual in any way are detected here and left to ``RowsIngest.take``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from eagle_eye.schema.frame import TIME_S_MAX
from eagle_eye.schema.rows import MAGIC, VERSION
from eagle_eye.server.history.history import LATE_S
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.ingest.templates import ALONE_BYTES, KnownTemplate
from eagle_eye.server.model.batch import Batch
from eagle_eye.server.security.auth import Principal

SEQUENCE_MAX = 1 << 53

# The parts of a request before the numbers: REQUEST_HEAD, SIZE and ROW_HEAD of schema/rows.py.
_HEAD = np.dtype(
    [
        ("magic", "S4"),
        ("templates", "<u2"),
        ("rows", "<u2"),
        ("sent_s", "<f8"),
        ("size", "<u4"),
        ("version", "u1"),
        ("zero", "V3"),
        ("tail", "<u4"),
        ("id", "V16"),
        ("sequence", "<u8"),
        ("time_s", "<f8"),
    ]
)
_ROW = slice(_HEAD.fields["version"][1], None)  # type: ignore[index] # where a request's row begins
ID = slice(28, 44)  # the template id in a request
assert _HEAD.itemsize == ALONE_BYTES and _HEAD.fields["id"][1] == ID.start  # type: ignore[index] # noqa: S101, PT018


class Asker(Protocol):
    """The client that sent a request and waits for its answer."""

    def accept(self, body: bytes) -> None:
        """Answer 200 with a JSON body."""
        ...

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Answer with a status, a body (a problem document unless 200) and headers."""
        ...

    def refuse(self, error: Exception) -> None:
        """Answer with a problem document: the Refusal, or 500 for any other error."""
        ...


class Usual(msgspec.Struct, frozen=True, gc=False):
    """One request as received; ``started_s`` is by the monotonic clock."""

    known: KnownTemplate
    principal: Principal
    body: bytes
    started_s: float
    asker: Asker


def read(
    requests: Sequence[Usual], fleet: Fleet, wall_s: float
) -> tuple[list[tuple[Sequence[Usual], Batch]], list[Usual]]:
    """Return requests as batches, one per layout and each with the requests of its rows, and those to be taken alone.

    ``wall_s`` is the server's clock minus the monotonic one. If a node has several requests, only the first is in
    a batch.
    """
    by_layout: dict[Any, list[Usual]] = {}
    nodes: set[str] = set()
    odd: list[Usual] = []
    for request in requests:
        known = request.known
        if known.node in nodes or not known.durable:
            odd.append(request)
            continue
        nodes.add(known.node)
        by_layout.setdefault(known.resolved.layout, []).append(request)
    found = [_columns(together, fleet, wall_s, odd) for together in by_layout.values()]
    return [one for one in found if one is not None], odd


def _columns(
    requests: Sequence[Usual], fleet: Fleet, wall_s: float, odd: list[Usual]
) -> tuple[Sequence[Usual], Batch] | None:
    matrix = np.frombuffer(b"".join([one.body for one in requests]), np.uint8).reshape(len(requests), -1)
    heads = np.ascontiguousarray(matrix[:, : _HEAD.itemsize]).view(_HEAD)[:, 0]
    sent_s, time_s = heads["sent_s"], heads["time_s"]
    usual = (
        (heads["magic"] == MAGIC)
        & (heads["templates"] == 0)
        & (heads["rows"] == 1)
        & (heads["size"] == matrix.shape[1] - _ROW.start)
        & (heads["version"] == VERSION)
        & (heads["tail"] == 0)
        & (heads["sequence"] > 0)
        & (heads["sequence"] < SEQUENCE_MAX)
        & (time_s > 0.0)
        & (time_s <= sent_s)  # anything else needs the full check for late or implausible times
        & (sent_s - time_s <= LATE_S)
        & (sent_s < TIME_S_MAX)
    )
    received_s = [one.started_s + wall_s for one in requests]
    usual &= [
        ok and fleet.holds_name(one.known.node, one.known.boot_id, at_s, one.known.interval_s)
        for ok, one, at_s in zip(usual.tolist(), requests, received_s, strict=True)
    ]
    if not usual.all():
        odd += [requests[at] for at in np.flatnonzero(~usual).tolist()]
        chosen = np.flatnonzero(usual)
        if not len(chosen):
            return None
        requests = [requests[at] for at in chosen.tolist()]
        received_s = [received_s[at] for at in chosen.tolist()]
        matrix, sent_s, time_s, heads = matrix[chosen], sent_s[chosen], time_s[chosen], heads[chosen]
    knowns = [one.known for one in requests]
    nodes, bases_s = [known.node for known in knowns], [known.clock_base_s for known in knowns]
    offset_s = np.array(fleet.offsets_s(nodes, sent_s.tolist(), received_s, bases_s))
    batch = Batch(
        [known.resolved.ref for known in knowns],
        heads["sequence"].astype(np.int64),
        time_s,
        np.array(received_s),
        offset_s,
        matrix[:, _ROW],
        resolved=[known.resolved for known in knowns],
    )
    return requests, batch
