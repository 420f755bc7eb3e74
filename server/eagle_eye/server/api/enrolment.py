"""/api/v1/enrol: exchanges the fleet's join token for a token of the host's own."""

from __future__ import annotations

import asyncio
from typing import Annotated, Protocol

import msgspec
from fastapi import APIRouter, Depends, Response
from msgspec.structs import replace

from eagle_eye.schema.names import NAME_CHARS_MAX, is_name
from eagle_eye.server.api.constraints import NAME
from eagle_eye.server.api.requests import Body, Somebody, answer, audited, body_of, decoded, services
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.security.auth import Tokens, mint
from eagle_eye.server.store.store import TOKENS, Change, Store

router = APIRouter(prefix="/api/v1/enrol", tags=["tokens"])


class Needs(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    config: ServerConfig
    fleet: Fleet
    store: Store
    tokens: Tokens


Parts = Annotated[Needs, Depends(services)]


class Enrolment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``node`` is the name under which the agent will send frames."""

    node: str


@router.post("", status_code=201, openapi_extra=body_of(Enrolment, {"node": NAME}))
async def enrol(parts: Parts, principal: Somebody, body: Body) -> Response:
    """Make the node's token; the answer holds its text, this once. Asks for a token of scope join, or admin.

    A node that has a token already is refused (409 ``enrolled``), so that whoever finds the join token cannot speak
    for it, unless the join token was made to replace; so is another spelling of the name of a node with an agent.
    """
    node = decoded(body, Enrolment).node
    if not is_name(node):
        raise Refusal(400, "name", f"{node[:80]!r} is no name: 1 to {NAME_CHARS_MAX} printable characters")
    join = parts.tokens.authorise_enrolment(principal, node)
    parts.config.ingest.check_name(node)
    parts.fleet.check_room(node)
    if (other := parts.fleet.other_spelling(node)) is not None:
        raise Refusal(
            409,
            "enrolled",
            f"an agent reports this machine as {other!r}, which names the same node as {node!r}; enrol it with --node"
            f" {other}, or have the server forget that name (eagle-eye nodes forget {other})",
        )
    now_s = parts.clock.now_s()
    text, token = mint("agent", node, now_s, None)

    def enrolled(store: Store) -> Change:
        old = [t for t in store.page(TOKENS, {"node": node}).items if not t.revoked]
        current = [t for t in old if t.expires_s is None or t.expires_s > now_s]
        if current and join is not None and not join.replaces:
            raise Refusal(
                409,
                "enrolled",
                f"node {node!r} has token {current[0].id}; revoke it, or make a join token with --replaces",
            )
        revoked = tuple(replace(t, revoked=True) for t in old)
        detail = f"revokes {', '.join(t.id for t in revoked)}" if revoked else ""
        return Change(tokens=(*revoked, token), audit=(audited(parts, principal, "enrol", node, detail),))

    await asyncio.to_thread(parts.store.update, enrolled)
    return answer({"id": token.id, "node": node, "token": text}, 201)
