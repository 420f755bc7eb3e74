"""Merges what launchers declare, schedulers report and agents observe into jobs, and into the standing of nodes. Pure.

For attempt and members a launcher's report takes precedence over the scheduler's, and that over what agents observe;
but a job that any of them reports as stopped is stopped. A job belongs to its scheduler if it has the scheduler's name
for it, which agents use by default, or if a single job of the scheduler has all of its nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from eagle_eye.schema.action import JobUpdate
from eagle_eye.server.engine import ledger
from eagle_eye.server.engine.ledger import is_ours
from eagle_eye.server.jobs.source import HELD_STATES, OVER_STATES, ScheduledJob, ScheduledNode
from eagle_eye.server.model.identity import NodeNames
from eagle_eye.server.model.records import Job, Node

# A job without agents' reports is assumed only after this: agents need a minute to identify ranks.
UNSEEN_S = 120.0
NAMED_MAX = 4  # nodes in a sentence
BEGUN_STATES = ("running", "suspended")  # states in which the scheduler's attempt and nodes of a run are valid
LAUNCHER = "launcher"
GONE = "gone"  # said of a job that the scheduler no longer lists


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """What agents observe of a job: its newest attempt, and the nodes with ranks of it."""

    attempt: int = 0
    nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the server knows besides the scheduler's report.

    ``jobs`` are those on record that are not over, and those with the names concerned. ``seen`` are the jobs that
    agents reported recently. ``scraped`` are the nodes reported only by Prometheus, ``reserved`` those in maintenance.
    """

    jobs: Mapping[str, Job]
    seen: Mapping[str, ObservedJob]
    names: NodeNames
    scraped: frozenset[str] = frozenset()
    reserved: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The new and changed jobs, and all jobs that the scheduler reports on."""

    jobs: tuple[Job, ...]
    speaks_for: frozenset[str]
    left_out: Counter[str] = field(default_factory=Counter)


def reconcile(
    source: str, scheduled: Iterable[ScheduledJob], known: Knowledge, restart_owner: str, now_s: float
) -> Reconciled:
    """Return the changes that follow from a full report of the scheduler ``source``; jobs not in it are gone."""
    left_out: Counter[str] = Counter()
    by_name = _by_name(scheduled, left_out)
    by_id = {job.id: job for job in by_name.values()}
    held = _held_nodes(by_name.values(), known.names)
    ours = dict(_ours(source, by_name, by_id, held, known, now_s))
    made = {
        name: _job(source, name, job, held.get(job.id) or _nodes(job, known.names), known, restart_owner, now_s)
        for name, job in ours.items()
    }
    renamed = {job.id for name, job in ours.items() if name != job.name}
    for name, old in known.jobs.items():
        if name not in made and old.scheduled_as.startswith(f"{source}:") and old.state not in OVER_STATES:
            job = by_id.get(old.scheduled_as.partition(":")[2])
            if job is None or job.id in renamed:
                made[name] = _gone(old, "" if job is None else "its processes go by another name", now_s)
    changed = tuple(job for name, job in made.items() if job is not known.jobs.get(name))
    return Reconciled(changed, frozenset(made), left_out)


def declared_job(name: str, update: JobUpdate, known: Job | None, now_s: float) -> Job:
    """Return the job as its launcher declares it; what a scheduler reported of the same attempt is kept."""
    same = known if known is not None and known.attempt == update.attempt else None
    new = Job(
        job=name,
        attempt=update.attempt,
        state=agreed_state(update.state, same.scheduled_state if same is not None else ""),
        ranks=update.ranks,
        restart_owner=update.restart_owner,
        updated_s=now_s,
        declared_state=update.state,
        owner=update.owner,
        held_up_by=update.held_up_by,
        pace_left_ratio=update.pace_left_ratio,
        exits=update.exits,
    )
    if known is None:
        return replace(new, since_s=now_s)
    reported = replace(new, scheduled_as=known.scheduled_as)
    if not update.owner and (known.state not in OVER_STATES or update.state in OVER_STATES):
        reported = replace(reported, owner=known.owner)  # the next job of this name may have another owner
    if same is not None:
        reported = replace(reported, scheduled_state=same.scheduled_state, said=same.said, ends_s=same.ends_s)
    since_s = same.since_s if same is not None and same.state == new.state else now_s
    return replace(reported, since_s=since_s)


def agreed_state(declared: str, scheduled: str) -> str:
    """Return the state that follows from the launcher's and the scheduler's states; "" where one reported none.

    A launcher that was killed with its job cannot report that, and a scheduler does not know that a launcher has given
    up: whichever reports that the job stopped is right.
    """
    if not declared or not scheduled or scheduled == "running":
        return declared or scheduled
    if declared in OVER_STATES or (declared != "running" and scheduled not in OVER_STATES):
        return declared
    return scheduled


def _by_name(scheduled: Iterable[ScheduledJob], left_out: Counter[str]) -> dict[str, ScheduledJob]:
    """Return the jobs by name without those that share one, which are ambiguous."""
    found: dict[str, ScheduledJob] = {}
    shared: set[str] = set()
    for job in scheduled:
        if job.name in found:
            shared.add(job.name)
        found[job.name] = job
    left_out["shared_name"] += len(shared)
    return {name: job for name, job in found.items() if name not in shared}


def _nodes(job: ScheduledJob, names: NodeNames) -> tuple[str, ...]:
    return tuple(name for theirs in job.nodes if (name := names.ours(theirs)) is not None)


def _held_nodes(scheduled: Iterable[ScheduledJob], names: NodeNames) -> dict[str, tuple[str, ...]]:
    """Return our nodes of the jobs that hold any, by the jobs' ids."""
    found = {job.id: _nodes(job, names) for job in scheduled if job.state in HELD_STATES}
    return {job_id: nodes for job_id, nodes in found.items() if nodes}


def _ours(
    source: str,
    by_name: Mapping[str, ScheduledJob],
    by_id: Mapping[str, ScheduledJob],
    held: Mapping[str, tuple[str, ...]],
    known: Knowledge,
    now_s: float,
) -> Iterator[tuple[str, ScheduledJob]]:
    """Yield our jobs that belong to the scheduler, with our names."""
    holders: dict[str, set[str]] = {}  # node: the scheduler's jobs on it
    for job_id, nodes in held.items():
        for node in nodes:
            holders.setdefault(node, set()).add(job_id)
    renamed = set()
    for name in {**known.seen, **known.jobs}:
        job = None if name in by_name else _within(name, source, by_id, holders, known)
        if job is not None:
            renamed.add(job.id)
            yield name, job
    busy = {node for seen in known.seen.values() for node in seen.nodes}
    for name, job in by_name.items():
        named = name in known.seen or (name in known.jobs and job.id not in renamed)
        if named or (job.id not in renamed and _is_unseen(job, held.get(job.id, ()), busy, known, now_s)):
            yield name, job


def _within(
    name: str,
    source: str,
    by_id: Mapping[str, ScheduledJob],
    holders: Mapping[str, set[str]],
    known: Knowledge,
) -> ScheduledJob | None:
    """Return the scheduler's job inside which one of our jobs with another name runs, None if there is none."""
    old, seen = known.jobs.get(name), known.seen.get(name)
    live = old is not None and old.state not in OVER_STATES
    before = by_id.get(old.scheduled_as.partition(":")[2]) if old is not None and _is_of(old, source) else None
    if seen is None and not (live and old is not None and old.source == LAUNCHER):
        return before if live else None  # no longer reported by anything
    return _around(old, seen, by_id, holders) or before


def _around(
    old: Job | None, seen: ObservedJob | None, by_id: Mapping[str, ScheduledJob], holders: Mapping[str, set[str]]
) -> ScheduledJob | None:
    """Return the only job of the scheduler that has all nodes of ours; None where that is ambiguous."""
    nodes = seen.nodes if seen is not None and seen.nodes else {rank.node for rank in old.ranks} if old else set()
    found = {job_id for node in nodes for job_id in holders.get(node, ())}
    return by_id[found.pop()] if len(found) == 1 and all(node in holders for node in nodes) else None


def _is_of(old: Job, source: str) -> bool:
    return old.scheduled_as.startswith(f"{source}:")


def _is_unseen(job: ScheduledJob, nodes: tuple[str, ...], busy: set[str], known: Knowledge, now_s: float) -> bool:
    """Return whether the job runs on nodes of ours whose agents, with enough time to see ranks, see none there."""
    if job.state != "running" or not nodes or busy.intersection(nodes):
        return False
    if all(node in known.scraped for node in nodes):
        return True
    return job.started_s is not None and now_s - job.started_s >= UNSEEN_S


def _job(
    source: str,
    name: str,
    job: ScheduledJob,
    nodes: tuple[str, ...],
    known: Knowledge,
    restart_owner: str,
    now_s: float,
) -> Job:
    """Return our job updated from the scheduler's report; the known record itself if nothing changed."""
    old, seen = known.jobs.get(name), known.seen.get(name, ObservedJob())
    declared = old.declared_state if old is not None else ""
    if old is not None and old.source == LAUNCHER:
        declared = declared or old.state  # a record from before the two were distinguished
    if old is not None and old.source == LAUNCHER and _begun_anew(old, job):
        old, declared = replace(old, source=source, ranks=[], declared_state=""), ""
    base = old or Job(
        job=name,
        attempt=max(job.attempt, seen.attempt),
        state="",
        ranks=[],
        restart_owner=restart_owner,
        updated_s=now_s,
        source=source,
    )
    scheduled = job.state or base.scheduled_state
    if scheduled == "running" and known.reserved.intersection(nodes):
        scheduled = "maintenance"
    new = replace(
        base,
        scheduled_as=f"{source}:{job.id}",
        scheduled_state=scheduled,
        said=job.said,
        ends_s=job.ends_s,
        state=agreed_state(declared, scheduled) or base.state or "running",
        owner=(base.owner or job.owner) if base.source == LAUNCHER else (job.owner or base.owner),
    )
    if base.source != LAUNCHER and (job.state in BEGUN_STATES or old is None):
        # Where agents have their own attempt number, they count restarts within one of the scheduler's.
        members = sorted(seen.nodes) if name != job.name and seen.nodes else list(nodes)
        new = replace(new, attempt=max(job.attempt, seen.attempt), nodes=members)
    new = replace(new, conflict=_conflict(source, new, job, nodes, seen, old))
    if old is None or (new.state, new.attempt) != (old.state, old.attempt):
        new = replace(new, since_s=now_s)
    same = known.jobs.get(name)
    return same if same is not None and new == same else replace(new, updated_s=now_s)


def _begun_anew(old: Job, job: ScheduledJob) -> bool:
    """Return whether the scheduler reports a later run than the launcher, which reported that its own is over."""
    over = old.declared_state in OVER_STATES or old.state in OVER_STATES
    return over and job.state in HELD_STATES and job.started_s is not None and job.started_s > old.updated_s


def _conflict(
    source: str, new: Job, job: ScheduledJob, nodes: tuple[str, ...], seen: ObservedJob, old: Job | None
) -> str:
    """Return how launcher, scheduler and agents disagree about a running job."""
    if new.state not in HELD_STATES or not nodes or job.state not in BEGUN_STATES:
        return ""
    said = []
    declared = {rank.node for rank in new.ranks} if new.source == LAUNCHER else set()
    for who, theirs in (("the launcher", declared), ("agents", seen.nodes if seen.attempt == new.attempt else set())):
        elsewhere = sorted(set(theirs) - set(nodes))
        if elsewhere:
            more = f" and {len(elsewhere) - NAMED_MAX} more" if len(elsewhere) > NAMED_MAX else ""
            said.append(f"{who}: ranks on {', '.join(elsewhere[:NAMED_MAX])}{more}, where {source} gave it no node")
    if new.source == LAUNCHER and old is not None and new.attempt < job.attempt:
        said.append(f"the launcher is at attempt {new.attempt}, {source} at {job.attempt}")
    return "; ".join(said)


def _gone(old: Job, why: str, now_s: float) -> Job:
    """Return a job that its scheduler no longer lists as over."""
    return replace(
        old,
        state=agreed_state(old.declared_state, "finished"),
        scheduled_state="finished",
        said=why or GONE,
        conflict="",
        since_s=now_s,
        updated_s=now_s,
    )


# Nodes that a scheduler took out of service or returned to service.
#
# Nodes that an administrator drained in the scheduler belong to the administrator: nothing of ours changes them, and
# they return only through the scheduler. Nodes that we drained and somebody drained again for another reason belong to
# that person from then on. A node taken out by us or by a person does not return because the scheduler has it in
# service.

OUR_REASONS = ("eagle-eye", "eagle_eye", "eagle eye")  # prefixes of the drain reasons that our subscribers use


def standing(
    source: str, nodes: Iterable[ScheduledNode], known: Mapping[str, Node], names: NodeNames, now_s: float
) -> tuple[Node, ...]:
    """Return the nodes whose standing changes according to the scheduler ``source``."""
    changed = []
    for said in nodes:
        name = names.ours(said.name)
        old = known.get(name) if name is not None else None
        if old is None:
            continue
        new = _stands(source, said, old, now_s)
        if new is not old:
            changed.append(new)
    return tuple(changed)


def is_our_reason(reason: str) -> bool:
    """Return whether the reason of a drain is one of ours."""
    return reason.casefold().startswith(OUR_REASONS)


def _stands(source: str, said: ScheduledNode, old: Node, now_s: float) -> Node:
    theirs = old.by == source
    if said.state == "in_service":
        back = theirs and old.state != "in_service"
        return ledger.stand(old, "in_service", f"in service in {source}", now_s, source) if back else old
    if not said.state or is_our_reason(said.reason):
        return old
    reason = said.reason or f"out of service in {source}"
    if old.state == "in_service" or theirs:
        return ledger.stand(old, said.state, reason, now_s, source)
    if is_ours(old) and said.drained and said.reason:
        return ledger.stand(old, said.state, reason, now_s, source)
    return old
