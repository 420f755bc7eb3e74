"""Caches the records that the detection loop needs at every tick; rereads only what changed. Reads the store.

Reading the store for each job would take all the time with hundreds of jobs. The change log tells what to reread,
whoever changed it: people, subscribers, or the loop itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from eagle_eye.server.engine import idle_faults
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.rules import FRUITLESS_STATES
from eagle_eye.server.model.records import Action, EvidenceRequest, Incident, Node
from eagle_eye.server.store.store import (
    ACTIONS,
    EVIDENCE,
    INCIDENTS,
    NODES,
    OPEN_INCIDENT_STATES,
    PAGE_LIMIT_MAX,
    Change,
    Store,
)

DISMISSED_MAX = 100  # newest false alarms of a job that are remembered, so as not to be raised again
LATEST_MAX = 100  # newest incidents of a job searched for an earlier end
CHANGES_MAX = 2_000  # beyond this many at once, everything is reread
WAITING_STATES = ("suspected", "confirmed")  # of incidents that may have no requests yet
UNTOUCHED_STATES = ("awaiting", "requested")  # of actions that end by themselves
NODES_KEPT = 10_000
INCIDENTS_AT_ONCE = 500  # incidents whose evidence is queried in one statement


class OpenRecords:
    """Open incidents, false alarms, the policy window's actions and relevant nodes, as of the last ``refresh``.

    Not thread-safe. After noting a change that was not committed, call ``forget``.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.forget()

    def forget(self) -> None:
        """Drop everything: the next ``refresh`` rereads it."""
        self._sequence = -1
        self._since_s = math.inf
        self._incidents: dict[str, Incident] = {}
        self._actions: dict[str, Action] = {}
        self._dismissed: dict[str, list[Incident]] = {}
        self._nodes: dict[str, Node | None] = {}
        self._evidence: dict[str, list[EvidenceRequest]] | None = None
        self._by_job: dict[str, dict[str, Incident]] = {}
        self._sort_actions()

    def refresh(self, since_s: float) -> None:
        """Reread what changed; of actions, those requested at ``since_s`` or later, or because of open incidents."""
        self._evidence = None
        oldest, newest = self._store.change_range()
        if since_s < self._since_s or oldest > self._sequence + 1 or newest < self._sequence:
            self._read_all(since_s)
        elif newest > self._sequence:
            changes = self._store.changes_since(self._sequence, CHANGES_MAX + 1)
            if len(changes) > CHANGES_MAX:
                self._read_all(since_s)
            else:
                self._read(dict.fromkeys((change.kind, change.key) for change in changes))
                self._sequence = max(change.sequence for change in changes) if changes else newest
        self._let_go(since_s)

    def apply_change(self, change: Change) -> None:
        """Apply a change that is about to be committed."""
        for incident in change.incidents:
            self._put(incident)
        if change.actions:
            self._actions.update((action.id, action) for action in change.actions)
            self._sort_actions()

    def concern(self, job: str) -> bool:
        """Return whether any record may have to change even if nothing more is reported about the job."""
        return job in self._by_job or job in self._asked_for

    def incidents_of(self, job: str) -> list[Incident]:
        """Return the job's open incidents, oldest first."""
        return list(self._by_job.get(job, {}).values())

    def incidents_elsewhere(self, job: str) -> list[Incident]:
        """Return the open incidents of other jobs, whichever cell judges these, oldest first."""
        return [incident for incident in self._incidents.values() if incident.job != job]

    def idle(self, now_s: float) -> Judgement:
        """Return the judgement on nodes without a job."""
        incidents = self.incidents_of(idle_faults.NO_JOB)
        nodes = self.nodes([incident.node for incident in incidents if incident.node is not None])
        return idle_faults.standing(incidents, {node.node: node for node in nodes}, now_s)

    def dismissed_of(self, job: str) -> list[Incident]:
        """Return the job's newest incidents that people marked as false alarms."""
        found = self._dismissed.get(job)
        if found is None:
            filters = {"job": job, "state": "false"}
            found = self._dismissed[job] = self._store.page(INCIDENTS, filters, limit=DISMISSED_MAX).items
        return found

    def latest_of(self, job: str) -> list[Incident]:
        """Return the newest incidents of the job in any state. Reads the store each time: not for every tick."""
        return self._store.page(INCIDENTS, {"job": job}, limit=LATEST_MAX).items

    def actions(self, incidents: Iterable[Incident], since_s: float) -> list[Action]:
        """Return all jobs' actions since ``since_s``, oldest first, and older ones of these incidents."""
        lately = [action for action in self._actions.values() if action.created_s >= since_s]
        # Old requests must not be repeated.
        old = {incident.id for incident in incidents if incident.detected_s < since_s}
        if not old:
            return lately
        return lately + [a for a in self._actions.values() if a.created_s < since_s and a.incident_id in old]

    def nodes(self, names: Iterable[str]) -> list[Node]:
        """Return the existing records of these nodes."""
        for name in names:
            if name not in self._nodes:
                self._nodes[name] = self._store.get(NODES, name)
        return [node for name in names if (node := self._nodes[name]) is not None]

    def evidence_of(self, incidents: Iterable[Incident]) -> list[EvidenceRequest]:
        """Return the evidence requested from agents for those of the incidents that have no action requested yet.

        Reread after each ``refresh``, for all jobs at once: agents' answers are in no change log.
        """
        if self._evidence is None:
            self._evidence = {}
            waiting = [incident.id for incident in self._incidents.values() if self._waits(incident)]
            for first in range(0, len(waiting), INCIDENTS_AT_ONCE):
                for one in self._asked_because_of(waiting[first : first + INCIDENTS_AT_ONCE]):
                    self._evidence.setdefault(one.incident_id, []).append(one)
        found = self._evidence
        return [one for incident in incidents if self._waits(incident) for one in found.get(incident.id, ())]

    def _asked_because_of(self, incidents: Sequence[str]) -> Iterator[EvidenceRequest]:
        cursor: str | None = None
        while True:
            page = self._store.page(EVIDENCE, {"incident_id": incidents}, cursor, PAGE_LIMIT_MAX)
            yield from page.items
            cursor = page.next
            if cursor is None:
                return

    def _waits(self, incident: Incident) -> bool:
        return incident.state in WAITING_STATES and incident.id not in self._acted_on

    def _read_all(self, since_s: float) -> None:
        self.forget()
        # Before the records: what changes meanwhile is read a second time.
        self._sequence = self._store.change_range()[1]
        self._since_s = since_s
        for incident in self._store.open_incidents():
            self._put(incident)
        self._actions = {action.id: action for action in self._store.actions_since(since_s)}
        for incident in self._incidents.values():
            self._read_old_actions(incident)
        self._sort_actions()

    def _read(self, changed: Collection[tuple[str, str]]) -> None:
        for kind, key in changed:
            if kind == INCIDENTS.name:
                incident = self._store.get(INCIDENTS, key)
                if incident is not None:
                    if key not in self._incidents and incident.state in OPEN_INCIDENT_STATES:
                        self._read_old_actions(incident)
                    self._put(incident)
            elif kind == ACTIONS.name:
                action = self._store.get(ACTIONS, key)
                if action is not None:
                    self._actions[key] = action
            elif kind == NODES.name:
                self._nodes.pop(key, None)
        self._sort_actions()

    def _read_old_actions(self, incident: Incident) -> None:
        if incident.detected_s < self._since_s:
            for action in self._store.actions_of(incident.id):
                self._actions.setdefault(action.id, action)

    def _put(self, incident: Incident) -> None:
        if incident.state in OPEN_INCIDENT_STATES:
            self._incidents[incident.id] = incident
            self._by_job.setdefault(incident.job, {})[incident.id] = incident
        elif self._incidents.pop(incident.id, None) is not None:
            mine = self._by_job[incident.job]
            del mine[incident.id]
            if not mine:
                del self._by_job[incident.job]
        known = self._dismissed.get(incident.job, ())
        if incident.state == "false" or any(one.id == incident.id for one in known):
            self._dismissed.pop(incident.job, None)

    def _let_go(self, since_s: float) -> None:
        """Drop what is no longer relevant."""
        gone = [a.id for a in self._actions.values() if a.created_s < since_s and a.incident_id not in self._incidents]
        for action_id in gone:
            del self._actions[action_id]
        if len(self._nodes) > NODES_KEPT:
            self._nodes.clear()
        if len(self._dismissed) > NODES_KEPT:
            self._dismissed.clear()

    def _sort_actions(self) -> None:
        actions = self._actions.values()
        self._acted_on = {a.incident_id for a in actions if a.state not in FRUITLESS_STATES and not a.preliminary}
        self._asked_for = {action.job for action in actions if action.state in UNTOUCHED_STATES}
