"""/api/v1/silences: for a time people get no news of some incidents. What is done about them goes on."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Any, Protocol

import msgspec
from fastapi import APIRouter, Depends, Query, Response

from eagle_eye.schema.names import NAME_CHARS_MAX, did_you_mean
from eagle_eye.server.api import views
from eagle_eye.server.api.filter_values import FAULT_NAMES
from eagle_eye.server.api.requests import (
    Body,
    Cursor,
    Limit,
    Operator,
    Seen,
    answer,
    audited,
    body_of,
    decoded,
    found,
    list_of,
    missing,
    services,
)
from eagle_eye.server.api.visibility import Sight
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery.outbox import ACTIVE_MAX, silences_in_force
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.event_filters import fits
from eagle_eye.server.model.records import NewsSilence, SilenceState
from eagle_eye.server.store.store import SILENCES, Change, Store

PATTERNS_MAX = 100  # of faults, jobs or nodes
REASON_CHARS_MAX = 1_000
SECONDS_MIN, SECONDS_MAX = 60.0, 30 * 86_400.0
_SCOPES = ("faults", "jobs", "nodes")
_GLOBS = list_of({"minLength": 1, "maxLength": NAME_CHARS_MAX}, PATTERNS_MAX)
_SILENCING = MappingProxyType(
    {
        "faults": list_of({"enum": [*FAULT_NAMES]}, PATTERNS_MAX),
        "jobs": _GLOBS,
        "nodes": _GLOBS,
        "seconds": {"minimum": SECONDS_MIN, "maximum": SECONDS_MAX},
        "reason": {"minLength": 1, "maxLength": REASON_CHARS_MAX, "pattern": r"\S"},
    }
)


class NewSilence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """It begins at once and lasts ``seconds``.

    ``faults`` are names, ``jobs`` and ``nodes`` names or globs; all must hold, empty means any, and one is needed.
    """

    seconds: float
    reason: str
    faults: list[str] = []
    jobs: list[str] = []
    nodes: list[str] = []


_BODY = body_of(NewSilence, _SILENCING)
_SCHEMA = _BODY["requestBody"]["content"]["application/json"]["schema"]
_SCHEMA["anyOf"] = [{"required": [name], "properties": {name: {"minItems": 1}}} for name in _SCOPES]

router = APIRouter(prefix="/api/v1/silences", tags=["silences"])


class SilenceNeeds(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    config: ServerConfig
    store: Store


Parts = Annotated[SilenceNeeds, Depends(services)]


@router.get("")
def list_silences(
    parts: Parts,
    sight: Seen,
    state: SilenceState | None = None,
    job: Annotated[str | None, Query(description="Only those that name this job.")] = None,
    node: Annotated[str | None, Query(description="Only those that name this node.")] = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Silences, newest first; ``incidents`` are those that one silences now. A page may hold fewer than its limit."""
    # On record one is active until what it withheld has been sent: some seconds longer than it silences.
    page = parts.store.page(SILENCES, {"state": "active"} if state == "active" else {}, cursor, limit)
    now_s = parts.clock.now_s()
    items = [
        one
        for one in page.items
        if (state is None or (state == "ended") is (one.until_s <= now_s))
        and (job is None or (one.jobs and fits(one.jobs, job)))
        and _is_shown(one, sight)
        and (node is None or (one.nodes and fits(one.nodes, node)))
    ]
    return answer({"items": _shown(parts, items, sight), "next": page.next})


@router.get("/{silence}")
def get_silence(parts: Parts, sight: Seen, silence: str) -> Response:
    """One silence."""
    one = found(parts, SILENCES, silence)
    if not _is_shown(one, sight):
        raise missing(SILENCES.name, silence)
    return answer(_shown(parts, [one], sight)[0])


@router.post("", status_code=201, openapi_extra=_BODY)
async def silence(parts: Parts, principal: Operator, body: Body) -> Response:
    """Silence the news of a fault, a job or a node. 409 when as many silences are in force as may be.

    Actions are asked for and carried out as before: to hold them, set a maintenance window in the policy.
    """
    wanted = decoded(body, NewSilence)
    _check(wanted, parts.config.history.records_retention_s)
    now_s = parts.clock.now_s()
    record = NewsSilence(
        id=f"sil-{secrets.token_hex(6)}",
        state="active",
        faults=wanted.faults,
        jobs=wanted.jobs,
        nodes=wanted.nodes,
        reason=wanted.reason.strip(),
        by=principal.who,
        created_s=now_s,
        until_s=now_s + wanted.seconds,
    )

    def made(store: Store) -> Change:
        if len(silences_in_force(store, now_s)) >= ACTIVE_MAX:
            raise Refusal(409, "limit", f"{ACTIVE_MAX} silences are in force, which is the most; end one first")
        detail = f"{_scope(record)} until {rfc3339(record.until_s)}: {record.reason}"
        return Change(silences=(record,), audit=(audited(parts, principal, "silence", record.id, detail),))

    await asyncio.to_thread(parts.store.update, made)
    return answer(_shown(parts, [record])[0], 201)


@router.post("/{silence}/end")
def end(parts: Parts, principal: Operator, silence: str) -> Response:
    """End the silence before its time. What it withheld and still goes on is sent within ten seconds."""

    def ended(store: Store) -> Change:
        old = store.get(SILENCES, silence)
        if old is None:
            raise missing("silences", silence)
        now_s = parts.clock.now_s()
        if old.until_s <= now_s:
            return Change()
        new = msgspec.structs.replace(old, until_s=now_s, ended_by=principal.who)
        return Change(silences=(new,), audit=(audited(parts, principal, "end silence", silence),))

    parts.store.update(ended)
    return answer(_shown(parts, [found(parts, SILENCES, silence)])[0])


def _is_shown(one: NewsSilence, sight: Sight | None) -> bool:
    """Return whether it is of no job in particular, or of one that the reader sees."""
    return sight is None or not one.jobs or bool(sight.seen_of(one.jobs))


def _shown(parts: SilenceNeeds, records: Sequence[NewsSilence], sight: Sight | None = None) -> list[dict[str, Any]]:
    now_s, open_incidents = parts.clock.now_s(), parts.store.open_incidents()
    if sight is not None:
        open_incidents = [one for one in open_incidents if sight.sees(one.job)]
        records = [msgspec.structs.replace(one, jobs=sight.seen_of(one.jobs)) for one in records]
    return [views.silence(one, open_incidents, now_s) for one in records]


def _patterns(one: NewSilence | NewsSilence) -> dict[str, list[str]]:
    return {name: getattr(one, name) for name in _SCOPES}


def _scope(record: NewsSilence) -> str:
    return "; ".join(f"{name} {', '.join(patterns)}" for name, patterns in _patterns(record).items() if patterns)


def _check(wanted: NewSilence, kept_s: float) -> None:
    """Raise Refusal 400, naming the field and what was expected, unless the silence can be made.

    ``kept_s`` is how long deliveries are kept: when it ends they tell what was withheld.
    """
    most_s = min(SECONDS_MAX, kept_s)
    if not SECONDS_MIN <= wanted.seconds <= most_s:
        why = " (history.records_retention_s)" if most_s < SECONDS_MAX else ""
        expected = f"expected {SECONDS_MIN:.0f} to {most_s:.0f}{why}"
        raise Refusal(400, "seconds", f"seconds is {wanted.seconds!r}; {expected}")
    if not 0 < len(wanted.reason.strip()) <= REASON_CHARS_MAX:
        raise Refusal(400, "reason", f"reason: expected 1 to {REASON_CHARS_MAX} characters, for whoever asks later")
    for name, patterns in _patterns(wanted).items():
        if len(patterns) > PATTERNS_MAX or any(not 0 < len(one) <= NAME_CHARS_MAX for one in patterns):
            raise Refusal(
                400, name, f"{name} may hold at most {PATTERNS_MAX} entries of 1 to {NAME_CHARS_MAX} characters"
            )
    if not any(_patterns(wanted).values()):
        raise Refusal(400, "scope", "nothing is named; give faults, jobs or nodes, or nodes ['*'] for every node")
    for fault in wanted.faults:
        if fault not in FAULT_NAMES:
            meant = did_you_mean(fault, FAULT_NAMES)
            raise Refusal(400, "faults", f"{fault[:80]!r} is no fault (docs/reference/faults.md has them){meant}")
