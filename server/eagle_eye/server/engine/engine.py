"""The engine: frames and job updates in, judgements out. Time is an argument, so live and backtest share this code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.learned.model_anomaly import NO_MODEL
from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.detectors.signs.unread_log import unread_log
from eagle_eye.detectors.types import Verdict, Window, WindowEvent
from eagle_eye.schema.frame import Frame, Rank
from eagle_eye.server.engine.detector_schedule import DetectorSchedule, build_detectors
from eagle_eye.server.engine.grid import CURVE_LINE_BYTES
from eagle_eye.server.engine.job_track import JobTrack, inherited, unreached_by
from eagle_eye.server.engine.judgement import FAILED_S, Judgement, SchedulerReports, failed_by_itself, hearing, since_s
from eagle_eye.server.engine.roster import GpuModels, Topology
from eagle_eye.server.engine.routing import (
    FORGET_JOB_S,
    HELD_STATES,
    Route,
    RouteTable,
    concerned,
    is_left,
    is_over,
    is_past,
    may_go,
    names_other_attempt,
    placing,
)
from eagle_eye.server.engine.settings import DetectionSettings
from eagle_eye.server.model.batch import Batch, ResolvedTemplate
from eagle_eye.server.model.records import Job

# Per-node columns for whole fleets: when each node was last heard, its interval, and whether it said goodbye.
#
# Nodes get places (column indexes) when first named, including members that were never heard. The place of a long-gone
# node is reused.

Floats = NDArray[np.float64]
Places = NDArray[np.intp]
PACE_S_MAX = 120.0  # upper bound on the interval that a node reports
FORGET_S = 86_400.0  # nodes without a job that were not heard for this long are forgotten; also how often to check
SLOW_INTERVALS = 1.5  # of a job: a node with a longer interval has its own patience
_ROOM = 256


class NodeTracks:
    """All nodes recently heard or named."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._free: list[int] = []  # unused places below the highest
        self._heard_s: Floats = np.full(_ROOM, -np.inf)
        self._interval_s: Floats = np.full(_ROOM, np.nan)
        self._farewell: NDArray[np.bool_] = np.zeros(_ROOM, dtype=np.bool_)
        self._looked_s: float | None = None

    def __contains__(self, node: object) -> bool:
        """Whether the node has a place."""
        return node in self._places

    @property
    def count(self) -> int:
        """Number of nodes heard."""
        return int(np.count_nonzero(self._heard_s > -np.inf))

    def place(self, node: str) -> int:
        """Return the node's place."""
        place = self._places.get(node)
        if place is None:
            place = self._places[node] = self._free.pop() if self._free else len(self._places)
            if place >= len(self._heard_s):
                self._heard_s = _longer(self._heard_s, -np.inf)
                self._interval_s = _longer(self._interval_s, np.nan)
                self._farewell = _longer(self._farewell, False)
        return place

    def places(self, nodes: Iterable[str]) -> Places:
        """Return the nodes' places, in their order: (N,)."""
        return np.array([self.place(node) for node in nodes], dtype=np.intp)

    def members(self, nodes: Iterable[str], memo: dict[Any, Any]) -> Places:
        """Return the places of a job's nodes; ``memo`` is emptied when a member joins."""
        known: Places | None = memo.get(NodeTracks)
        if known is None:
            known = memo[NodeTracks] = self.places(nodes)
        return known

    def meet(self, node: str, received_s: float, interval_s: float) -> int:
        """Record a node that reports, with its interval if it is new; return its place."""
        place = self.place(node)
        if self._heard_s[place] == -np.inf:
            self._heard_s[place] = received_s
            self._interval_s[place] = interval_s
        return place

    def forget_gone(self, now_s: float, in_jobs: Callable[[], Collection[str]]) -> bool:
        """Forget, once a day, nodes not heard for a day and not in ``in_jobs()``, those that have a job.

        Return whether it ran: then stored places are void, except for those of ``in_jobs()``.
        """
        if self._looked_s is None or now_s < self._looked_s:
            self._looked_s = now_s
        if now_s - self._looked_s < FORGET_S:
            return False
        self._looked_s = now_s
        kept = in_jobs()
        gone = [n for n, place in self._places.items() if self._heard_s[place] < now_s - FORGET_S and n not in kept]
        for node in gone:
            place = self._places.pop(node)
            self._heard_s[place], self._interval_s[place], self._farewell[place] = -np.inf, np.nan, False
            self._free.append(place)
        return True

    def hear(self, place: int, received_s: float, *, farewell: bool) -> None:
        """Record that a node was heard; ``farewell``: it said goodbye."""
        self._heard_s[place] = max(self._heard_s[place], received_s)
        self._farewell[place] = farewell

    def hear_all(self, places: Places, received_s: Floats) -> None:
        """Record that nodes were heard, none of them with a goodbye."""
        np.maximum.at(self._heard_s, places, received_s)
        self._farewell[places] = False

    def interval_s(self, node: str) -> float | None:
        """Return the node's reporting interval; None if never heard."""
        place = self._places.get(node)
        return None if place is None or self._heard_s[place] == -np.inf else float(self._interval_s[place])

    def longest_interval_s(self, nodes: Iterable[str]) -> float:
        """Return the longest interval of the nodes' agents, 1 s if none was heard yet."""
        known = [interval_s for interval_s in map(self.interval_s, nodes) if interval_s is not None]
        return max(known, default=1.0)

    def pace_s(self, node: str) -> float:
        """Return the reporting interval of a node that was heard."""
        return float(self._interval_s[self._places[node]])

    def set_interval_s(self, place: int, interval_s: float) -> bool:
        """Set a node's reporting interval; return whether it changed."""
        if self._interval_s[place] == interval_s:
            return False
        self._interval_s[place] = interval_s
        return True

    def farewell(self, places: Places) -> NDArray[np.bool_]:
        """Return whether each of the nodes has said goodbye: (N,)."""
        said: NDArray[np.bool_] = self._farewell[places]
        return said

    def heard_s(self, places: Places, interval_s: float, silent_intervals: float) -> Floats:
        """Return when each of the nodes was last heard, for a job of this interval: (N,), -inf for never.

        A node that reports far less often than the job's others (scraped by Prometheus, among agents) counts as heard
        for as long as its own interval allows.
        """
        own_s = self._interval_s[places]
        patience_s = silent_intervals * (np.minimum(own_s, PACE_S_MAX) - interval_s)
        found: Floats = self._heard_s[places] + np.where(own_s > SLOW_INTERVALS * interval_s, patience_s, 0.0)
        return found


def _longer(column: NDArray[Any], rest: object) -> NDArray[Any]:
    return np.concatenate([column, np.full(len(column), rest, dtype=column.dtype)])


WINDOW_BYTES_MAX = 5 << 29  # of all jobs' rows in view: a larger fleet keeps a shorter time
STEP_BYTES_MAX = 1 << 30  # of all ranks' steps: a larger fleet keeps fewer
CURVE_BYTES_MAX = 1 << 29  # of all jobs' curves
SPARE = 1.25  # allocated beyond what is kept


class Memory:
    """The limits per job; they only ever decrease."""

    def __init__(self) -> None:
        self._lines = sys.maxsize  # of each job's rows...
        self._steps = self._curve = sys.maxsize  # ...of its ranks' steps, and of its own course

    def limit(self, track: JobTrack) -> None:
        """Apply the limits to a job."""
        track.limit(self._lines)
        track.limit_steps(self._steps, self._curve)

    def bound(self, tracks: Collection[JobTrack]) -> None:
        """Make all jobs fit."""
        per_line = sum(track.bytes_per_line for track in tracks)
        lines = int(WINDOW_BYTES_MAX / SPARE) // max(per_line, 1)
        if lines < self._lines:
            # Lower than needed, so that a fleet that grows node by node is not resized for each.
            self._lines = lines - lines // 8
            for track in tracks:
                track.limit(self._lines)
        per_step = sum(track.bytes_per_step for track in tracks)
        steps = int(STEP_BYTES_MAX / SPARE) // max(per_step, 1)
        curve = int(CURVE_BYTES_MAX / SPARE) // (CURVE_LINE_BYTES * max(len(tracks), 1))
        if steps < self._steps or curve < self._curve:
            self._steps = steps - steps // 8 if steps < self._steps else self._steps
            self._curve = curve - curve // 8 if curve < self._curve else self._curve
            for track in tracks:
                track.limit_steps(self._steps, self._curve)


# Scheduler states of a job that should make steps. The engine makes no claim about jobs in other states.
RUNNING_STATES = frozenset({"running"})
LOOK_FOR_LEFT_S = 60.0  # how often to check whether a job's nodes now report other jobs
JOBS_MAX = 4_096


class Engine:
    """Holds the windows of all running jobs and judges them.

    ``watching_since_s`` is when observation began: silence before that means nothing. Frames may arrive late, twice or
    out of order. Nothing here reads a clock.
    """

    def __init__(
        self, settings: DetectionSettings, watching_since_s: float, model: LearnedModel | str = NO_MODEL
    ) -> None:
        self.settings = settings
        self._watching_since_s = watching_since_s
        self._model = model
        self._asking = DetectorSchedule(build_detectors(settings, model))
        self._nodes = NodeTracks()
        self.gpu_models = GpuModels()  # of all nodes that reported theirs
        self._jobs: dict[str, JobTrack] = {}
        self._declared: dict[str, Job] = {}
        self._assigned: dict[str, frozenset[str]] = {}  # the nodes that schedulers assigned to jobs
        self._words: dict[str, SchedulerReports] = {}
        self._jobs_of_node: dict[str, set[str]] = {}
        self._topology: Topology | None = None
        self._routes: dict[str, Route] = {}
        self._table = RouteTable()  # of rows; all of this epoch
        self._memory = Memory()
        self._looked_for_left_s = watching_since_s
        self._taken_s: dict[str, float] = {}  # when jobs came that another server watched before
        self._epoch = 0  # grows whenever a job begins, ends, or gets members or its first rank
        self.stale_rows_total = 0  # rows of an attempt that is over
        self.non_member_rows_total = 0  # rows of a later attempt from nodes that are not members of a declared job

    def resume_watching(self, now_s: float) -> None:
        """Restart the observation period: silence before ``now_s`` was the server's own downtime."""
        self._watching_since_s = now_s

    @property
    def detectors(self) -> tuple[str, ...]:
        """The names of all detectors."""
        return self._asking.names

    def use_model(self, model: LearnedModel | str) -> None:
        """Judge with another learned model from now on; a text says why there is none."""
        self._model = model
        self._asking = DetectorSchedule(build_detectors(self.settings, model))

    def unfilled(self) -> Engine:
        """Return another engine that judges alike and has observed no frame and no job yet."""
        other = Engine(self.settings, self._watching_since_s, self._model)
        other._topology, other._words = self._topology, dict(self._words)
        other._taken_s = dict(self._taken_s)
        return other

    def observe(self, frame: Frame, received_s: float) -> None:
        """Take in a frame, its times on the server's clock."""
        place = self._nodes.meet(frame.node, received_s, frame.interval_s)
        # A frame sent early, for an event alone, covers only part of an interval.
        if frame.blocks and self._nodes.set_interval_s(place, frame.interval_s) and frame.node in self._routes:
            self._table.drop(self._routes[frame.node])  # rows of the template state their own interval
            self._routes[frame.node].resolved = None
        self._nodes.hear(place, received_s, farewell=any(event.kind == "agent_stop" for event in frame.events))
        route = self._route(frame)
        for job in route.tracks:
            job.adopt_interval(self._nodes.pace_s(frame.node), for_good=bool(frame.blocks))
        if frame.blocks:
            route.place(frame)
        for event in frame.events:
            self.gpu_models.record_inventory(frame.node, event)
            window_event = WindowEvent(event.time_s, frame.node, event.device, event.kind, event.attributes)
            jobs_of_node = map(self._jobs.get, self._jobs_of_node.get(frame.node, ()))
            for job in concerned(window_event, jobs_of_node, route, frame.ranks):
                if self._concerns(window_event, job):
                    job.add_event(window_event)

    def observe_rows(self, batches: Iterable[Batch]) -> None:
        """Take in rows of numbers as ``observe`` does frames; those of one layout and time are placed together."""
        for _ in self.observing_rows(batches):
            pass

    def observing_rows(self, batches: Iterable[Batch]) -> Iterator[None]:
        """Take in rows of numbers, a part before each time this yields."""
        routed = []
        for batch in batches:
            nodes, found = self._table.routed(batch, self._route_of)
            self._nodes.hear_all(nodes, batch.received_s)
            routed.append(found)
            yield
        yield from placing(routed)

    def observe_job(self, job: Job) -> None:
        """Take in a scheduler's or launcher's report on a job; one about an older attempt is ignored."""
        known = self._jobs.get(job.job)
        if known is not None and job.attempt < known.attempt:
            return
        self._declared[job.job] = job
        self._assign(job)
        if known is None or job.attempt > known.attempt:
            if not job.ranks:
                return
            known = self._begin(
                job.job, job.attempt, self._nodes.longest_interval_s({rank.node for rank in job.ranks}), job.updated_s
            )
        elif known.superseded_by(job.ranks):
            known = self._begin_anew(known, job)
        elif known.resting and job.state in HELD_STATES:
            known.resting = False
            self._begin_epoch()
        if known.take_word(job):
            known.begin_anew(inherited(known, job.updated_s, self.settings.start_deadline_s))
            self._memory.limit(known)
            self._begin_epoch()
        if job.ranks and not known.declared:
            self._begin_epoch()
            known.declare(job.ranks)
            for rank in job.ranks:
                self._jobs_of_node.setdefault(rank.node, set()).add(job.job)

    def take_over(self, job: str, now_s: float) -> None:
        """Watch a job from now on that another server watched: silence before this means nothing."""
        self._taken_s[job] = now_s

    def give_up(self, job: str) -> None:
        """Drop the job, which another server watches from now on."""
        if job in self._jobs:
            self._drop(job)
        else:
            self._forget({job})

    def observe_scheduler(self, word: SchedulerReports) -> None:
        """Take in when a scheduler was heard and about which jobs."""
        self._words[word.source] = word

    def observe_topology(self, topology: Topology) -> None:
        """Take in the switch of each node and port, replacing earlier topology."""
        self._topology = topology

    def switches_of(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return the switches of those of the nodes of which it is known."""
        known = {} if self._topology is None else self._topology.switch_of_node
        return {node: switch for node in nodes if (switch := known.get(node))}

    def tick(self, now_s: float) -> list[Judgement]:
        """Judge every job."""
        return list(self.judging(now_s))

    def judging(
        self,
        now_s: float,
        concerned: Callable[[str], bool] = lambda _: False,
        mine: Callable[[str], bool] = lambda _: True,
    ) -> Iterator[Judgement]:
        """Judge every job that is ``mine``, one after the other; nothing may be observed before the last.

        Jobs that are over are kept while they are ``concerned`` by something on record.
        """
        self._let_rest(now_s)
        for track in list(self._jobs.values()):
            kept_s = FORGET_JOB_S if concerned(track.job) else self.settings.window_s
            if may_go(self._declared.get(track.job), track, now_s, kept_s):
                self._drop(track.job)
        self._forget([job.job for job in self._declared.values() if job.job not in self._jobs and is_past(job, now_s)])
        if self._nodes.forget_gone(now_s, lambda: {*self._jobs_of_node}.union(*(t.nodes for t in self._jobs.values()))):
            self._begin_epoch()
            self.gpu_models.keep(self._nodes)
        self._memory.bound(self._jobs.values())
        for track in list(self._jobs.values()):
            if mine(track.job):
                yield self._judge(track, now_s)

    def _let_rest(self, now_s: float) -> None:
        """Stop sending rows of nodes to jobs that have ended."""
        if look := now_s - self._looked_for_left_s >= LOOK_FOR_LEFT_S:
            self._looked_for_left_s = now_s
        reported = [(track, self._declared.get(track.job)) for track in self._jobs.values() if not track.resting]
        over = [track for track, job in reported if is_over(job, track, now_s)]
        left = [track for track, job in reported if look and job is None and is_left(track, self._routes)]
        for track in over:
            track.release()
            self._memory.limit(track)
        for track in (*over, *left):
            track.resting = True
        if over or left:
            self._begin_epoch()

    def window(self, track: JobTrack, now_s: float, watching_since_s: float) -> Window:
        """Return a job's window for an observer watching since ``watching_since_s``; views, not copies."""
        farewell = self._nodes.farewell(self._nodes.members(track.nodes, track.memo))
        named = self.gpu_models.of(track.series, track.memo)
        return track.window(now_s, self._heard_s(track), farewell, watching_since_s, self._topology, named)

    def tracks(self) -> Iterator[JobTrack]:
        """Yield the track of each job, for the API and metrics."""
        yield from self._jobs.values()

    def drops(self) -> dict[str, int]:
        """Return how much was left out of the windows of the jobs in memory, by reason."""
        tracks = self._jobs.values()
        return {
            "stale_attempt": self.stale_rows_total,
            "not_member": self.non_member_rows_total,
            "late_row": sum(track.late_total for track in tracks),
            "event_overflow": sum(track.events_dropped_total for track in tracks),
        }

    @property
    def node_count(self) -> int:
        """How many nodes were heard, without those long gone."""
        return self._nodes.count

    def jobs_on(self, node: str) -> list[str]:
        """Return the jobs in memory that have the node as a member in their latest attempt, by name."""
        return sorted(j for j in self._jobs_of_node.get(node, ()) if j in self._jobs and self._jobs[j].is_member(node))

    def _heard_s(self, track: JobTrack) -> Floats:
        return self._nodes.heard_s(
            self._nodes.members(track.nodes, track.memo), track.interval_s, self.settings.silent_intervals
        )

    def _judge(self, track: JobTrack, now_s: float) -> Judgement:
        declared = self._declared.get(track.job)
        state = declared.state if declared is not None and declared.attempt >= track.attempt else "running"
        verdicts: list[Verdict] = []
        blind: dict[str, str] = {}
        log = ""
        crashed = declared is not None and state == "failed" and failed_by_itself(declared)
        limit_s = max(self.settings.silent_floor_s, self.settings.silent_intervals * track.interval_s)
        judged = state in RUNNING_STATES or (crashed and now_s - since_s(declared) <= FAILED_S)
        if judged and track.nodes:
            since = max(self._watching_since_s, self._taken_s.get(track.job, self._watching_since_s))
            window = self.window(track, now_s, since)
            verdicts, blind = self._asking.judge_window(window)
            track.course.note_verdicts(verdicts)
            track.unreached = unreached_by(verdicts) or track.unreached
            heard_s, log = window.heard_s, unread_log(window)
        else:
            heard_s = self._heard_s(track)
        heard = hearing(track.job, track.started_s, self._words.values())
        return Judgement(
            job=track.job,
            attempt=track.attempt,
            now_s=now_s,
            verdicts=tuple(verdict for verdict in verdicts if not heard.is_awaited(verdict, now_s)),
            blind=blind,
            state=state,
            restart_owner=declared.restart_owner if declared else "",
            members=len(track.nodes),
            heard=int(np.count_nonzero(now_s - heard_s <= limit_s)),
            stepping=track.last_step is not None,
            advanced_s=track.advanced_s,
            ranks=track.ranks,
            watching_since_s=self._watching_since_s,
            crashed=crashed,
            hearing=heard,
            awaiting=any(not heard.covers(v.onset_s) and heard.can_answer(v, now_s) for v in verdicts),
            ends_s=declared.ends_s if declared else None,
            pace_left_ratio=declared.pace_left_ratio if declared else None,
            owner=declared.owner if declared else "",
            gpu_models=self.gpu_models.of(track.series, track.memo).of_node,
            checkpoints=track.checkpoints.stand(track.nodes, track.pace_s),
            log=log,
        )

    def _route(self, frame: Frame) -> Route:
        """Return where the frame's rows go: as before, unless ranks or jobs changed since the node's last frame."""
        route = self._routes.get(frame.node)
        if route is None or not route.fits(frame, self._epoch):
            self._table.drop(route)
            refused = self.stale_rows_total + self.non_member_rows_total
            tracks, named = self._jobs_in(frame)
            route = Route(self._nodes.place(frame.node), frame.ranks, frame.job, self._epoch, tracks, named)
            if refused == self.stale_rows_total + self.non_member_rows_total:  # otherwise every refusal is counted
                self._routes[frame.node] = route
            else:
                self._routes.pop(frame.node, None)
        return route

    def _route_of(self, resolved: ResolvedTemplate, time_s: float, received_s: float) -> Route:
        """Return where rows of the template go from now on."""
        place = self._nodes.meet(resolved.node, received_s, resolved.template.interval_s)
        if resolved.template.blocks:
            self._nodes.set_interval_s(place, resolved.template.interval_s)
        route = self._route(msgspec.structs.replace(resolved.hollow, time_s=time_s))
        for job in route.tracks:
            job.adopt_interval(self._nodes.pace_s(resolved.node), for_good=bool(resolved.template.blocks))
        kept = self._routes.get(resolved.node) is route
        if route.resolved is not None:  # rows routed by it may still wait to be placed
            self._table.drop(route)
            route = replace(route)
        route.lay_out(resolved)
        if kept:
            self._routes[resolved.node] = route
            self._table.put(route)
        return route

    def _jobs_in(self, frame: Frame) -> tuple[list[JobTrack], int]:
        """Return the jobs that the frame's rows belong to, those that it names first, and the number of these.

        Starts the attempts that this frame is the first to report.
        """
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
        named = len(found)
        for name in tuple(self._jobs_of_node.get(frame.node, ())):  # a job that begins may evict another one
            # Members keep receiving rows and events even while none of their ranks reports.
            known = self._of_assigned(name, frame)
            member = known is not None and not known.resting and known.is_member(frame.node)
            if known is not None and member and not names_other_attempt(frame.ranks, known):
                found.setdefault(name, known)
        return list(found.values()), named

    def _assign(self, job: Job) -> None:
        """Remember the nodes that a scheduler assigned to the job: each becomes a member once its agent was heard."""
        nodes = frozenset(job.nodes) if job.state in HELD_STATES else frozenset()
        if nodes != self._assigned.get(job.job, frozenset()):
            self._begin_epoch()
            self._assigned[job.job] = nodes
            for node in nodes:
                self._jobs_of_node.setdefault(node, set()).add(job.job)

    def _of_assigned(self, job: str, frame: Frame) -> JobTrack | None:
        """Return the job's track, with the frame's node as a member if its scheduler says so."""
        known, declared = self._jobs.get(job), self._declared.get(job)
        if declared is None or frame.node not in self._assigned.get(job, ()):
            return known
        if known is None or known.attempt < declared.attempt:
            known = self._begin(job, declared.attempt, self._nodes.pace_s(frame.node), frame.time_s)
        if known.attempt == declared.attempt:
            known.add_node(frame.node)
        return known

    def _concerns(self, event: WindowEvent, track: JobTrack) -> bool:
        """Whether the event is of this attempt: exits of the last attempt's ranks arrive after the next has begun."""
        if event.attributes.get("job", track.job) != track.job:
            return False
        if event.attributes.get("attempt", track.attempt) != track.attempt:
            self.stale_rows_total += 1
            return False
        return True

    def _admit(self, track: JobTrack, node: str, rank: Rank) -> bool:
        if track.declared and not track.is_member(node):
            return False
        if track.resting and track.job not in self._declared:
            track.resting = False
            self._begin_epoch()
        ranked = track.ranked
        column = track.add_series(node, rank.device, rank.rank, rank.role)
        if track.ranked is not ranked:  # from now on only ranks report training metrics
            self._begin_epoch()
        track.set_silence(column, rank.silent_s)
        self._jobs_of_node.setdefault(node, set()).add(track.job)
        return True

    def _begin_epoch(self) -> None:
        """Recompute every route: the route of a vanished node would keep a job's past alive forever."""
        self._epoch += 1
        self._routes.clear()
        self._table.clear()

    def _track(self, job: str, attempt: int, frame: Frame) -> JobTrack | None:
        known = self._jobs.get(job)
        if known is not None and attempt < known.attempt:
            self.stale_rows_total += 1
            return None
        if known is None or attempt > known.attempt:
            if known is not None and known.declared and not known.is_member(frame.node):
                # A node that is not a member must not end the attempt that the job's launcher declared.
                self.non_member_rows_total += 1
                return None
            known = self._begin(job, attempt, self._nodes.pace_s(frame.node), frame.time_s)
        return known

    def _begin(self, job: str, attempt: int, interval_s: float, started_s: float) -> JobTrack:
        if job not in self._jobs and len(self._jobs) >= JOBS_MAX:
            oldest = min(self._jobs.values(), key=lambda track: track.touched_s)
            self._drop(oldest.job)
        earlier = inherited(self._jobs.get(job), started_s, self.settings.start_deadline_s)
        track = JobTrack(job, attempt, interval_s, self.settings.window_s, started_s, earlier)
        self._memory.limit(track)
        self._jobs[job] = track
        self._begin_epoch()
        return track

    def _begin_anew(self, before: JobTrack, job: Job) -> JobTrack:
        """Begin the same attempt on other members; what was observed of those that stay is kept as far as it is events.

        A launcher that prepares an attempt may have to do without a node that it has named already.
        """
        nodes = {rank.node for rank in job.ranks}
        track = self._begin(job.job, job.attempt, before.interval_s, job.updated_s)
        for node in set(before.nodes) - nodes:
            self._jobs_of_node.get(node, set()).discard(job.job)
        for event in before.events:
            if event.node is None or event.node in nodes:
                track.add_event(event)
        return track

    def _drop(self, job: str) -> None:
        del self._jobs[job]
        self._begin_epoch()
        self._asking.forget(job)
        self._forget({job})

    def _forget(self, jobs: Collection[str]) -> None:
        """Forget what schedulers and launchers reported about jobs."""
        for job in jobs:
            self._declared.pop(job, None)
            self._taken_s.pop(job, None)
            self._assigned.pop(job, None)
        if jobs:
            left = ((node, names.difference(jobs)) for node, names in self._jobs_of_node.items())
            self._jobs_of_node = {node: names for node, names in left if names}
