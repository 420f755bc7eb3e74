"""What takes frames, put together. Wiring only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from eagle_eye.schema.frame import Frame
from eagle_eye.server.ingest import Ingest
from eagle_eye.server.outlines import Outlines
from eagle_eye.server.rows_ingest import RowsIngest
from eagle_eye.server.rows_request import RowsReader
from eagle_eye.server.services import Services
from eagle_eye.server.unknown_things import UnknownThings


def build(
    services: Services,
    outlines: Outlines,
    found: Callable[[list[str]], Awaitable[None]],
    asked_of: Callable[[str], list[dict[str, Any]]],
    asks_anybody: Callable[[], bool],
) -> Ingest:
    """Return the endpoint; ``found(nodes)`` writes down nodes that were never heard of."""
    unknown = UnknownThings(services.telemetry)

    def observe(frame: Frame, received_s: float, offset_s: float) -> None:
        services.watcher.observe(frame, received_s, offset_s)
        if frame.events:
            services.bookkeeper.note(frame.node, frame.events)

    reader = RowsReader(outlines, unknown, services.config.ingest.body_bytes_max, services.clock)
    rows = RowsIngest(
        services.config.ingest,
        services.history,
        services.fleet,
        services.tokens,
        services.telemetry,
        services.clock,
        observe,
        services.watcher.observe_rows,
        found,
        asked_of,
        asks_anybody,
        reader,
    )

    async def found_one(node: str) -> None:
        await found([node])

    return Ingest(
        services.config.ingest,
        services.history,
        services.fleet,
        services.tokens,
        services.telemetry,
        services.clock,
        observe,
        found_one,
        asked_of,
        services.limits.check_frames,
        rows=rows,
        inflated=reader.inflated,
        unknown=unknown,
    )
