"""Who asks (/api/v1/me), signing in and out, and a host's own token for the fleet's join token (/api/v1/enrol)."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Protocol

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec.structs import replace

from eagle_eye.schema.names import NAME_CHARS_MAX, RULE, is_name
from eagle_eye.server.api import views
from eagle_eye.server.api.requests import NAME, Body, Somebody, answer, audited, body_of, decoded, services
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.clock import Clock, rfc3339
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import AuditEntry, EndedSessions
from eagle_eye.server.security.auth import Tokens, mint
from eagle_eye.server.security.people import USER, People, Person, refuse_foreign
from eagle_eye.server.store.store import TOKENS, Change, Store
from eagle_eye.server.telemetry.counters import Telemetry

if TYPE_CHECKING:
    from eagle_eye.server.security.provider import Provider


CALLBACK = "/api/v1/sign-in/callback"
# Paths whose answers do not prove that anybody is known here.
OPEN = frozenset({"/api/v1/sign-in", "/api/v1/sign-in/start", "/api/v1/sign-out"})
_UP = "../../.."  # from the callback to the page, wherever a proxy puts both

router = APIRouter(prefix="/api/v1", tags=["sign-in"])


class SignInNeeds(Protocol):
    """The server's components that signing in and out uses."""

    clock: Clock
    config: ServerConfig
    people: People
    provider: Provider | None
    store: Store
    telemetry: Telemetry
    tokens: Tokens


SignInParts = Annotated[SignInNeeds, Depends(services)]


@router.get("/me")
def get_me(principal: Somebody) -> Response:
    """Who the server takes you for, and the scope that you have; ``person`` is "" for tokens.

    ``session_ends`` is null unless you signed in here. ``owners_only``: you see the jobs alone that you or one of your
    groups own.
    """
    ends_s = principal.session_ends_s
    return answer(
        {
            "who": principal.who,
            "person": principal.person,
            "scope": principal.scope,
            "groups": sorted(principal.groups),
            "owners_only": principal.owners_only,
            "session_ends": None if ends_s is None else rfc3339(ends_s),
        }
    )


class EndedPerson(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose sessions end; None: those of whoever asks."""

    person: str | None = None


@router.post("/sessions/end", openapi_extra=body_of(EndedPerson, {"person": NAME}, required=False))
def end_sessions(parts: SignInParts, principal: Somebody, body: Body) -> Response:
    """End all sessions of a person, in every browser: your own, or anybody's with scope admin.

    The person can sign in again; to keep somebody out, take them out of the groups at the provider first.
    """
    if not principal.person:
        parts.tokens.authorise(principal, "admin")
    provider = _provider(parts)
    person = decoded(body, EndedPerson).person
    if person is None:
        person = principal.person
    if not is_name(person):
        raise Refusal(400, "person", f'say whose sessions end, {{"person": "ada"}}: {RULE}; got {person[:80]!a}')
    if person != principal.person:
        parts.tokens.authorise(principal, "admin")
    ended = EndedSessions(person=person, ended_s=parts.clock.now_s(), by=principal.who)
    entry = audited(parts, principal, "end sessions", USER + person)
    parts.store.commit(Change(ended_sessions=(ended,), audit=(entry,)))
    response = answer(views.plain(ended))
    if person == principal.person:
        response.headers["Set-Cookie"] = provider.session.gone()
    return response


@router.get("/sign-in", include_in_schema=False)
def ways(parts: SignInParts) -> Response:
    """Tell the page whether people can sign in here."""
    return answer({"provider": parts.provider is not None})


@router.get("/sign-in/start", include_in_schema=False)
async def start(request: Request, parts: SignInParts) -> Response:
    """Send the browser to the provider."""
    try:
        url, cookie = await _provider(parts).begin()
    except Refusal as refusal:
        return _refused(request, parts, refusal, {})
    return _redirect(url, cookie)


@router.get("/sign-in/callback", include_in_schema=False)
async def callback(request: Request, parts: SignInParts) -> Response:
    """Begin the session of whom the provider sent back."""
    provider = _provider(parts)
    used = {"Set-Cookie": provider.begun.gone()}  # each sign-in that was begun ends once
    try:
        session = await provider.finish(request.query_params, request.headers.get("cookie", ""))
        principal = parts.people.principal(Person(session.name, frozenset(session.groups)))
        cookie = provider.session.header(session)
    except Refusal as refusal:
        return _refused(request, parts, refusal, used)
    entry = AuditEntry(
        time_s=parts.clock.now_s(),
        who=principal.who,
        verb="sign in",
        subject=principal.who,
        detail=f"scope {principal.scope} until {rfc3339(session.ends_s)}",
    )
    await asyncio.to_thread(parts.store.commit, Change(audit=(entry,)))
    response = _redirect(f"{parts.config.public_url}/", cookie)
    response.headers.append("Set-Cookie", used["Set-Cookie"])
    return response


@router.post("/sign-out", include_in_schema=False)
def sign_out(request: Request, parts: SignInParts) -> Response:
    """Delete the session's cookie."""
    refuse_foreign(request.method, request.headers)
    return Response(None, 204, {"Set-Cookie": _provider(parts).session.gone()})


def _provider(parts: SignInNeeds) -> Provider:
    if parts.provider is None:
        raise Refusal(404, "not_found", "people sign in elsewhere here: sign_in.provider.issuer is not set")
    return parts.provider


def _redirect(url: str, cookie: str) -> Response:
    return Response(None, 303, {"Location": url, "Set-Cookie": cookie, "Cache-Control": "no-store"})


def _refused(request: Request, parts: SignInNeeds, refusal: Refusal, headers: Mapping[str, str]) -> Response:
    """Return the refusal as a page for a person, if a browser asks; raise it for programs."""
    if "text/html" not in request.headers.get("accept", ""):
        raise Refusal(refusal.status, refusal.reason, refusal.detail, {**refusal.headers, **headers})
    parts.telemetry.refused.labels(refusal.reason).inc()
    document = _PAGE.format(up=_UP, detail=html.escape(refusal.detail[:1].upper() + refusal.detail[1:]))
    shown = {**headers, "Cache-Control": "no-store"}
    return Response(document, refusal.status, shown, media_type="text/html")


_PAGE = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <title>Not signed in · Eagle Eye</title>
    <link rel="icon" href="{up}/icon.svg" type="image/svg+xml">
    <link rel="stylesheet" href="{up}/style/tokens.css">
    <link rel="stylesheet" href="{up}/style/base.css">
    <link rel="stylesheet" href="{up}/style/shell.css">
  </head>
  <body>
    <main>
      <h1>Not signed in</h1>
      <p>{detail}.</p>
      <p><a href="{up}/">Back to Eagle Eye</a></p>
    </main>
  </body>
</html>
"""


# The fleet's join token in exchange for a token of the host's own.

enrolment_router = APIRouter(prefix="/api/v1/enrol", tags=["tokens"])


class EnrolmentNeeds(Protocol):
    """The server's components that enrolment uses."""

    clock: Clock
    config: ServerConfig
    fleet: Fleet
    store: Store
    tokens: Tokens


EnrolmentParts = Annotated[EnrolmentNeeds, Depends(services)]


class Enrolment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``node`` is the name under which the agent will send frames."""

    node: str


@enrolment_router.post("", status_code=201, openapi_extra=body_of(Enrolment, {"node": NAME}))
async def enrol(parts: EnrolmentParts, principal: Somebody, body: Body) -> Response:
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
