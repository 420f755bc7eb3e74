"""The detection loop: engine, policy and store brought together, on a clock. Writes to the store."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Iterable, Iterator

from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.schema.frame import Frame
from eagle_eye.server import outbound
from eagle_eye.server.clock import Clock
from eagle_eye.server.config import EvidenceSettings
from eagle_eye.server.engine.engine import RUNNING_STATES, Engine, Judgement
from eagle_eye.server.engine.gathering import Gathering
from eagle_eye.server.engine.policy import Weighing, weigh
from eagle_eye.server.engine.respond import Book, Response, respond, situation_of
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.engine.situation import FRUITLESS_STATES
from eagle_eye.server.errors import StoreUnavailable
from eagle_eye.server.records import Action, Evidence, Incident, Job, OutboundEvent
from eagle_eye.server.store import EVIDENCE, INCIDENTS, JOBS, NODES, PAGE_LIMIT_MAX, Change, Store
from eagle_eye.server.watching import Latest, Progress

log = logging.getLogger(__name__)

GAP_TICKS = 4.0  # a pause of the loop longer than this many ticks was time in which nobody watched
GAP_FLOOR_S = 2.0
DISMISSED_MAX = 100  # newest false alarms of a job that are remembered, so as not to be raised again
HISTORY_FRESH_S = 60.0
HISTORY_MAX = 1_000  # newest incidents in which recurrence is looked for
CLOCK_STEP_S = 1.0  # wall against monotonic time, beyond which the wall clock was set
GATHERS = "evidence"  # the collector by which an agent says that it may be asked to gather
SEEN_GRAIN_RATIO = 0.25  # of the time after which an incident is gone: how stale its seen_s on record may get


class Watch:
    """Feeds the engine and, every tick, turns its judgements into incidents, actions and events in the store.

    The store is the only memory of incidents and actions: whatever people and subscribers changed there through the API
    counts at the next tick, and a server that was killed goes on where it stopped.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        clock: Clock,
        policy: PolicySettings,
        public_url: str,
        evidence: EvidenceSettings | None = None,
    ) -> None:
        """``evidence`` None: agents are asked for none."""
        self._engine = engine
        self._store = store
        self._clock = clock
        self._policy = policy
        self._public_url = public_url
        self._evidence = evidence
        self._gatherers: dict[str, float] = {}  # nodes whose agents gather evidence, and when each was last heard
        self._judged: dict[str, Judgement] = {}
        self._history: list[Incident] = []
        self._history_read_s = -HISTORY_FRESH_S
        self._ticked_s: float | None = None
        self._ticked_wall_s = clock.now_s()

    def observe(self, frame: Frame, received_s: float, offset_s: float) -> None:  # noqa: ARG002 - applied already
        """Take a durable frame."""
        if frame.collectors.get(GATHERS) == "ok":
            self._gatherers[frame.node] = received_s
        else:
            self._gatherers.pop(frame.node, None)
        self._engine.observe(frame, received_s)

    def observe_job(self, job: Job) -> None:
        """Take what a job's scheduler or launcher said."""
        self._engine.observe_job(job)

    def use_model(self, model: LearnedModel | str) -> None:
        """Judge by another learned model; a text says why there is none."""
        self._engine.use_model(model)

    def use_policy(self, policy: PolicySettings) -> None:
        """Decide by these settings from the next tick on."""
        self._policy = policy

    def recover(self, frames: Iterable[tuple[Frame, float]]) -> None:
        """Rebuild the windows from the jobs on record and the (frame, received_s) of the recent past."""
        for job in self._store.all(JOBS):
            self._engine.observe_job(job)
        for frame, received_s in frames:
            self._engine.observe(frame, received_s)
        self._engine.resume_watching(self._clock.now_s())

    async def run(self) -> None:
        """Judge every tick until cancelled."""
        while True:
            try:
                self.tick(self._clock.now_s())
            except StoreUnavailable:
                log.exception("the store cannot be written: nothing was judged in this tick")
            await asyncio.sleep(self._engine.settings.tick_s)

    def tick(self, now_s: float) -> None:
        """Judge once and write down what follows."""
        self._notice_gap(now_s)
        self._read_history()
        judgements = self._engine.tick(now_s)
        self._judged = {judgement.job: judgement for judgement in judgements}
        for judgement in judgements:
            if not self._change(judgement, self._store).empty:
                # Computed again inside the transaction: what a person or subscriber did meanwhile counts.
                self._store.update(functools.partial(self._change, judgement))
        self._ticked_s = self._clock.monotonic_s()
        self._ticked_wall_s = now_s

    def ticked_s(self) -> float | None:
        """Return when the last tick ended, on the monotonic clock; None before the first."""
        return self._ticked_s

    def latest(self) -> Iterator[Latest]:
        """Yield the newest value of each series of each job."""
        for track in self._engine.tracks():
            for metric, values in track.latest().items():
                for (node, device), value in values.items():
                    if value == value:
                        yield Latest(metric, track.job, node, None if device < 0 else device, value)

    def blind(self) -> dict[str, str]:
        """Return the detectors that could judge none of the running jobs in the last tick, each with a reason."""
        running = [j for j in self._judged.values() if j.state == "running"]
        if not running:
            return {}
        everywhere = set.intersection(*(set(j.blind) for j in running))
        return {name: running[0].blind[name] for name in sorted(everywhere)}

    def drops(self) -> dict[str, int]:
        """Return how much the windows of the jobs in memory left out, by reason."""
        return self._engine.drops()

    def progress(self, job: str) -> Progress | None:
        """Return how far the job has come, or None for a job that no agent speaks of."""
        track = next((t for t in self._engine.tracks() if t.job == job), None)
        if track is None:
            return None
        stepping = track.last_step is not None
        return Progress(track.last_step, track.advanced_s if stepping else None, track.pace_s)

    def policy(self) -> PolicySettings:
        """Return the settings that are in force."""
        return self._policy

    def explain(self, incident: Incident) -> Weighing | None:
        """Return what policy says of the incident by now; None when its attempt is not judged any more."""
        judgement = self._judged.get(incident.job)
        if judgement is None or judgement.attempt != incident.attempt:
            return None
        book = self._book(judgement, self._store)
        fleet_size, blind = len(self._engine.heard_s()), _blindness(judgement)
        return weigh(incident, situation_of(judgement, book, book.actions, self._policy, fleet_size, blind))

    def _read_history(self) -> None:
        """Read now and then what has happened in the past weeks: recurrence is no matter of seconds."""
        if self._clock.monotonic_s() - self._history_read_s >= HISTORY_FRESH_S:
            self._history = self._store.page(INCIDENTS, {}, limit=HISTORY_MAX).items
            self._history_read_s = self._clock.monotonic_s()

    def _notice_gap(self, now_s: float) -> None:
        """Forgive the nodes the silence of a time in which we ourselves did not watch, or the clock was set."""
        if self._ticked_s is None:
            return
        passed_s = self._clock.monotonic_s() - self._ticked_s
        stepped_s = abs((now_s - self._ticked_wall_s) - passed_s)
        if passed_s > max(GAP_TICKS * self._engine.settings.tick_s, GAP_FLOOR_S) or stepped_s > CLOCK_STEP_S:
            said = {"unwatched_s": round(passed_s, 1), "clock_step_s": round(stepped_s, 1)}
            log.warning("nothing was watched for a time, or the clock was set", extra=said)
            self._engine.resume_watching(now_s)

    def _change(self, judgement: Judgement, store: Store) -> Change:
        book = self._book(judgement, store)
        response = respond(
            judgement,
            book,
            self._policy,
            fleet_size=len(self._engine.heard_s()),
            blind=_blindness(judgement),
            new_id=lambda prefix: f"{prefix}_{secrets.token_hex(8)}",
        )
        known = {incident.id: incident for incident in book.incidents}
        incidents = tuple(i for i in response.incidents if self._worth_writing(known.get(i.id), i))
        return Change(
            incidents=incidents,
            actions=response.actions,
            events=tuple(self._events(incidents, response, known, judgement.now_s)),
            evidence=response.evidence,
        )

    def _book(self, judgement: Judgement, store: Store) -> Book:
        mine = [incident for incident in store.open_incidents() if incident.job == judgement.job]
        dismissed = store.page(INCIDENTS, {"job": judgement.job, "state": "false"}, limit=DISMISSED_MAX).items
        since_s = judgement.now_s - max(self._policy.window_s, self._policy.repeat_window_s)
        actions = store.actions_since(since_s)
        for incident in mine:
            if incident.detected_s < since_s:  # what was asked for long ago is not asked for a second time
                actions += [action for action in store.actions_of(incident.id) if action.created_s < since_s]
        named = [*(verdict.node for verdict in judgement.verdicts), *(incident.node for incident in mine)]
        accused = {node for node in named if node is not None}
        drained = {node for a in actions if a.kind == "drain_node" and a.job == judgement.job for node in a.exclude}
        records = (store.get(NODES, node) for node in sorted(accused | drained))
        return Book(
            incidents=[*mine, *dismissed],
            actions=actions,
            history=self._history,
            gathering=self._gathering(mine, actions, store),
            standing={record.node: record for record in records if record and record.state != "in_service"},
            neighbours={node: self._neighbours(node, judgement.job) for node in accused | drained},
        )

    def _neighbours(self, node: str, job: str) -> list[str]:
        """Return the other jobs that run on the node."""
        judged = (self._judged.get(other) for other in self._engine.jobs_on(node) if other != job)
        return [other.job for other in judged if other is not None and other.state in RUNNING_STATES]

    def _gathering(self, incidents: Iterable[Incident], actions: Iterable[Action], store: Store) -> Gathering:
        settings = self._evidence
        if settings is None or not settings.ask:
            return Gathering()
        asked: list[Evidence] = []
        acted_on = {a.incident_id for a in actions if a.state not in FRUITLESS_STATES and not a.preliminary}
        for incident in incidents:
            if incident.state == "open" and incident.id not in acted_on:
                asked += store.page(EVIDENCE, {"incident_id": incident.id}, limit=PAGE_LIMIT_MAX).items
        return Gathering(self._gatherers, asked, settings.wait_s, settings.within_s, settings.nodes_max)

    def _worth_writing(self, old: Incident | None, new: Incident) -> bool:
        """Whether anything changed but that the verdict was seen once more."""
        if old is None or _story(old) != _story(new) or (old.hold, old.action) != (new.hold, new.action):
            return True
        return new.seen_s - old.seen_s > SEEN_GRAIN_RATIO * self._policy.verdict_gone_s

    def _events(
        self, incidents: Iterable[Incident], response: Response, known: dict[str, Incident], now_s: float
    ) -> Iterator[OutboundEvent]:
        for incident in incidents:
            old = known.get(incident.id)
            if old is None:
                yield outbound.incident_opened(incident, now_s)
            elif incident.state == "recovered":
                yield outbound.incident_resolved(incident, now_s)
            elif _story(old) != _story(incident):
                yield outbound.incident_updated(incident, now_s)
        for action in response.actions:
            event = self._action_event(action, now_s)
            if event is not None:
                yield event

    def _action_event(self, action: Action, now_s: float) -> OutboundEvent | None:
        if action.state == "requested":
            return outbound.action_requested(action, self._public_url, now_s)
        if action.state == "expired":
            return outbound.action_expired(action, self._public_url, now_s)
        if action.state == "withdrawn":
            return outbound.action_withdrawn(action, self._public_url, now_s)
        return None


def _blindness(judgement: Judgement) -> str:
    """Return why the server cannot judge the job, "" when it can."""
    if 2 * judgement.heard < judgement.members:
        return f"{judgement.heard} of the job's {judgement.members} nodes are heard"
    return ""


def _story(incident: Incident) -> tuple[object, ...]:
    """Return what subscribers are told of again when it changes."""
    return incident.fault, incident.nodes, incident.state, incident.kinds, incident.action
