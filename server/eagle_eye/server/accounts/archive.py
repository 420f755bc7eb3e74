"""Reads the past: nodes' histories and scores, jobs' timelines, claims and what followed. Reads the store.

Every query has a limit; if the limit left something out, the answer says so. Of this, ``/metrics`` shows the recurrent
nodes, goodput and lost GPU time, how fast trouble is found and over, and how often policy was right.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.schema.driver_facts import BY_CODE
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.accounts import goodput, node_records, trust
from eagle_eye.server.accounts.goodput import TimelineSpan, timeline
from eagle_eye.server.accounts.node_records import NodeRecord, Scores, is_one_gpu, sat_at
from eagle_eye.server.accounts.trust import ActionOutcome, Afterwards, JudgedDecision, precision_of
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import Action, Attempt, AuditEntry, DriverError, Incident, NodeCheck, Ticket
from eagle_eye.server.store.store import (
    ACTIONS,
    ATTEMPTS,
    DRIVER_ERRORS,
    GPUS,
    INCIDENTS,
    MEMBERSHIPS,
    NODE_CHECKS,
    NODES,
    PAGE_LIMIT_MAX,
    TICKETS,
    Kind,
    Page,
    Store,
)

RecordT = TypeVar("RecordT", bound=msgspec.Struct)

READ_MAX = 20_000  # records of one kind for one answer
MEMBERSHIPS_MAX = 100  # per job: each names all its nodes
SCORES_FRESH_S = 300.0  # a fleet's scores change over weeks
CURRENT_FRESH_S = 60.0
CURRENT_JOBS_MAX = 100  # whose goodput is on /metrics
SAME_OUT_S = 3_600.0  # an action, the subscriber's report and the scheduler's report of it count as one exclusion
INCIDENTS_SHOWN_S = 30 * 86_400.0
DONE_STATES = ("accepted", "running", "done")
# Application codes, echoes of other codes, and messages about them say nothing about the hardware.
HARDWARE_KINDS = frozenset({"restart", "contained", "memory", "remap", "hang", "lost", "nvlink", "power", "watch"})


class JobSpans(NamedTuple):
    """The timeline of each job, and whether a limit left out attempts or incidents."""

    jobs: Mapping[str, list[TimelineSpan]]
    cut: bool


class HeldBackAction(NamedTuple):
    """An action that was not carried out, its incident, and the outcome so far."""

    action: Action
    incident: Incident | None
    outcome: ActionOutcome


class Archive:
    """Answers from the store; expensive results are cached. From any thread."""

    def __init__(self, store: Store, clock: Clock, hindsight_s: float) -> None:
        self._store = store
        self._clock = clock
        self._hindsight_s = hindsight_s
        self._scores: Scores | None = None
        self._current: tuple[float, Mapping[str, list[TimelineSpan]]] | None = None
        self._lock = threading.Lock()

    @property
    def hindsight_s(self) -> float:
        """For how long after an action later events are examined."""
        return self._hindsight_s

    def scores(self) -> Scores:
        """Return every node's recurrence score, at most SCORES_FRESH_S old. Raises StoreUnavailable."""
        with self._lock:
            now_s = self._clock.now_s()
            if self._scores is None or not 0 <= now_s - self._scores.made_s < SCORES_FRESH_S:
                self._scores = node_records.scores(self._pasts(now_s), now_s)
            return self._scores

    def jobs(self, job: str | None = None, cell: str | None = None) -> JobSpans:
        """Return the timelines of one job, or of all whose attempts are among the newest. Raises StoreUnavailable.

        With ``cell``, of the jobs alone that it judges.
        """
        filters = {name: value for name, value in (("job", job), ("cell", cell)) if value is not None}
        attempts, cut = self._newest(ATTEMPTS, filters)
        by_job: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in attempts:
            by_job[attempt.job].append(attempt)
        incidents, more = self._newest(INCIDENTS, filters)
        return JobSpans(self._timelines(by_job, incidents), cut or more)

    def current(self) -> Mapping[str, list[TimelineSpan]]:
        """Return the timelines of the current runs of open jobs, at most the newest CURRENT_JOBS_MAX."""
        with self._lock:
            now_s = self._clock.now_s()
            if self._current is None or not 0 <= now_s - self._current[0] < CURRENT_FRESH_S:
                going = self._store.page(ATTEMPTS, {"end": ""}, limit=CURRENT_JOBS_MAX).items
                runs = {a.job: self._newest(ATTEMPTS, {"run": a.run})[0] for a in reversed(going)}
                begun_s = min((a.started_s for mine in runs.values() for a in mine), default=now_s)
                incidents, _ = self._newest(INCIDENTS, {}, lambda incident: incident.detected_s < begun_s)
                self._current = now_s, self._timelines(runs, incidents)
            return self._current[1]

    def claims(
        self, since_s: float, job: str | None = None, fault: str | None = None, cell: str | None = None
    ) -> tuple[list[HeldBackAction], bool]:
        """Return what was requested and not carried out since then, newest first; and whether a limit left some out."""
        asked: list[Action] = []
        cut = False
        for state in trust.JUDGED_STATES:
            filters = {"state": state, "job": job, "cell": cell}
            given = {name: value for name, value in filters.items() if value is not None}
            found, more = self._newest(ACTIONS, given, lambda action: action.created_s < since_s)
            asked += [a for a in found if trust.is_judged(a) and fault in (None, a.fault)]
            cut = cut or more
        asked.sort(key=lambda action: (action.created_s, action.id), reverse=True)
        after = _Aftermath(self._store, self._newest, min((a.created_s for a in asked), default=since_s))
        now_s = self._clock.now_s()
        claims = []
        for action in asked:
            past = after.of(action)
            outcome = trust.look_back(action, past, now_s, self._hindsight_s)
            claims.append(HeldBackAction(action, past.incident, outcome))
        return claims, cut or after.cut

    def incidents(self, since_s: float) -> list[Incident]:
        """Return the incidents detected since then, the newest READ_MAX at most. Raises StoreUnavailable."""
        return self._newest(INCIDENTS, {}, lambda incident: incident.detected_s < since_s)[0]

    def decisions(self, since_s: float, fault: str | None = None) -> tuple[list[JudgedDecision], bool]:
        """Return what policy wanted since then, carried out or not; and whether a limit left some out."""
        claims, cut = self.claims(since_s, None, fault)
        found = [JudgedDecision(claim.action, claim.outcome.standing) for claim in claims]
        now_s = self._clock.now_s()
        for state in trust.ASKED_STATES:
            asked, more = self._newest(ACTIONS, {"state": state}, lambda action: action.created_s < since_s)
            cut = cut or more
            for action in asked:
                if trust.would_stop(action) and fault in (None, action.fault):
                    incident = self._store.get(INCIDENTS, action.incident_id)
                    found.append(trust.asked_decision(action, incident, now_s, self._hindsight_s))
        return found, cut

    def _timelines(
        self, attempts: Mapping[str, Sequence[Attempt]], incidents: Iterable[Incident]
    ) -> dict[str, list[TimelineSpan]]:
        by_job: dict[str, list[Incident]] = defaultdict(list)
        for incident in incidents:
            by_job[incident.job].append(incident)
        now_s = self._clock.now_s()
        return {job: timeline(mine, by_job[job], now_s) for job, mine in attempts.items()}

    def _pasts(self, now_s: float) -> dict[str, NodeRecord]:
        """Return the record of every node within the score's window."""
        since_s = now_s - node_records.WINDOW_S
        pasts = {
            node.node: NodeRecord(known_s=max(0.0, now_s - (node.known_since_s or node.updated_s)))
            for node in self._store.all(NODES)
        }
        shown, _ = self._newest(INCIDENTS, {}, lambda incident: incident.detected_s < now_s - INCIDENTS_SHOWN_S)
        for incident in shown:
            if incident.node in pasts and incident.state != "false" and not incident.merged_into:
                pasts[incident.node].incidents += 1
        culprits = [i for i in shown if i.detected_s >= since_s and _accuses(i)]
        attempts, _ = self._newest(ATTEMPTS, {}, lambda attempt: attempt.started_s < now_s - 2 * node_records.WINDOW_S)
        _count_failures(pasts, culprits, attempts, since_s)
        self._count_exclusions(pasts, since_s)
        codes: dict[str, set[int]] = defaultdict(set)
        for error in self._newest(DRIVER_ERRORS, {}, lambda _: False)[0]:
            if error.last_s >= since_s and _of_hardware(error):
                codes[error.node].add(error.code)
        tickets, _ = self._newest(TICKETS, {}, lambda _: False)
        opened = Counter(ticket.node for ticket in tickets if ticket.opened_s >= since_s)
        for node, past in pasts.items():
            past.driver_errors = len(codes.get(node, ()))
            past.tickets = opened[node]
        for gpu in self._newest(GPUS, {"moved": "1"})[0]:
            if gpu.node in pasts and is_one_gpu(gpu, since_s):
                elsewhere = [i for i in culprits if i.node != gpu.node and i.device is not None]
                reported = sum(sat_at(gpu, i.onset_s) == (i.node, i.device) for i in elsewhere)
                pasts[gpu.node].inherited_failures += reported
        return pasts

    def _count_exclusions(self, pasts: Mapping[str, NodeRecord], since_s: float) -> None:
        jobs: dict[str, set[str]] = defaultdict(set)
        outs: dict[str, list[float]] = defaultdict(list)
        for action in self._newest(ACTIONS, {}, lambda action: action.created_s < since_s)[0]:
            if action.state in DONE_STATES:
                for node in set(action.exclude) & pasts.keys():
                    jobs[node].add(action.job)
                    outs[node].append(action.updated_s)
        for node, names in jobs.items():
            pasts[node].excluding_jobs = len(names)
        for entry in newest_audit(self._store, lambda entry: entry.time_s < since_s):
            if entry.verb in trust.TAKEN_OUT_VERBS and entry.subject in pasts:
                outs[entry.subject].append(entry.time_s)
        for node, times in outs.items():
            pasts[node].taken_out = _occasions(times)

    def _newest(
        self, kind: Kind[RecordT], filters: Mapping[str, str], too_old: Callable[[RecordT], bool] = lambda _: False
    ) -> tuple[list[RecordT], bool]:
        """Return the newest records up to the first that is too old, and whether READ_MAX left some out."""
        found: list[RecordT] = []
        cursor: str | None = None
        while True:
            page = self._store.page(kind, filters, cursor, PAGE_LIMIT_MAX)
            for record in page.items:
                if too_old(record):
                    return found, False
                found.append(record)
            cursor = page.next
            if cursor is None:
                return found, False
            if len(found) >= READ_MAX:
                return found, True


class _Aftermath:
    """What happened after some actions; each record is read once."""

    def __init__(self, store: Store, newest: Callable[..., tuple[list[Incident], bool]], since_s: float) -> None:
        self._store = store
        self._since_s = since_s
        # An incident may have been detected long before policy requested an action.
        incidents, self.cut = newest(INCIDENTS, {}, lambda i: i.detected_s < since_s)
        self._accusing: dict[str, list[Incident]] = defaultdict(list)
        for incident in incidents:
            if incident.node is not None:
                self._accusing[incident.node].append(incident)
        self._verbs: dict[str, list[AuditEntry]] = {}
        self._checks: dict[str, list[NodeCheck]] = {}
        self._tickets: dict[str, list[Ticket]] = {}
        self._attempts: dict[str, list[Attempt]] = {}
        self._members: dict[str, dict[str, list[str]]] = {}

    def of(self, action: Action) -> Afterwards:
        """Return what is on record of the action's nodes and job since then."""
        nodes = sorted(trust.accused(action))
        for node in nodes:
            if node not in self._verbs:
                self._verbs[node] = self._since(self._store.audit(None, PAGE_LIMIT_MAX, node), lambda e: e.time_s)
                checks = self._store.page(NODE_CHECKS, {"node": node}, limit=PAGE_LIMIT_MAX)
                self._checks[node] = self._since(checks, lambda check: check.created_s)
                tickets = self._store.page(TICKETS, {"node": node}, limit=PAGE_LIMIT_MAX)
                self._tickets[node] = self._since(tickets, lambda ticket: ticket.opened_s)
        if action.job not in self._attempts:
            attempts = self._store.page(ATTEMPTS, {"job": action.job}, limit=PAGE_LIMIT_MAX)
            self._attempts[action.job] = self._since(attempts, lambda attempt: attempt.started_s)[::-1]
        return Afterwards(
            incident=self._store.get(INCIDENTS, action.incident_id),
            incidents=[i for node in nodes for i in self._accusing.get(node, ())],
            verbs=[entry for node in nodes for entry in self._verbs[node]],
            checks=[check for node in nodes for check in self._checks[node]],
            tickets=[ticket for node in nodes for ticket in self._tickets[node]],
            attempts=self._attempts[action.job],
            members=self._members_of(action.job),
        )

    def _members_of(self, job: str) -> dict[str, list[str]]:
        if job not in self._members:
            page = self._store.page(MEMBERSHIPS, {"job": job}, limit=MEMBERSHIPS_MAX)
            found = self._since(page, lambda membership: membership.started_s)
            self._members[job] = {membership.id: membership.nodes for membership in found}
        return self._members[job]

    def _since(self, page: Page[RecordT], time_s: Callable[[RecordT], float]) -> list[RecordT]:
        """Return the newest records; if a limit left out some from after the actions, the answer is marked as cut."""
        if page.next is not None and min(map(time_s, page.items)) > self._since_s:
            self.cut = True
        return page.items


def newest_audit(store: Store, too_old: Callable[[AuditEntry], bool]) -> Iterable[AuditEntry]:
    """Yield the newest entries of the audit trail up to the first that is too old, READ_MAX at most."""
    cursor: str | None = None
    for _ in range(READ_MAX // PAGE_LIMIT_MAX):
        page = store.audit(cursor, PAGE_LIMIT_MAX)
        for entry in page.items:
            if too_old(entry):
                return
            yield entry
        cursor = page.next
        if cursor is None:
            return


def _accuses(incident: Incident) -> bool:
    """Return whether the incident blames one node for a job's trouble, as ``engine/respond.py`` counts it."""
    fault = BY_NAME.get(incident.fault)
    return (
        incident.node is not None
        and incident.state != "false"
        and not incident.merged_into
        and not incident.application
        and incident.action in ("exclude_node", "restart_job")
        and fault is not None
        and fault.trouble != "early"
    )


def _occasions(times: Iterable[float]) -> int:
    """Return the number of distinct events among times that several sources may have reported one after the other."""
    count, last_s = 0, -float("inf")
    for time_s in sorted(times):
        count += time_s - last_s > SAME_OUT_S
        last_s = time_s
    return count


def _of_hardware(error: DriverError) -> bool:
    if error.kind == "sxid":
        return True
    known = BY_CODE.get(error.code)
    return known is not None and known.kind in HARDWARE_KINDS


def _count_failures(
    pasts: Mapping[str, NodeRecord], culprits: Iterable[Incident], attempts: Sequence[Attempt], since_s: float
) -> None:
    """Count each node's failures, one per attempt, and its single-node attempts."""
    of_job: dict[tuple[str, int], list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        of_job[attempt.job, attempt.attempt].append(attempt)
        if attempt.node in pasts and max(attempt.started_s, attempt.ended_s or attempt.seen_s) >= since_s:
            pasts[attempt.node].single_node_attempts += 1
    failures: set[tuple[str, str, int, str, bool]] = set()
    for incident in culprits:
        its = [a for a in of_job[incident.job, incident.attempt] if a.started_s <= incident.detected_s]
        latest = max(its, key=lambda a: a.started_s, default=None)
        alone = latest is not None and latest.nodes == 1
        failures.add((incident.node or "", incident.job, incident.attempt, latest.id if latest else "", alone))
    for node, _, _, _, alone in failures:
        if node in pasts and alone:
            pasts[node].single_node_failures += 1
        elif node in pasts:
            pasts[node].multi_node_failures += 1


# On /metrics: every family has a bounded number of series.

RECURRENT_MAX = 100
LOSSES_MAX = 1_000


class AccountsCollector(Collector):
    """Figures for daily use. All are gauges, even sums: the cause of a loss may change when more is known."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def collect(self) -> Iterator[Metric]:
        """Yield the families; nothing while the records cannot be read."""
        recurrent = _family("node_recurrence_score", "Score of the nodes that keep failing, the worst ones.", ["node"])
        lemons = _family("node_lemon_score", "The former name of node_recurrence_score.", ["node"])
        ratio = _family(
            "job_goodput_ratio",
            "Share of the present run's known time that was training at full speed, of jobs that go on.",
            ["job"],
        )
        ettr = _family(
            "job_effective_training_ratio",
            "Share of the present run's known time that was spent on steps that counted, of jobs that go on.",
            ["job"],
        )
        lost = _family(
            "job_lost_gpu_seconds",
            "GPU time of the present run that was no training, by what it was lost to; of jobs that go on.",
            ["job", "part", "fault"],
        )
        try:
            worst = self._archive.scores().recurrent_by_score()[:RECURRENT_MAX]
            current = self._archive.current()
        except StoreUnavailable:
            return
        for node, score in worst:
            recurrent.add_metric([node], score)
            lemons.add_metric([node], score)
        series: list[tuple[float, list[str]]] = []
        for job, spans in current.items():
            sums = goodput.account(spans)
            if sums.goodput_ratio is not None and sums.ettr_ratio is not None:
                ratio.add_metric([job], sums.goodput_ratio)
                ettr.add_metric([job], sums.ettr_ratio)
            by_fault = goodput.grouped(goodput.losses(spans), "fault")
            for fault, parts in by_fault.items():
                series += [(amount.gpu_seconds, [job, part, fault]) for part, amount in parts.items()]
        for gpu_seconds, labels in sorted(series, reverse=True)[:LOSSES_MAX]:
            lost.add_metric(labels, gpu_seconds)
        yield from (recurrent, lemons, ratio, ettr, lost)


def _family(name: str, help_: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PROMETHEUS_PREFIX + name, help_, labels=labels)


RESPONSE_TIMES_S = 7 * 86_400.0  # whose incidents count for the times
DECISIONS_S = 90 * 86_400.0
RESPONSE_FRESH_S = 300.0
QUANTILES = (0.5, 0.95)


class ResponseCollector(Collector):
    """By fault, at most FRESH_S old; so the series are bounded by the catalogue of faults."""

    def __init__(self, archive: Archive, clock: Clock) -> None:
        self._archive = archive
        self._clock = clock
        self._lock = threading.Lock()
        self._made_s: float | None = None
        self._families: list[Metric] = []

    def collect(self) -> Iterator[Metric]:
        """Yield the families; nothing while the records cannot be read."""
        with self._lock:
            now_s = self._clock.now_s()
            if self._made_s is None or not 0 <= now_s - self._made_s < RESPONSE_FRESH_S:
                try:
                    incidents = self._archive.incidents(now_s - RESPONSE_TIMES_S)
                    decisions, _ = self._archive.decisions(now_s - DECISIONS_S)
                except StoreUnavailable:
                    return
                self._families = [*_times(incidents), *_decisions(trust.of_incidents(decisions))]
                self._made_s = now_s
            yield from self._families


def _times(incidents: Iterable[Incident]) -> Iterator[Metric]:
    to_detect: dict[str, list[float]] = defaultdict(list)
    to_recover: dict[str, list[float]] = defaultdict(list)
    for one in incidents:
        if one.state == "false" or one.merged_into:
            continue
        to_detect[one.fault].append(one.detected_s - one.onset_s)
        if one.ended_s is not None:
            to_recover[one.fault].append(one.ended_s - one.onset_s)
    for name, text, times in (
        ("time_to_detect_seconds", "From an incident's onset to its verdict; of seven days.", to_detect),
        ("time_to_recover_seconds", "From an incident's onset until it was over; of seven days.", to_recover),
    ):
        family = _family(name, text, ["fault", "quantile"])
        for fault, found in sorted(times.items()):
            for share in QUANTILES:
                family.add_metric([fault, str(share)], _quantile(sorted(found), share))
        yield family


def _decisions(decisions: Iterable[trust.JudgedDecision]) -> Iterator[Metric]:
    counts = _family(
        "ledger_decisions",
        "Incidents for which policy wanted an action, by whether that was right; of ninety days.",
        ["fault", "standing"],
    )
    low = _family(
        "ledger_precision_low_ratio",
        "Lower end of the 95% interval of right over right and wrong, where any is known.",
        ["fault"],
    )
    for fault, mine in sorted(trust.by_fault(decisions).items()):
        counted = precision_of(one.standing for one in mine)
        for standing, count in counted._asdict().items():
            counts.add_metric([fault, standing], count)
        if counted.interval is not None:
            low.add_metric([fault], counted.interval[0])
    yield from (counts, low)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile by the nearest rank: one of the values, also of few."""
    return ordered[math.ceil(share * len(ordered)) - 1]
