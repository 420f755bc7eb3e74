"""/api/v1/audit: the audit trail of changes by people, subscribers and the server itself."""

from __future__ import annotations

from typing import Annotated, Protocol

from fastapi import APIRouter, Depends, Query, Response

from eagle_eye.server.api import views
from eagle_eye.server.api.requests import Admin, Cursor, Limit, Since, listing, moment_s, services
from eagle_eye.server.store.store import Store

router = APIRouter(prefix="/api/v1/audit", tags=["audit"])

NAME_CHARS_MAX = 1_000


class Needs(Protocol):
    """The server's components that this module uses."""

    store: Store


Parts = Annotated[Needs, Depends(services)]


@router.get("")
def list_entries(
    parts: Parts,
    _: Admin,
    subject: Annotated[str | None, Query(max_length=NAME_CHARS_MAX, description="What was changed: an id.")] = None,
    who: Annotated[
        str | None,
        Query(max_length=NAME_CHARS_MAX, description="A token's id, user:NAME, local, server or configuration."),
    ] = None,
    verb: Annotated[str | None, Query(max_length=NAME_CHARS_MAX, description="What was done.")] = None,
    since: Since = None,
    cursor: Cursor = None,
    limit: Limit = 100,
) -> Response:
    """Who changed what, newest first. Nothing is ever taken out of it."""
    page = parts.store.audit(cursor, limit, subject, who, verb, None if since is None else moment_s("since", since))
    return listing(page, views.audit)
