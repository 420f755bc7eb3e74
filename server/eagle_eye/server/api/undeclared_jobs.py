"""Jobs that no launcher or scheduler declares: those of which agents speak, and those of which they spoke."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from eagle_eye.schema.action import MemberRank
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.account_records import Attempt
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.records import Job
from eagle_eye.server.model.timestamps import rfc3339
from eagle_eye.server.monitor.watcher import JobProgress, Outlook
from eagle_eye.server.store.store import ATTEMPTS, JOBS, MEMBERSHIPS, PAGE_LIMIT_MAX, Store

OBSERVED = "observed"  # agents report the job
ENDED = "ended"  # none does any more: whether it finished or failed, nobody said
AGENTS = "agents"  # the source of such a job
ENDED_MAX = 200  # listed, the newest; each stays for as long as the accounts keep its attempt


class Needs(Protocol):
    """The server's components that this module uses."""

    clock: Clock
    fleet: Fleet
    outlook: Outlook
    store: Store


def observed(parts: Needs) -> list[Job]:
    """Return the jobs of which agents speak, by name."""
    now_s = parts.clock.now_s()
    return [
        _job(name, attempt, OBSERVED, now_s, ranks=sorted(ranks, key=lambda rank: rank.rank))
        for name, (attempt, ranks) in sorted(parts.fleet.jobs().items())
        if parts.store.get(JOBS, name) is None
    ]


def ended(parts: Needs) -> list[Job]:
    """Return the newest jobs of which agents spoke and speak no more, the last that began first."""
    newest: dict[str, Attempt] = {}
    for attempt in parts.store.page(ATTEMPTS, {}, limit=PAGE_LIMIT_MAX).items:
        newest.setdefault(attempt.job, attempt)
    found = dict(_known(parts, newest))
    return list(found.values())[:ENDED_MAX]


def undeclared_job(parts: Needs, name: str) -> Job | None:
    """Return such a job by its name; None if no agent is known to have spoken of it."""
    if (job := next((job for job in observed(parts) if job.job == name), None)) is not None:
        return job
    attempts = parts.store.page(ATTEMPTS, {"job": name}, limit=1).items
    return dict(_known(parts, {attempt.job: attempt for attempt in attempts})).get(name)


def _known(parts: Needs, newest: dict[str, Attempt]) -> Iterator[tuple[str, Job]]:
    """Yield the ended jobs of the detection loop, which are not on record for some seconds, and of the accounts."""
    spoken_of = parts.fleet.jobs()

    def is_over(name: str) -> bool:
        return name not in spoken_of and parts.store.get(JOBS, name) is None

    for course in parts.outlook.courses():
        attempt = newest.get(course.job)
        if (attempt is None or attempt.attempt < course.attempt) and is_over(course.job):
            yield course.job, _of_course(course)
    for name, attempt in newest.items():
        if is_over(name):
            yield name, _of_attempt(parts.store, attempt)


def _of_course(course: JobProgress) -> Job:
    last_s = course.progressed_s or course.started_s
    return _job(course.job, course.attempt, ENDED, last_s, nodes=list(course.nodes), owner=course.owner)


def _of_attempt(store: Store, attempt: Attempt) -> Job:
    last_s = attempt.seen_s if attempt.ended_s is None else attempt.ended_s
    members = store.get(MEMBERSHIPS, attempt.id)
    nodes = ([attempt.node] if attempt.node else []) if members is None else members.nodes
    return _job(attempt.job, attempt.attempt, ENDED, max(last_s, attempt.last_step_s or 0.0), nodes=nodes)


def _job(
    name: str,
    attempt: int,
    state: str,
    time_s: float,
    ranks: list[MemberRank] | None = None,
    nodes: list[str] | None = None,
    owner: str = "",
) -> Job:
    over = state == ENDED
    return Job(
        job=name,
        attempt=attempt,
        state=state,
        ranks=ranks or [],
        nodes=nodes or [],
        restart_owner="",
        updated_s=time_s,
        since_s=time_s if over else None,
        source=AGENTS,
        said=f"no agent speaks of it since {rfc3339(time_s)}; nobody said how it ended" if over else "",
        owner=owner,
    )
