"""The detection loop: runs the engine and policy on a clock, and writes the results to the store."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.schema.frame import Frame
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from eagle_eye.server.engine.engine import RUNNING_STATES, Engine
from eagle_eye.server.engine.idle_faults import NO_JOB
from eagle_eye.server.engine.judgement import Judgement, SchedulerReports
from eagle_eye.server.engine.policy import Weighing, weigh
from eagle_eye.server.engine.respond import Book, Gathering, often_accused, respond, situation_of, tells_of_an_exception
from eagle_eye.server.engine.settings import EvidenceSettings, PolicySettings
from eagle_eye.server.ingest.fleet import Resends
from eagle_eye.server.model.batch import Batch, ResolvedTemplate, Times
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import Derived, Incident, Job
from eagle_eye.server.monitor import announcements as closing
from eagle_eye.server.monitor.announcements import Announcement, announcement, together
from eagle_eye.server.monitor.watcher import ALL_JOBS, IncidentCounts, JobProgress, JobShare, Latest, StepProgress
from eagle_eye.server.store.open_records import OpenRecords
from eagle_eye.server.store.store import GPUS, INCIDENTS, JOBS, Change, Store
from eagle_eye.server.telemetry.counters import Latencies

# Queues input for the engine: rows that many nodes send at about the same time are applied together, later.
#
# While the detection loop evaluates jobs, all input waits, so that the data does not change during evaluation.

WAITING_MAX = 65_536  # rows
GATHERS = "evidence"  # the collector by which an agent reports that it can gather evidence


class Intake:
    """Durable frames and rows waiting for the engine, in the order of their arrival.

    ``gatherers`` are the nodes whose agents gather evidence, and when each was last heard.
    """

    def __init__(self, engine: Engine) -> None:
        self.gatherers: dict[str, float] = {}
        self.engine = engine
        self._waiting: list[Batch | Callable[[], None]] = []
        self._rows = 0
        self._held = False

    def observe(self, frame: Frame, received_s: float) -> None:
        """Take a frame."""
        self.observe_in_turn(functools.partial(self._show, frame, received_s))

    def observe_in_turn(self, show: Callable[[], None]) -> None:
        """Call ``show`` once the engine has everything that arrived before."""
        self._waiting.append(show)
        self.take_in()

    def observe_rows(self, batches: Sequence[Batch]) -> None:
        """Take durable rows of numbers."""
        self._waiting.extend(batches)
        self._rows += sum([len(batch.resolved) for batch in batches])
        if self._rows >= WAITING_MAX:
            self.take_in()

    def take_in(self) -> None:
        """Pass what waits to the engine; does nothing while held."""
        if not self._held:
            for _ in self.taking_in():
                pass

    def taking_in(self) -> Iterator[None]:
        """Pass what waits to the engine, in parts with a yield after each; after an error the rest keeps waiting."""
        waiting, self._waiting = deque(self._waiting), []
        self._rows = 0
        together: list[Batch] = []
        try:
            while waiting:
                one = waiting[0]
                if isinstance(one, Batch):
                    self._note_rows(one.resolved, one.received_s)
                    together.append(one)
                    waiting.popleft()
                    continue
                yield from self.engine.observing_rows(together)
                together = []
                waiting.popleft()
                one()
            yield from self.engine.observing_rows(together)
        finally:
            self._waiting[:0] = waiting
            self._rows += sum(len(one.resolved) for one in waiting if isinstance(one, Batch))

    def hold(self) -> None:
        """Keep input waiting until ``release``."""
        self._held = True

    def release(self) -> None:
        """Let input pass again."""
        self._held = False

    def _show(self, frame: Frame, received_s: float) -> None:
        self._note(frame.node, frame.collectors.get(GATHERS) == "ok", received_s)
        self.engine.observe(frame, received_s)

    def _note_rows(self, resolved: Sequence[ResolvedTemplate], received_s: Times) -> None:
        gather = [one.template.collectors.get(GATHERS) == "ok" for one in resolved]
        if True in gather or self.gatherers:
            for one, gathers, at_s in zip(resolved, gather, received_s.tolist(), strict=True):
                self._note(one.node, gathers, at_s)

    def _note(self, node: str, gathers: bool, received_s: float) -> None:
        if gathers:
            self.gatherers[node] = received_s
        else:
            self.gatherers.pop(node, None)


SLICE_S = 0.02  # maximum time that evaluating jobs may block the event loop at once
REST_RATIO = 6.0  # pause after a pass, times its busy time: uses a seventh of a core, and ingestion gets the rest
REST_TICKS_MAX = 2.0  # but the next pass starts after this many ticks at the latest
GAP_TICKS = 4.0  # the fleet counts as unwatched during a pause of the loop longer than this many ticks
GAP_FLOOR_S = 2.0
CHANGED_AT_ONCE = 128  # jobs whose changes are written in one transaction: bounds how long other writers wait
HISTORY_FRESH_S = 60.0
HISTORY_MAX = 1_000  # newest incidents examined for recurrence
CLOCK_STEP_S = 1.0  # difference of wall and monotonic time beyond which the wall clock was set
TICKS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LATEST_INTERVALS, LATEST_FLOOR_S = 4.0, 30.0  # how long a newest value counts as current

log = logging.getLogger(__name__)


class DetectionLoop:
    """Feeds the engine and, every tick, turns its judgements into incidents, actions and events in the store.

    The store is the only memory of incidents and actions: changes made by people and subscribers through the API take
    effect at the next tick, and a killed server continues where it stopped.
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
        """Create the loop. With ``evidence`` None, agents are not asked for evidence."""
        self._engine = engine
        self._store = store
        self._clock = clock
        self._policy = policy
        self._public_url = public_url
        self._evidence = evidence
        self._intake = Intake(engine)
        self.observe_rows = self._intake.observe_rows
        self._judged: dict[str, Judgement] = {}
        self._idle: Judgement | None = None  # of the nodes without a job
        self._ask_schedulers: Callable[[], None] = lambda: None
        self._count_fleet: Callable[[], int] = lambda: self._engine.node_count
        self._share: JobShare = ALL_JOBS
        self._resends: Resends | None = None
        self._past: Callable[[], Iterable[tuple[Frame, float] | Batch]] = tuple
        self._fleet_size = 0  # in this pass
        self._history: list[Incident] = []
        self._history_read_s = -HISTORY_FRESH_S
        self._often_accused: frozenset[str] = frozenset()  # nodes that may be recurrent by that history...
        self._recurrence_jobs: set[str] = set()  # ...and the jobs that have them
        self._records = OpenRecords(store)
        self._kept_back = 0
        self._escalations = 0
        self.tick_seconds = Latencies(PROMETHEUS_PREFIX + "detection_seconds", "Duration of a look at jobs.", TICKS_S)
        self._judged_s: float | None = None  # when all jobs were judged last, on the monotonic clock
        self._judged_wall_s = clock.now_s()
        self._ticked_s: float | None = None  # when what follows from that was on record
        self._unusable_s: float | None = None  # since when the records cannot be used
        self._recording_since_s = -math.inf  # since when what is judged is on record, without a break (Unix time)

    def observe(self, frame: Frame, received_s: float, offset_s: float) -> None:  # noqa: ARG002 - applied already
        """Take a durable frame."""
        self._intake.observe(frame, received_s)

    def observe_job(self, job: Job) -> None:
        """Take a job's state as its scheduler or launcher reported it."""
        if self._share.mine(job.job):
            self._intake.observe_in_turn(lambda: self._engine.observe_job(job))

    def judge_share(self, share: JobShare) -> None:
        """Judge only the jobs of this share from now on."""
        self._share = share

    def take_over(self, job: str) -> None:
        """Judge a job from now on that another cell judged; what is on record of it is observed separately."""
        now_s = self._clock.now_s()
        self._intake.observe_in_turn(lambda: self._engine.take_over(job, now_s))

    def give_up(self, job: str) -> None:
        """Drop what is known of a job that another cell judges from now on."""
        self._intake.observe_in_turn(lambda: self._engine.give_up(job))

    def observe_scheduler(self, word: SchedulerReports) -> None:
        """Take which jobs a scheduler reported, and when."""
        self._engine.observe_scheduler(word)

    def call_schedulers(self, ask: Callable[[], None]) -> None:
        """Call ``ask`` whenever a fault needs a scheduler's report."""
        self._ask_schedulers = ask

    def count_fleet(self, count: Callable[[], int]) -> None:
        """Have policy call ``count`` for the size of the fleet, once per pass; without it, all nodes heard count."""
        self._count_fleet = count

    def use_model(self, model: LearnedModel | str) -> None:
        """Use another learned model; a text gives the reason why there is none."""
        self._engine.use_model(model)

    def use_policy(self, policy: PolicySettings) -> None:
        """Use these policy settings from the next tick on."""
        self._policy = policy

    def recover(self, past: Iterable[tuple[Frame, float] | Batch]) -> None:
        """Rebuild the windows from the jobs on record and the recent past's rows and (frame, received_s)."""
        for _ in self._filling(self._engine, past):
            pass
        self._engine.resume_watching(self._clock.now_s())

    def follow(self, resends: Resends, past: Callable[[], Iterable[tuple[Frame, float] | Batch]]) -> None:
        """Rebuild the windows from ``past()`` once agents have sent again what another server had of them.

        Until then the detectors cannot tell of these agents' jobs whether what they do not see is there.
        """
        self._resends, self._past = resends, past

    def _filling(self, engine: Engine, past: Iterable[tuple[Frame, float] | Batch]) -> Iterator[None]:
        """Show an engine the jobs on record and the past; yields between parts."""
        for gpu in sorted(self._store.all(GPUS), key=lambda gpu: gpu.seen_s):  # agents report them once an hour
            engine.gpu_models.record_name(gpu.node, gpu.device, gpu.model)
        for job in self._store.all(JOBS):
            if self._share.mine(job.job):
                engine.observe_job(job)
        for one in past:
            if isinstance(one, Batch):
                engine.observe_rows([one])
            else:
                engine.observe(*one)
            yield

    def _refilling(self) -> Iterator[None]:
        """Once the recent past is whole, replace the engine by one that has seen it; yields between parts.

        What comes meanwhile is shown to that one.
        """
        if self._resends is None or not self._resends.ready():
            return
        self._resends.taken_in()
        began_s = self._clock.monotonic_s()
        engine = self._engine.unfilled()
        self._intake.hold()
        try:
            yield from self._filling(engine, self._past())
            self._engine = self._intake.engine = engine
        finally:
            self._intake.release()
        log.info(
            "the windows reach back as far as agents have sent again",
            extra={"seconds": round(self._clock.monotonic_s() - began_s, 2)},
        )

    async def run(self) -> None:
        """Evaluate all jobs every tick until cancelled."""
        while True:
            began_s = slice_s = self._clock.monotonic_s()
            busy_s = 0.0
            try:
                for _ in self._refilling():
                    if self._clock.monotonic_s() - slice_s >= SLICE_S:
                        await asyncio.sleep(0)
                        slice_s = self._clock.monotonic_s()
                for judging in self._looking(self._clock.now_s()):
                    # Agents wait for their answers meanwhile.
                    took_s = self._clock.monotonic_s() - slice_s
                    if took_s >= SLICE_S:
                        busy_s += took_s if judging else 0.0
                        await asyncio.sleep(0)
                        slice_s = self._clock.monotonic_s()
                now_s = self._clock.monotonic_s()
                busy_s += now_s - slice_s
                self.tick_seconds.observe(now_s - began_s)
                self._note_records(None)
            except StoreUnavailable as error:
                self._note_records(error)
            tick_s = self._engine.settings.tick_s
            await asyncio.sleep(min(max(tick_s, REST_RATIO * busy_s), REST_TICKS_MAX * tick_s))

    def _note_records(self, error: StoreUnavailable | None) -> None:
        """Log once that the records cannot be used, and once that they can again."""
        if error is not None and self._unusable_s is None:
            self._unusable_s = self._clock.monotonic_s()
            log.error(
                "detectors go on in memory, and nothing is decided while the records cannot be used; each tick tries"
                " again: %s",
                error,
            )
        elif error is None and self._unusable_s is not None:
            lasted_s = self._clock.monotonic_s() - self._unusable_s
            self._unusable_s = None
            log.warning("decisions are made again: the records could not be used for %.1f s", lasted_s)

    def tick(self, now_s: float) -> None:
        """Evaluate all jobs once and write the results."""
        for _ in self._refilling():
            pass
        for _ in self._looking(now_s):
            pass

    def _looking(self, now_s: float) -> Iterator[bool]:
        """Evaluate all jobs once and write the results; yields between parts.

        It yields False between parts of the intake, which takes equally long in total however often it runs: a longer
        backlog takes longer at once, and agents wait for it.
        """
        self._notice_gap(now_s)
        judgements: list[Judgement] = []
        self._intake.hold()
        try:
            for _ in self._intake.taking_in():
                yield False
            for judgement in self._engine.judging(now_s, self._records.concern, self._share.mine):
                judgements.append(judgement)
                yield True
        finally:
            self._intake.release()
        judgements = self._unsure(judgements)
        self._judged = {judgement.job: judgement for judgement in judgements}
        self._judged_s, self._judged_wall_s = self._clock.monotonic_s(), self._clock.now_s()
        if any(judgement.awaiting for judgement in judgements):
            self._ask_schedulers()
        self._fleet_size = self._count_fleet()
        self._decide(judgements, now_s)

    def _decide(self, judgements: Sequence[Judgement], now_s: float) -> None:
        """Write what follows from the judgements. Raises StoreUnavailable: the next pass decides from what it sees."""
        self._store.ensure_leading()  # without the lease nothing waits here for a database that may not answer
        self._read_history(now_s)
        self._records.refresh(self._since_s(now_s))
        judgements = self._recorded(judgements, now_s)
        self._idle = self._records.idle(now_s)
        self._recurrence_jobs = {job for node in self._often_accused for job in self._engine.jobs_on(node)}
        idle = (self._idle,) if self._share.mine(NO_JOB) else ()  # one server judges these, whichever hears the node
        changed = [
            judgement
            for judgement in (*judgements, *idle)
            if (judgement.verdicts or judgement.job in self._recurrence_jobs or self._records.concern(judgement.job))
            and not self._announced(judgement).change.empty
        ]
        for first in range(0, len(changed), CHANGED_AT_ONCE):
            self._write(changed[first : first + CHANGED_AT_ONCE], now_s)
        self._ticked_s = self._clock.monotonic_s()

    def _recorded(self, judgements: Sequence[Judgement], now_s: float) -> list[Judgement]:
        """Return the judgements, as of an observer who saw nothing while nothing could be recorded.

        What was seen meanwhile is in no record: an incident would seem to be over that was seen all the time.
        """
        if self._ticked_s is not None and self._clock.monotonic_s() - self._ticked_s > self._gap_s():
            self._recording_since_s = now_s
        since_s = self._recording_since_s
        return [
            judgement
            if judgement.watching_since_s >= since_s
            else dataclasses.replace(judgement, watching_since_s=since_s)
            for judgement in judgements
        ]

    def _gap_s(self) -> float:
        return max(GAP_TICKS * self._engine.settings.tick_s, GAP_FLOOR_S)

    def _unsure(self, judgements: list[Judgement]) -> list[Judgement]:
        """Return the judgements; of jobs whose recent past is not whole, all detectors cannot tell what they miss."""
        missing = set() if self._resends is None else self._resends.incomplete()
        if not missing:
            return judgements
        count = {track.job: len(missing.intersection(track.nodes)) for track in self._engine.tracks()}
        return [
            dataclasses.replace(
                judgement,
                blind={
                    **dict.fromkeys(
                        self._engine.detectors, f"the last minutes of {count[judgement.job]} nodes are not whole yet"
                    ),
                    **judgement.blind,
                },
            )
            if count.get(judgement.job)
            else judgement
            for judgement in judgements
        ]

    def ticked_s(self) -> float | None:
        """Return when the last tick ended, on the monotonic clock; None before the first."""
        return self._ticked_s

    def judged_s(self) -> float | None:
        """Return when all jobs were judged last, on the monotonic clock; None before the first time."""
        return self._judged_s

    def latest(self) -> Iterator[Latest]:
        """Yield the newest value of each series of each job, while its node is heard.

        After a restart, or once a job has ended, values older than LATEST_INTERVALS are not current and are left out.
        """
        self._intake.take_in()
        now_s = self._clock.now_s()
        for track in self._engine.tracks():
            since_s = now_s - max(LATEST_INTERVALS * track.interval_s, LATEST_FLOOR_S)
            for metric, values in track.latest(since_s).items():
                for (node, device), value in values.items():
                    if value == value:
                        yield Latest(metric, track.job, node, None if device < 0 else device, value)

    def blind(self) -> dict[str, str]:
        """Return the detectors that could evaluate none of the running jobs in the last tick, each with a reason."""
        running = [j for j in self._judged.values() if j.state == "running"]
        if not running:
            return {}
        everywhere = set.intersection(*(set(j.blind) for j in running))
        return {name: running[0].blind[name] for name in sorted(everywhere)}

    def incident_counts(self) -> IncidentCounts:
        """Return the counts of incident events held back, and of escalations."""
        return IncidentCounts(self._kept_back, self._escalations)

    def drops(self) -> dict[str, int]:
        """Return how much the windows of the jobs in memory left out, by reason."""
        return self._engine.drops()

    def progress(self, job: str) -> StepProgress | None:
        """Return the job's progress, or None for a job that no agent reports."""
        self._intake.take_in()
        track = next((t for t in self._engine.tracks() if t.job == job), None)
        if track is None:
            return None
        stepping, judged = track.last_step is not None, self._judged.get(job)
        return StepProgress(
            step=track.last_step,
            progressed_s=track.advanced_s if stepping else None,
            step_s=track.pace_s,
            checkpoints=track.checkpoints.stand(track.nodes),
            log=judged.log if judged is not None and judged.attempt == track.attempt else "",
            nodes=track.nodes,
        )

    def courses(self) -> list[JobProgress]:
        """Return the progress of each job evaluated in the last tick."""
        found = []
        for track in self._engine.tracks():
            judged = self._judged.get(track.job)
            if judged is None or judged.attempt != track.attempt:
                continue  # its state is unknown until it was evaluated
            stepping = track.last_step is not None
            found.append(
                JobProgress(
                    job=track.job,
                    attempt=track.attempt,
                    state=judged.state,
                    declared=track.declared,
                    started_s=track.started_s,
                    first_step=track.first_step,
                    step=track.last_step,
                    progressed_s=track.advanced_s if stepping else None,
                    step_s=track.pace_s,
                    nodes=track.nodes,
                    gpus=(len(track.ranks) if track.ranked else len(track.series)) or None,
                    heard=judged.heard,
                    metrics=track.metrics,
                    restart_owner=judged.restart_owner,
                    ends_s=judged.ends_s,
                    owner=judged.owner,
                )
            )
        return found

    def policy(self) -> PolicySettings:
        """Return the current policy settings."""
        return self._policy

    def explain(self, incident: Incident) -> Weighing | None:
        """Return policy's current assessment of the incident; None when its attempt is no longer evaluated."""
        judgement = self._idle if incident.job == NO_JOB else self._judged.get(incident.job)
        if judgement is None or judgement.attempt != incident.attempt:
            return None
        self._records.refresh(self._since_s(judgement.now_s))
        book = self._book(judgement)
        situation = situation_of(judgement, book, self._policy, self._count_fleet(), judgement.blindness)
        return weigh(incident, situation)

    def _close(self, now_s: float) -> None:
        """Close incidents that are over. Not before the first tick: no job has been evaluated until then."""
        if self._ticked_s is None:
            return
        judged = {*self._judged, NO_JOB}
        work = functools.partial(
            closing.closed, policy=self._policy, judged=judged, now_s=now_s, concerns=self._share.mine
        )
        if not work(self._store).empty:
            self._store.update(work)

    def _read_history(self, now_s: float) -> None:
        """Read the incident history occasionally: recurrence is about weeks, not seconds."""
        if self._clock.monotonic_s() - self._history_read_s >= HISTORY_FRESH_S:
            self._close(now_s)
            self._history = self._store.page(INCIDENTS, {}, limit=HISTORY_MAX).items
            self._often_accused = often_accused(self._history)
            self._history_read_s = self._clock.monotonic_s()

    def _notice_gap(self, now_s: float) -> None:
        """Do not count silence against nodes for a time when this loop did not run, or when the clock was set."""
        if self._judged_s is None:
            return
        passed_s = self._clock.monotonic_s() - self._judged_s
        stepped_s = (self._clock.now_s() - self._judged_wall_s) - passed_s
        if stepped_s > CLOCK_STEP_S:  # after a step back earlier rows stay the newest: nothing stalls
            for track in self._engine.tracks():
                track.set_clock_forward(stepped_s, self._judged_wall_s)
        if passed_s > self._gap_s() or abs(stepped_s) > CLOCK_STEP_S:
            said = {"unwatched_s": round(passed_s, 1), "clock_step_s": round(stepped_s, 1)}
            log.warning("nothing was watched for a time, or the clock was set", extra=said)
            self._engine.resume_watching(now_s)

    def _since_s(self, now_s: float) -> float:
        """Return the time since which actions count."""
        return now_s - max(self._policy.window_s, self._policy.repeat_window_s)

    def _write(self, judgements: Sequence[Judgement], now_s: float) -> None:
        """Write the consequences of judgements in one transaction."""
        reported: list[Announcement] = []

        def work(store: Store) -> Change:
            # Computed again inside the transaction, to include what people or subscribers changed meanwhile, and
            # for each judgement the actions requested for those before it.
            reported.clear()
            self._records.refresh(self._since_s(now_s))
            for judgement in judgements:
                if not self._share.still_mine(store, judgement.job):
                    continue  # another cell's since this pass began
                announced = self._announced(judgement)
                self._records.apply_change(announced.change)
                reported.append(announced)
            return together([one.change for one in reported])

        try:
            self._store.update(work)
        except BaseException:
            self._records.forget()
            raise
        self._kept_back += sum(one.kept_back for one in reported)
        self._escalations += sum(one.escalations for one in reported)

    def _announced(self, judgement: Judgement) -> Announcement:
        """Return the consequences of a judgement, given the records as last read."""
        book = self._book(judgement)
        given: list[str] = []

        def new_id(what: Derived) -> str:
            given.append(self._store.new_id(what, given))
            return given[-1]

        response = respond(
            judgement,
            book,
            self._policy,
            fleet_size=self._fleet_size,
            blind=judgement.blindness,
            evidence_id=lambda: f"ev_{secrets.token_hex(8)}",
            incident_id=new_id,
            action_id=new_id,
        )
        return announcement(response, book, self._policy, self._public_url, judgement.now_s)

    def _book(self, judgement: Judgement) -> Book:
        records = self._records
        mine, dismissed = records.incidents_of(judgement.job), records.dismissed_of(judgement.job)
        actions = records.actions(mine, self._since_s(judgement.now_s))
        named = [*(verdict.node for verdict in judgement.verdicts), *(incident.node for incident in mine)]
        accused = {node for node in named if node is not None}
        # Other jobs' incidents are of interest at the accused's switches alone.
        elsewhere = records.incidents_elsewhere(judgement.job) if self._engine.switches_of(accused) else []
        named_elsewhere = (node for one in elsewhere for node in (one.node, *one.nodes) if node is not None)
        drained = {node for a in actions if a.kind == "drain_node" and a.job == judgement.job for node in a.exclude}
        return Book(
            incidents=[*mine, *dismissed],
            actions=actions,
            history=self._history if judgement.job in self._recurrence_jobs else (),
            earlier=records.latest_of(judgement.job) if tells_of_an_exception(judgement) else (),
            gathering=self._gathering(mine),
            standing={one.node: one for one in records.nodes(sorted(accused | drained)) if one.state != "in_service"},
            neighbours={node: self._neighbours(node, judgement.job) for node in accused | drained},
            elsewhere=elsewhere,
            switch_of=self._engine.switches_of({*accused, *named_elsewhere}),
        )

    def _neighbours(self, node: str, job: str) -> list[str]:
        """Return the other jobs that run on the node."""
        judged = (self._judged.get(other) for other in self._engine.jobs_on(node) if other != job)
        return [other.job for other in judged if other is not None and other.state in RUNNING_STATES]

    def _gathering(self, incidents: Iterable[Incident]) -> Gathering:
        settings = self._evidence
        if settings is None or not settings.ask:
            return Gathering()
        asked = self._records.evidence_of(incidents)
        return Gathering(self._intake.gatherers, asked, settings.wait_s, settings.within_s, settings.nodes_max)
