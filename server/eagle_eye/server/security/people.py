"""Authenticates API requests: by token, else as the person who signed in with the site's accounts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eagle_eye.server.model.clock import rfc3339
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import Scope
from eagle_eye.server.security.auth import SAFE_METHODS, TOKEN_PREFIX, Credentials, Principal, Tokens
from eagle_eye.server.security.proxy import Person, Proxy, RawHeaders
from eagle_eye.server.security.sessions import Cookie, Session
from eagle_eye.server.security.settings import SignInSettings
from eagle_eye.server.store.store import ENDED_SESSIONS, Store

USER = "user:"  # before a person's name in the audit trail: no person can be called like a token
EVERYBODY = "*"
# Browsers send a header of a page's own to its own server alone, so that no foreign page can use a person's sign-in.
REQUEST_HEADER = "Eagle-Eye-Request"


class People:
    """Who sends a request. A token decides if there is one; nobody else's headers then count."""

    def __init__(
        self,
        settings: SignInSettings,
        store: Store,
        tokens: Tokens,
        proxy: Proxy | None,
        session: Cookie[Session] | None = None,
    ) -> None:
        self.settings = settings
        self._store = store
        self._session = session
        self._tokens = tokens
        self._proxy = proxy

    def authenticate(self, method: str, headers: RawHeaders, state: Mapping[str, Any]) -> Principal:
        """Return the principal.

        Raises Refusal 401, or 403 for a person who may do nothing, or a foreign page; StoreUnavailable.
        """
        headers = list(headers)
        named = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
        credentials = Credentials.of(method, named, state)
        # A proxy may send an Authorization of its own, with the site's password or token.
        if TOKEN_PREFIX in credentials.authorization:
            self.forwardable(headers, state)  # an untrusted header beside a token is counted
            return self._tokens.authenticate(credentials)
        person = None if self._proxy is None else self._proxy.person(headers, state)
        ends_s = None
        if person is None and (session := self._signed_in(headers)) is not None:
            person, ends_s = Person(session.name, frozenset(session.groups)), session.ends_s
        if person is None:
            return self._tokens.authenticate(credentials)
        refuse_foreign(method, named)
        return self.principal(person, ends_s)

    def principal(self, person: Person, session_ends_s: float | None = None) -> Principal:
        """Return the principal with the highest scope that the person's groups have. Raises Refusal 403."""
        settings = self.settings
        granted: Iterable[tuple[Scope, tuple[str, ...]]] = (
            ("admin", settings.admin_groups),
            ("operate", settings.operate_groups),
            ("read", settings.read_groups),
        )
        for scope, groups in granted:
            if EVERYBODY in groups or not person.groups.isdisjoint(groups):
                return Principal(
                    USER + person.name,
                    scope,
                    person=person.name,
                    groups=person.groups,
                    session_ends_s=session_ends_s,
                    owners_only=scope == "read" and settings.jobs_visible == "owners",
                )
        detail = f"{person.name} is signed in but in none of the groups that have access (sign_in.read_groups)"
        raise Refusal(403, "no_group", detail)

    def forwardable(self, headers: RawHeaders, state: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
        """Return the headers to pass on to the server that leads, which cannot see who sent them to this one."""
        return list(headers) if self._proxy is None else self._proxy.trusted_only(headers, state)

    def _signed_in(self, headers: RawHeaders) -> Session | None:
        if self._session is None:
            return None
        cookies = "; ".join(value.decode("latin-1") for name, value in headers if name == b"cookie")
        session = self._session.read(cookies)
        if session is None:
            return None
        ended = self._store.get(ENDED_SESSIONS, session.name)
        if ended is not None and session.begun_s <= ended.ended_s:
            who = "you" if ended.by == USER + session.name else ended.by
            why = f"{who} ended the sessions of {session.name} at {rfc3339(ended.ended_s)}; sign in again"
            raise Refusal(401, "session", why)
        return session


def refuse_foreign(method: str, headers: Mapping[str, str]) -> None:
    """Raise Refusal 403 for a change that a page of another origin may have had a person's browser send."""
    if method not in SAFE_METHODS and REQUEST_HEADER.lower() not in headers:
        why = f"a person's change needs the header {REQUEST_HEADER}: 1, which no foreign page can send"
        raise Refusal(403, "foreign_page", why)
