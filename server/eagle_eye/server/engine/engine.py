"""The engine: frames and job updates in, judgements out. Time is an argument; live and backtest run this code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from eagle_eye.detectors.learned import NO_MODEL
from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.detectors.types import Happening, Verdict
from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.frame import Frame, Rank
from eagle_eye.server.engine.asking import Asking
from eagle_eye.server.engine.detectors import build_detectors
from eagle_eye.server.engine.job_track import JobTrack
from eagle_eye.server.engine.routing import Route
from eagle_eye.server.engine.settings import DetectionSettings
from eagle_eye.server.engine.topology import Topology
from eagle_eye.server.records import Job

# What the scheduler may say of a job that is meant to make steps. Any other word: the engine says nothing about it.
RUNNING_STATES = frozenset({"running"})
FORGET_JOB_S = 86_400.0  # a job that nobody mentioned for this long is dropped from memory
JOBS_MAX = 4_096
SLOW_INTERVALS = 1.5  # of the job: a node with a longer one has a pace of its own
PACE_S_MAX = 120.0  # whatever interval a node claims


@dataclass(slots=True)
class _NodeTrack:
    heard_s: float
    interval_s: float
    farewell: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the detectors said of one job at one moment.

    ``blind`` maps a detector that could not tell to the reason. ``state`` is the scheduler's word on the job,
    "running" where nobody said. ``heard`` of ``members`` nodes were heard lately: coverage. ``stepping`` says
    whether this attempt has made a step yet, ``advanced_s`` when the last one finished.
    """

    job: str
    attempt: int
    now_s: float
    verdicts: tuple[Verdict, ...]
    blind: dict[str, str] = field(default_factory=dict)
    state: str = "running"
    restart_owner: str = ""
    members: int = 0
    heard: int = 0
    stepping: bool = False
    advanced_s: float = 0.0
    ranks: tuple[MemberRank, ...] = ()
    watching_since_s: float = 0.0


class Engine:
    """Holds the windows of all running jobs and judges them.

    ``watching_since_s`` is when observation began: until then nobody's silence means anything. Frames may come late,
    twice or out of order. Nothing here reads a clock.
    """

    def __init__(
        self, settings: DetectionSettings, watching_since_s: float, model: LearnedModel | str = NO_MODEL
    ) -> None:
        self.settings = settings
        self._watching_since_s = watching_since_s
        self._asking = Asking(build_detectors(settings, model))
        self._nodes: dict[str, _NodeTrack] = {}
        self._jobs: dict[str, JobTrack] = {}
        self._declared: dict[str, Job] = {}
        self._jobs_of_node: dict[str, set[str]] = {}
        self._topology: Topology | None = None
        self._routes: dict[str, Route] = {}
        self._epoch = 0  # grows whenever a job begins, ends or gets members
        self.stale_rows_total = 0  # rows of an attempt that is over
        self.strangers_total = 0  # rows of a later attempt from nodes that are no members of a declared job

    def resume_watching(self, now_s: float) -> None:
        """Start the observer's patience anew: no silence before ``now_s`` was anybody's but ours."""
        self._watching_since_s = now_s

    def use_model(self, model: LearnedModel | str) -> None:
        """Judge by another learned model from now on; a text says why there is none."""
        self._asking = Asking(build_detectors(self.settings, model))

    def observe(self, frame: Frame, received_s: float) -> None:
        """Take in a frame, its times on the server's clock."""
        track = self._nodes.setdefault(frame.node, _NodeTrack(received_s, frame.interval_s))
        if frame.blocks:  # a frame sent early, for an event alone, covers only part of an interval
            track.interval_s = frame.interval_s
        track.heard_s = max(track.heard_s, received_s)
        track.farewell = any(event.kind == "agent_stop" for event in frame.events)
        route = self._route(frame)
        for job in route.tracks:
            job.adopt_interval(track.interval_s)
        if frame.blocks:
            route.place(frame)
        for event in frame.events:
            happening = Happening(event.time_s, frame.node, event.device, event.kind, event.attributes)
            for job in route.tracks:
                if self._concerns(happening, job):
                    job.add_event(happening)

    def observe_job(self, job: Job) -> None:
        """Take in the scheduler's or launcher's word on a job; an older attempt than known changes nothing."""
        known = self._jobs.get(job.job)
        if known is not None and job.attempt < known.attempt:
            return
        self._declared[job.job] = job
        if known is None or job.attempt > known.attempt:
            if not job.ranks:
                return
            known = self._begin(job.job, job.attempt, self._interval_s(job.ranks), job.updated_s)
        if job.ranks and not known.declared:
            self._epoch += 1
            known.declare(job.ranks)
            for rank in job.ranks:
                self._jobs_of_node.setdefault(rank.node, set()).add(job.job)

    def observe_topology(self, topology: Topology) -> None:
        """Take in which switch each node and port hangs on; what was known before is forgotten."""
        self._topology = topology

    def tick(self, now_s: float) -> list[Judgement]:
        """Judge every job."""
        self._forget(now_s)
        return [self._judge(track, now_s) for track in self._jobs.values()]

    def tracks(self) -> Iterator[JobTrack]:
        """Yield what is known of each job, for the API and metrics."""
        yield from self._jobs.values()

    def drops(self) -> dict[str, int]:
        """Return how much was left out of the windows of the jobs in memory, by reason."""
        tracks = self._jobs.values()
        return {
            "stale_attempt": self.stale_rows_total,
            "stranger": self.strangers_total,
            "late_row": sum(track.late_total for track in tracks),
            "event_overflow": sum(track.events_dropped_total for track in tracks),
        }

    def heard_s(self) -> dict[str, float]:
        """Return when each node was last heard."""
        return {node: track.heard_s for node, track in self._nodes.items()}

    def jobs_on(self, node: str) -> list[str]:
        """Return the jobs in memory that have the node as a member in their latest attempt, by name."""
        names = self._jobs_of_node.get(node, ())
        return sorted(name for name in names if name in self._jobs and self._jobs[name].is_member(node))

    def _heard_by_pace_s(self, interval_s: float) -> dict[str, float]:
        """Return when each node was last heard, for a job of this interval.

        A node that reports far less often than the job's others (scraped by Prometheus, among agents) counts as heard
        for as long as its own pace allows.
        """
        slow_s = SLOW_INTERVALS * interval_s
        return {
            node: seen.heard_s
            if seen.interval_s <= slow_s
            else seen.heard_s + self.settings.silent_intervals * (min(seen.interval_s, PACE_S_MAX) - interval_s)
            for node, seen in self._nodes.items()
        }

    def _judge(self, track: JobTrack, now_s: float) -> Judgement:
        declared = self._declared.get(track.job)
        state = declared.state if declared is not None and declared.attempt >= track.attempt else "running"
        verdicts: list[Verdict] = []
        blind: dict[str, str] = {}
        heard_s = self._heard_by_pace_s(track.interval_s)
        limit_s = max(self.settings.silent_floor_s, self.settings.silent_intervals * track.interval_s)
        if state in RUNNING_STATES and track.nodes:
            farewell = {node: seen.farewell for node, seen in self._nodes.items()}
            window = track.window(now_s, heard_s, farewell, self._watching_since_s, self._topology)
            verdicts, blind = self._asking.ask(window)
        return Judgement(
            job=track.job,
            attempt=track.attempt,
            now_s=now_s,
            verdicts=tuple(verdicts),
            blind=blind,
            state=state,
            restart_owner=declared.restart_owner if declared else "",
            members=len(track.nodes),
            heard=sum(now_s - heard_s.get(node, -np.inf) <= limit_s for node in track.nodes),
            stepping=track.last_step is not None,
            advanced_s=track.advanced_s,
            ranks=track.ranks,
            watching_since_s=self._watching_since_s,
        )

    def _route(self, frame: Frame) -> Route:
        """Return where the frame's rows go: as before, unless ranks or jobs have changed since the node's last one."""
        route = self._routes.get(frame.node)
        if route is None or not route.fits(frame, self._epoch):
            refused = self.stale_rows_total + self.strangers_total
            tracks = self._jobs_in(frame)
            ranked = tuple(track.ranked for track in tracks)
            route = Route(frame.ranks, frame.job, self._epoch, tracks, ranked, [], [])
            if refused == self.stale_rows_total + self.strangers_total:  # else every refusal is counted
                self._routes[frame.node] = route
            else:
                self._routes.pop(frame.node, None)
        return route

    def _jobs_in(self, frame: Frame) -> list[JobTrack]:
        """Return the jobs that the frame's rows belong to, beginning attempts that it is the first to show."""
        found: dict[str, JobTrack] = {}
        for rank in frame.ranks:
            track = self._track(rank.job, rank.attempt, frame)
            if track is not None and self._admit(track, frame.node, rank):
                found[rank.job] = track
        if not found and frame.job is not None and frame.job not in self._declared:
            track = self._jobs.get(frame.job) or self._track(frame.job, 0, frame)
            if track is not None and not track.ranked:
                track.add_node(frame.node)
                found[frame.job] = track
        for name in self._jobs_of_node.get(frame.node, ()):
            # Members keep their rows and events also while no rank of theirs says anything.
            known = self._jobs.get(name)
            if known is not None and known.is_member(frame.node) and not self._of_another_attempt(frame, known):
                found.setdefault(name, known)
        return list(found.values())

    def _concerns(self, event: Happening, track: JobTrack) -> bool:
        """Whether the event is of this attempt: the ends of the last attempt's ranks arrive when the next has begun."""
        if event.attributes.get("job", track.job) != track.job:
            return False
        if event.attributes.get("attempt", track.attempt) != track.attempt:
            self.stale_rows_total += 1
            return False
        return True

    def _interval_s(self, ranks: list[MemberRank]) -> float:
        """Return the longest interval of the members' agents, 1 s where none was heard yet."""
        known = [self._nodes[rank.node].interval_s for rank in ranks if rank.node in self._nodes]
        return max(known, default=1.0)

    def _of_another_attempt(self, frame: Frame, track: JobTrack) -> bool:
        return any(rank.job == track.job and rank.attempt != track.attempt for rank in frame.ranks)

    def _admit(self, track: JobTrack, node: str, rank: Rank) -> bool:
        if track.declared and not track.is_member(node):
            return False
        column = track.add_series(node, rank.device, rank.rank, rank.role)
        track.set_silence(column, rank.silent_s)
        self._jobs_of_node.setdefault(node, set()).add(track.job)
        return True

    def _track(self, job: str, attempt: int, frame: Frame) -> JobTrack | None:
        known = self._jobs.get(job)
        if known is not None and attempt < known.attempt:
            self.stale_rows_total += 1
            return None
        if known is None or attempt > known.attempt:
            if known is not None and known.declared and not known.is_member(frame.node):
                # A stranger's word must not end the attempt that the job's launcher declared.
                self.strangers_total += 1
                return None
            known = self._begin(job, attempt, self._nodes[frame.node].interval_s, frame.time_s)
        return known

    def _begin(self, job: str, attempt: int, interval_s: float, started_s: float) -> JobTrack:
        if job not in self._jobs and len(self._jobs) >= JOBS_MAX:
            oldest = min(self._jobs.values(), key=lambda track: track.touched_s)
            self._drop(oldest.job)
        before = self._jobs.get(job)
        earlier = (before.curve if len(before.curve.number) else before.earlier) if before else None
        track = JobTrack(job, attempt, interval_s, self.settings.window_s, started_s, earlier)
        self._jobs[job] = track
        self._epoch += 1
        return track

    def _forget(self, now_s: float) -> None:
        for job in [t.job for t in self._jobs.values() if now_s - t.touched_s > FORGET_JOB_S]:
            self._drop(job)

    def _drop(self, job: str) -> None:
        del self._jobs[job]
        self._epoch += 1
        self._asking.forget(job)
        self._declared.pop(job, None)
        for jobs in self._jobs_of_node.values():
            jobs.discard(job)
