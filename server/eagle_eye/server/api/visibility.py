"""Who sees which jobs, where the site shows people their own alone: the one place that decides it.

An endpoint that is not in ``SHOWN`` is refused to such people, so that a new one shows nobody anything by oversight.
What is answered to them is looked through once more on its way out, whichever endpoint it comes from.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.event_filters import fits
from eagle_eye.server.model.records import Action, EvidenceRequest, Incident, Job
from eagle_eye.server.security.auth import Principal
from eagle_eye.server.store.store import ACTIONS, EVIDENCE, INCIDENTS, JOBS, Kind, Store
from eagle_eye.server.transport.raw_http import ASGIMessage, Send

ANOTHER = "another job"
SIGHT = "sight"  # in an ASGI scope's state
CHANGES_MAX = 500  # read at a time
_STREAMED = frozenset({"incident", "action", "job", "node"})  # kinds of events
_NAMING = re.compile(r"(.*_)?jobs?")  # fields that hold names; elsewhere they stand in sentences


class Shown(NamedTuple):
    """How an endpoint is shown: ``record`` is the path's parameter that names a record of ``kind``, "" for none.

    ``needs_job``: only with a job as a parameter.
    """

    kind: Kind[Any] | None = None
    record: str = ""
    needs_job: bool = False


_ALL = Shown()
SHOWN: Mapping[str, Shown] = MappingProxyType(
    {
        "/api/v1/leader": _ALL,
        "/api/v1/fleet": _ALL,
        "/api/v1/fleet/nodes": _ALL,
        "/api/v1/nodes": _ALL,
        "/api/v1/nodes/{node}": _ALL,
        "/api/v1/nodes/{node}/history": _ALL,
        "/api/v1/nodes/{node}/checks": _ALL,
        "/api/v1/node-checks/{check}": _ALL,
        "/api/v1/gpus": _ALL,
        "/api/v1/gpus/{gpu_uuid}": _ALL,
        "/api/v1/ledger": _ALL,
        "/api/v1/silences": _ALL,
        "/api/v1/silences/{silence}": _ALL,
        "/api/v1/events": _ALL,
        "/api/v1/jobs": _ALL,
        "/api/v1/incidents": _ALL,
        "/api/v1/actions": _ALL,
        "/api/v1/evidence": _ALL,
        "/api/v1/query_range": Shown(needs_job=True),
        "/api/v1/goodput": Shown(needs_job=True),
        "/api/v1/jobs/{job}": Shown(JOBS, "job"),
        "/api/v1/jobs/{job}/course": Shown(JOBS, "job"),
        "/api/v1/jobs/{job}/timeline": Shown(JOBS, "job"),
        "/api/v1/incidents/{incident}": Shown(INCIDENTS, "incident"),
        "/api/v1/incidents/{incident}/policy": Shown(INCIDENTS, "incident"),
        "/api/v1/incidents/{incident}/picture": Shown(INCIDENTS, "incident"),
        "/api/v1/incidents/{incident}/dossier": Shown(INCIDENTS, "incident"),
        "/api/v1/actions/{action}": Shown(ACTIONS, "action"),
        "/api/v1/actions/{action}/preview": Shown(ACTIONS, "action"),
        "/api/v1/evidence/{evidence}": Shown(EVIDENCE, "evidence"),
        "/api/v1/evidence/{evidence}/bundle": Shown(EVIDENCE, "evidence"),
        "/api/v1/jobs/{job}/recording": Shown(JOBS, "job"),
    }
)
# Why an endpoint is not in SHOWN, for people who ask; of the others: it is of all jobs.
_OF_ALL = "this is of all jobs"
WITHHELD: Mapping[str, str] = MappingProxyType(
    {
        "/metrics": "this has the series of all jobs; those of one are at /api/v1/query_range?job=NAME",
        "/api/v1/ledger/steps": "trust in a step is counted over the decisions of all jobs",
        "/api/v1/tickets": "repair tickets are of nodes, and may say anything of anybody",
        "/api/v1/audit": "the audit trail is of everybody",
    }
)


class JobOwners:
    """The owner of every known job, "" where nobody says; kept up by the records' changes. From any thread."""

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self._store = store
        self._fleet = fleet
        self._lock = threading.Lock()
        self._owners: dict[str, str] = {}
        self._seen: int | None = None

    def owners(self) -> dict[str, str]:
        """Return the owners by job."""
        with self._lock:
            oldest, newest = self._store.change_range()
            if self._seen is None or not oldest - 1 <= self._seen <= newest:
                self._owners = {job.job: job.owner for job in self._store.all(JOBS)}
                self._seen = newest
            while self._seen < newest and (changes := self._store.changes_since(self._seen, CHANGES_MAX)):
                for change in changes:
                    if change.kind == JOBS.name and (job := self._store.get(JOBS, change.key)) is not None:
                        self._owners[job.job] = job.owner
                self._seen = changes[-1].sequence
            return {**dict.fromkeys(self._fleet.jobs(), ""), **self._owners}


class Sight:
    """What one person sees: the jobs that they or one of their groups own, and all that is of no job."""

    def __init__(self, principal: Principal, job_owners: JobOwners) -> None:
        self._principal = principal
        self._job_owners = job_owners
        owners, mine = job_owners.owners(), principal.groups | {principal.person}
        self._seen = frozenset(job for job, owner in owners.items() if owner and owner in mine)
        self._hidden = sorted(owners.keys() - self._seen, key=len, reverse=True)

    def sees(self, job: str) -> bool:
        """Return whether the job is shown; "" is none."""
        return not job or job in self._seen

    def seen_of(self, patterns: Sequence[str]) -> list[str]:
        """Return the jobs that are shown and are one of the globs' or names'."""
        return sorted(job for job in self._seen if fits(patterns, job))

    def body(self, content: bytes) -> bytes:
        """Return an answer in JSON without other people's jobs."""
        named = [job for job in self._hidden if msgspec.json.encode(job)[1:-1] in content]
        words = re.compile("|".join(rf"(?<![\w.-]){re.escape(job)}(?![\w.-])" for job in named)) if named else None
        return msgspec.json.encode(self._shown(msgspec.json.decode(content), words, ""))

    def now(self) -> Sight:
        """Return what the person sees by now: a stream of events outlives its jobs."""
        return Sight(self._principal, self._job_owners)

    def message(self, chunk: bytes) -> bytes:
        """Return one of the server-sent events; a comment in place of one of another's job."""
        fields = dict(line.split(b": ", 1) for line in chunk.strip().split(b"\n") if b": " in line)
        kind = fields.get(b"event", b"").decode()
        if not kind or kind == "reset":
            return chunk
        shown = kind in _STREAMED and self._is_shown(msgspec.json.decode(fields[b"data"]))
        if not shown:
            return b": of another job\nid: %b\n\n" % fields[b"id"]
        return b"id: %b\nevent: %b\ndata: %b\n\n" % (fields[b"id"], fields[b"event"], self.body(fields[b"data"]))

    def _is_shown(self, value: Any) -> bool:
        job = value.get("job") if isinstance(value, dict) else None
        return self.sees(job) if isinstance(job, str) else True

    def _shown(self, value: Any, words: re.Pattern[str] | None, field: str) -> Any:
        if isinstance(value, dict):
            return {
                self._text(key, words, ""): self._shown(
                    None if key == "job" and isinstance(item, str) and not self.sees(item) else item, words, key
                )
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._shown(item, words, field) for item in value if self._is_shown(item)]
        return self._text(value, words, field) if isinstance(value, str) else value

    def _text(self, text: str, words: re.Pattern[str] | None, field: str) -> str:
        """Return the text without names of others' jobs: as a name, or in a sentence. A job may be called "running"."""
        if _NAMING.fullmatch(field) and not self.sees(text):
            return ANOTHER
        return text if words is None or " " not in text else words.sub(ANOTHER, text)


def admitted(
    principal: Principal, path: str, asked: Mapping[str, str], sight: Sight, store: Store, operators: Sequence[str]
) -> Kind[Any] | None:
    """Return None if the endpoint may answer, or the kind of which nothing is called so, as far as the person sees.

    ``path`` is the route's template, ``asked`` the parameters of path and query, ``operators`` the groups that see all.
    Raises Refusal 403.
    """
    plain = re.sub(r"\{(\w+):\w+\}", r"{\1}", path)
    shown = SHOWN.get(plain)
    if shown is None:
        raise refused(principal, WITHHELD.get(plain, _OF_ALL), operators)
    if shown.needs_job and not asked.get("job"):
        raise refused(principal, "this is of all jobs, unless you name one of yours with ?job=NAME", operators)
    if shown.needs_job:
        return None if sight.sees(asked["job"]) else JOBS
    if shown.kind is None:
        return None
    record: Job | Incident | Action | EvidenceRequest | None = store.get(shown.kind, asked[shown.record])
    return None if record is not None and sight.sees(record.job) else shown.kind


def refused(principal: Principal, why: str, operators: Sequence[str]) -> Refusal:
    """Return the refusal of what is not for people who see their own jobs alone: why, and whom to ask."""
    name = principal.person
    groups = " or ".join(operators)
    whom = f"ask somebody in {groups} (sign_in.operate_groups)" if groups else "ask whoever runs this server"
    detail = f"{name} sees the jobs of {name} and their groups alone (sign_in.jobs_visible), and {why}; {whom}"
    return Refusal(403, "owners_only", detail)


def looked_through(send: Send, state: Mapping[str, Any]) -> Send:
    """Return a ``send`` that takes others' jobs out of what is answered to somebody who may not see them."""
    held: list[bytes] = []
    start: ASGIMessage = {}
    kind = b""

    async def shown(message: ASGIMessage) -> None:
        nonlocal start, kind
        sight: Sight | None = state.get(SIGHT)
        if sight is None:
            await send(message)
            return
        if message["type"] == "http.response.start":
            start = message
            kind = dict(message["headers"]).get(b"content-type", b"").partition(b";")[0]
            if kind != b"application/json":
                await send(message)
        elif kind == b"text/event-stream" and message.get("body"):
            await send({**message, "body": (await asyncio.to_thread(sight.now)).message(message["body"])})
        elif kind != b"application/json":
            await send(message)
        else:
            held.append(message.get("body", b""))
            if not message.get("more_body", False):
                content = sight.body(b"".join(held))
                others = [one for one in start["headers"] if one[0] != b"content-length"]
                length = (b"content-length", str(len(content)).encode())
                await send({**start, "headers": [*others, length]})
                await send({"type": "http.response.body", "body": content})

    return shown
