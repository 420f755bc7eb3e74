"""GET /api/v1/events: changes as server-sent events; resumable."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import StreamingResponse

from eagle_eye.server.api import views
from eagle_eye.server.api.requests import OpenStreams, Reader, services
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal, StoreUnavailable
from eagle_eye.server.monitor.cells import Cells
from eagle_eye.server.monitor.watcher import Outlook
from eagle_eye.server.security.people import People
from eagle_eye.server.store.changes import Signal, wait
from eagle_eye.server.store.store import (
    ACTIONS,
    DELIVERIES,
    EVENTS,
    INCIDENTS,
    JOBS,
    NODES,
    SILENCES,
    SUBSCRIPTIONS,
    Changed,
    Store,
)
from eagle_eye.server.telemetry.counters import Telemetry

KEEPALIVE_S = 15.0
BATCH = 500

router = APIRouter(prefix="/api/v1", tags=["events"])


class Needs(Protocol):
    """The server's components that this module uses."""

    cells: Cells | None
    clock: Clock
    config: ServerConfig
    fleet: Fleet
    open_streams: OpenStreams
    outlook: Outlook
    people: People
    signal: Signal
    stopping: threading.Event
    store: Store
    telemetry: Telemetry


Parts = Annotated[Needs, Depends(services)]


@router.get("/events")
async def events(
    request: Request,
    parts: Parts,
    _: Reader,
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> Response:
    """Changes of incidents, actions, jobs, nodes, deliveries, subscriptions and silences, and events that went out.

    ``event`` is the kind, ``data`` the record as the API shows it. With Last-Event-ID the stream goes on after it;
    ``event: reset`` says that it is too old and that everything should be read anew. Without it, it starts now,
    and first says, with an id alone, where that is.
    """
    streams = parts.telemetry.streams
    if parts.open_streams.count >= parts.config.streams_max:
        raise Refusal(
            503,
            "busy",
            f"{parts.config.streams_max} readers are connected, which is the most (streams_max)",
            {"Retry-After": "10"},
        )
    oldest, newest = await asyncio.to_thread(parts.store.change_range)
    position, reset = newest, False
    if last_event_id is not None:
        if not last_event_id.isascii() or not last_event_id.isdigit():
            raise Refusal(400, "cursor", f"Last-Event-ID {last_event_id!r} is none of this stream's ids")
        position = int(last_event_id)
        # An id above the newest one comes from another server's file.
        reset = position + 1 < oldest or position > newest
        position = newest if reset else position

    def identify() -> None:
        parts.people.authenticate(request.method, request.scope["headers"], request.scope["state"])

    async def body() -> AsyncIterator[bytes]:
        woken = parts.signal.waiter()
        parts.open_streams.count += 1
        streams.set(parts.open_streams.count)
        try:
            yield _message("reset", position, {}) if reset else b": hello\nid: %d\n\n" % position
            async for chunk in _follow(parts, position, woken, identify):
                yield chunk
        finally:
            parts.signal.forget(woken)
            parts.open_streams.count -= 1
            streams.set(parts.open_streams.count)

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _follow(
    parts: Needs, position: int, woken: asyncio.Event, identify: Callable[[], None]
) -> AsyncIterator[bytes]:
    """Yield changes until the server stops, or ``identify`` raises Refusal: a token is revoked, a session ended."""
    asked_s = parts.clock.monotonic_s()
    while not parts.stopping.is_set():
        try:
            if parts.clock.monotonic_s() - asked_s >= KEEPALIVE_S:
                await asyncio.to_thread(identify)
                asked_s = parts.clock.monotonic_s()
            changes = await asyncio.to_thread(parts.store.changes_since, position, BATCH)
            messages = await asyncio.to_thread(_messages, parts, changes)
        except (StoreUnavailable, Refusal):
            # The reader reconnects with its Last-Event-ID and misses nothing, or is told why it may no longer read.
            return
        for message in messages:
            yield message
        if changes:
            position = changes[-1].sequence
            continue
        if not await wait(woken, KEEPALIVE_S):
            yield b": still here\n\n"


def _messages(parts: Needs, changes: list[Changed]) -> list[bytes]:
    # Of several changes of one record only the last is sent: each message shows the record's current state.
    last = {(change.kind, change.key): change.sequence for change in changes}
    found = []
    for change in changes:
        if last[change.kind, change.key] == change.sequence:
            shown = _shown(parts, change)
            if shown is not None:
                found.append(_message(shown[0], change.sequence, shown[1]))
    return found


def _shown(parts: Needs, change: Changed) -> tuple[str, dict[str, Any]] | None:
    """Return the kind's singular and the record, or None when it is no longer kept."""
    store, url, now_s = parts.store, parts.config.public_url, parts.clock.now_s()
    offsets = parts.fleet.offsets() if change.kind == NODES.name else {}
    record: Any
    match change.kind:
        case INCIDENTS.name:
            record = store.get(INCIDENTS, change.key)
            return None if record is None else ("incident", _of_cell(parts, views.incident(record)))
        case ACTIONS.name:
            record = store.get(ACTIONS, change.key)
            return None if record is None else ("action", _of_cell(parts, views.action(record, url)))
        case JOBS.name:
            record = store.get(JOBS, change.key)
            return None if record is None else ("job", _of_cell(parts, views.job(record, parts.outlook)))
        case NODES.name:
            record = store.get(NODES, change.key)
            return None if record is None else ("node", views.node(record, parts.fleet, offsets, now_s))
        case DELIVERIES.name:
            record = store.get(DELIVERIES, change.key)
            return None if record is None else ("delivery", views.delivery(record))
        case SUBSCRIPTIONS.name:
            record = store.get(SUBSCRIPTIONS, change.key)
            return None if record is None else ("subscription", views.subscription(record))
        case SILENCES.name:
            record = store.get(SILENCES, change.key)
            return None if record is None else ("silence", views.silence(record, store.open_incidents(), now_s))
        case EVENTS.name:
            record = store.get(EVENTS, change.key)
            return None if record is None else ("event", views.event(record, url))
    return None


def _of_cell(parts: Needs, shown: dict[str, Any]) -> dict[str, Any]:
    """Return the record with the cell that judges its job, where there are several, as in answers."""
    if parts.cells is None or not parts.cells.several:
        return shown
    return {**shown, "cell": parts.cells.cell_of(shown["job"])}


def _message(kind: str, sequence: int, data: dict[str, Any]) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (sequence, kind.encode(), msgspec.json.encode(data))
