"""Restarts a job elsewhere: stops and holds it, sets nodes to avoid, releases it, and waits. Runs processes.

Held in between, because Slurm accepts ExcNodeList only for waiting jobs, and a job that is not held could be started
where it came from. Each step checks the state first, so that the next process can continue after one was killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.protocol import Cause, Restart
from eagle_eye.orchestrators.slurm.answers import NONE_WORDS, SlurmJob
from eagle_eye.orchestrators.slurm.cluster import Cluster
from eagle_eye.orchestrators.slurm.decisions import (
    HOLDS_NODES,
    Capacity,
    WhenFull,
    capacity_of,
    hold_for_room,
    phase_of,
    restarts_of,
    title_of,
    way_of,
)
from eagle_eye.orchestrators.slurm.errors import SlurmRefusedError
from eagle_eye.orchestrators.slurm.persisted_state import BegunRestart, SlurmMemory
from eagle_eye.orchestrators.slurm.resubmission import Resubmission
from eagle_eye.orchestrators.slurm.resume_word import resume_word, with_word
from eagle_eye.planning.plan import Plan

PACE_S = 1.0
PACE_S_MAX = 10.0


@dataclass(frozen=True)
class RestartTimeouts:
    """Timeouts in seconds: for a job's processes to exit, and for it to run again."""

    stop_s: float = 180.0
    run_s: float = 600.0
    when_full: WhenFull = "queue"


@dataclass(frozen=True)
class Time:
    """The clocks, replaceable in tests."""

    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Restarting:
    """Restarts jobs, with a plan also on fewer nodes. Every method raises CannotCarryOutError."""

    cluster: Cluster
    memory: SlurmMemory
    resubmission: Resubmission
    limits: RestartTimeouts
    time: Time

    def restart(self, jobs: Sequence[SlurmJob], request: Restart, plan: Plan | None = None) -> str:
        """Restart the job until it runs or waits in the queue; return which job, and where it runs."""
        cause, without = request.cause, request.without
        job_id = _id_of(jobs)
        begun = self.memory.of(cause.action_id)
        if begun is not None and restarts_of(jobs) == begun.restarts + 1:
            return self._go_on(jobs, begun, request, plan)
        if begun is not None and not jobs[0].requeues:
            resubmitted = self.resubmission.find(jobs[0], cause)
            if resubmitted is not None:
                return self._resubmitted(jobs, resubmitted, begun, cause)
        if restarts_of(jobs) > (request.over_attempt if begun is None else begun.restarts):
            return f"{title_of(jobs)} was restarted already; {self._runs(job_id, restarts_of(jobs), cause)}"
        jobs = self.settled(jobs)
        way = way_of(jobs, without, self.cluster.required_by(jobs))
        begun = BegunRestart(job_id, restarts_of(jobs), list(without), self.time.now())
        nodes = None
        if plan is not None:
            room = self.room(jobs, without, plan)
            begun = msgspec.structs.replace(begun, job=plan.job, wanted=room.wanted)
            nodes = room.starts_on
        self.memory.keep(cause.action_id, begun)
        if way == "resubmit":
            word = resume_word(0, request.resume_from) if request.resume_from else ""
            allow: Collection[str] = self._back(jobs, begun) if plan is not None else ()
            new_id = self.resubmission.submit(jobs[0], without, cause, word, nodes, allow)
            return self._resubmitted(jobs, new_id, begun, cause)
        self.cluster.requeue_held(jobs[0], incomplete=phase_of(jobs) in HOLDS_NODES)
        cause.tell(f"{title_of(jobs)} is being stopped; it will wait in the queue, held")
        return self._go_on(self._known(job_id), begun, request, plan)

    def wanted(self, jobs: Sequence[SlurmJob]) -> int:
        """Return how many nodes the job wants: as submitted, however few it runs on by plan."""
        known = (begun.wanted for begun in self.memory.of_job(_id_of(jobs)))
        return max(sum(job.nodes_wanted for job in jobs), *known, 0)

    def room(self, jobs: Sequence[SlurmJob], without: Collection[str], plan: Plan | None = None) -> Capacity:
        """Return the room for the job without some nodes; with a plan, on fewer than it wants."""
        own, nodes = self.cluster.names_of(jobs), self.cluster.nodes()
        if plan is None:
            return capacity_of(jobs, nodes, without, own)
        theirs = {*self.cluster.hosts(self.cluster.excluded(jobs[0]))} - self._avoided(jobs)
        return capacity_of(jobs, nodes, {*without, *theirs}, own, self.wanted(jobs), plan)

    def lay_out(self, jobs: Sequence[SlurmJob], room: Capacity) -> None:
        """Set the waiting job's number of nodes: those free for it, by plan, or all that it wants."""
        if room.plan is not None and room.starts_on != jobs[0].nodes_wanted:
            self.cluster.resize(jobs[0], room.starts_on)

    def avoid(self, jobs: Sequence[SlurmJob], nodes: Collection[str], allow: Collection[str] = ()) -> None:
        """Exclude the nodes for the waiting job, in addition to its user's; allow ``allow`` again."""
        for job in jobs:
            said = self.cluster.excluded(job)
            known = self.cluster.hosts(said)
            wanted = [*(name for name in known if name not in allow), *(name for name in nodes if name not in known)]
            if len(wanted) != len(known) or set(wanted) != set(known):
                self.cluster.exclude(job, ",".join(wanted))

    def settled(self, jobs: Sequence[SlurmJob]) -> Sequence[SlurmJob]:
        """Return the job once it is no longer completing: only then its final state shows."""
        job_id = _id_of(jobs)
        return self._wait(job_id, jobs, lambda found: phase_of(found) != "completing", self.limits.stop_s)

    def _go_on(self, jobs: Sequence[SlurmJob], begun: BegunRestart, request: Restart, plan: Plan | None) -> str:
        """Return how the job that was ordered to be requeued continues, from any state."""
        cause = request.cause
        jobs = self._requeued(begun, jobs)
        title = title_of(jobs)
        reported = self._tell_resume(jobs, begun.restarts + 1, request.resume_from)
        if phase_of(jobs) == "pending" and any(job.held for job in jobs):
            room = self.room(jobs, begun.without, plan)
            self.avoid(jobs, begun.without, allow=self._back(jobs, begun))
            why = hold_for_room(room, self.limits.when_full)
            if not why:
                try:
                    self.lay_out(jobs, room)
                except SlurmRefusedError as error:
                    why = f"it cannot be given {room.starts_on} nodes by plan: {error.said}"
            if why:
                self.memory.keep(cause.action_id, msgspec.structs.replace(begun, held=True))
                raise CannotCarryOutError(
                    f"{title} was stopped and is held: {why}. It goes on when one of its nodes is readmitted, or after "
                    f"scontrol release {jobs[0].name}"
                )
            self.cluster.release(jobs[0])
            reported += f"; {room.loss}" if room.loss else ""
            cause.tell(f"{title} waits in the queue{f'; {room.loss}' if room.loss else ''}")
        return f"{title} requeued{reported}; {self._runs(begun.slurm_id, begun.restarts + 1, cause)}"

    def _tell_resume(self, jobs: Sequence[SlurmJob], attempt: int, resume_from: str) -> str:
        """Put the attempt's resume word into the comment of the waiting job; return the outcome."""
        if not resume_from:
            return ""
        comment, word = self.cluster.comment(jobs[0]), resume_word(attempt, resume_from)
        if word not in comment.split():
            if phase_of(jobs) != "pending":
                return f", and started before it was told to resume from {resume_from}"
            try:
                self.cluster.set_comment(jobs[0], with_word(comment, word))
            except SlurmRefusedError as error:  # held for it, the job would not run at all
                return f", and not told to resume from {resume_from}: {error.said}"
        return f", told in its comment to resume from {resume_from}"

    def _resubmitted(self, jobs: Sequence[SlurmJob], new_id: int, begun: BegunRestart, cause: Cause) -> str:
        """Return how the resubmitted job, which starts once the old one has ended, continues."""
        self.memory.keep(cause.action_id, msgspec.structs.replace(begun, became=new_id))
        if phase_of(jobs) in (*HOLDS_NODES, "suspended", "pending"):
            self.cluster.cancel(jobs[0])
        cause.tell(f"{title_of(jobs)} is being cancelled; job {new_id} starts in its place")
        return f"{title_of(jobs)} cancelled and submitted again as job {new_id}; {self._runs(new_id, 0, cause)}"

    def _avoided(self, jobs: Sequence[SlurmJob]) -> set[str]:
        """Return the nodes that we excluded for the job; others in its ExcNodeList are its user's."""
        return {name for begun in self.memory.of_job(_id_of(jobs)) for name in begun.without}

    def _back(self, jobs: Sequence[SlurmJob], begun: BegunRestart) -> set[str]:
        """Return the nodes that we excluded earlier for the job, and that are in service again."""
        earlier = self._avoided(jobs) - {*begun.without}
        return {node.name for node in self.cluster.nodes(earlier) if node.usable} if earlier else set()

    def _requeued(self, begun: BegunRestart, jobs: Sequence[SlurmJob]) -> Sequence[SlurmJob]:
        """Return the job once it waits (or runs again). Raises CannotCarryOutError where it was ended meanwhile."""

        def done(found: Sequence[SlurmJob]) -> bool:
            phase = phase_of(found)
            if restarts_of(found) <= begun.restarts and phase not in (*HOLDS_NODES, "completing"):
                if phase != "failed":
                    ended = "+".join(found[0].words)
                    raise CannotCarryOutError(f"{title_of(found)} ended meanwhile ({ended}) and was not requeued")
                self.cluster.requeue_held(found[0], incomplete=False)  # it failed just before
                return False
            return restarts_of(found) > begun.restarts and phase in ("pending", *HOLDS_NODES)

        found = self._wait(begun.slurm_id, jobs, done, self.limits.stop_s)
        if not done(found):
            raise CannotCarryOutError(
                f"{title_of(found)} was requeued, and its processes have not ended after {self.limits.stop_s:g} s; it "
                f"stays held: scontrol release {found[0].name} once they have"
            )
        return found

    def _runs(self, job_id: int, restarts: int, cause: Cause) -> str:
        """Return where the job runs, or, after ``run_s``, that it still waits and for what."""
        reported = ""

        def over(found: Sequence[SlurmJob]) -> bool:
            nonlocal reported
            why = found[0].why
            if phase_of(found) == "pending" and why not in (reported, *NONE_WORDS):
                reported = why
                cause.tell(f"{title_of(found)} waits in the queue: {why}")
            return phase_of(found) not in ("pending", "configuring", "completing")

        found = self._wait(job_id, self._known(job_id), over, self.limits.run_s)
        phase, title = phase_of(found), title_of(found)
        if phase == "running" and restarts_of(found) >= restarts:
            return f"{title} runs again as attempt {restarts_of(found)} on {', '.join(self.cluster.names_of(found))}"
        words = "+".join(found[0].words)
        if phase == "configuring":
            nodes = ", ".join(self.cluster.names_of(found))
            return f"{title} has {nodes}, which still boot after {self.limits.run_s:g} s"
        if phase == "pending":
            held = " and is held by somebody" if any(job.held for job in found) else ""
            return f"{title} still waits in the queue after {self.limits.run_s:g} s{held}: {found[0].why}"
        if phase == "finished":
            return f"{title} ran again as attempt {restarts_of(found)} and has finished"
        raise CannotCarryOutError(f"{title} is {words} as attempt {restarts_of(found)}; it does not run again")

    def _wait(
        self, job_id: int, jobs: Sequence[SlurmJob], over: Callable[[Sequence[SlurmJob]], bool], within_s: float
    ) -> Sequence[SlurmJob]:
        """Return the job's state when ``over``, or after ``within_s``."""
        until_s = self.time.monotonic() + within_s
        pace_s = PACE_S
        while not over(jobs) and self.time.monotonic() < until_s:
            self.time.sleep(pace_s)
            pace_s = min(pace_s * 1.2, PACE_S_MAX)
            jobs = self._known(job_id)
        return jobs

    def _known(self, job_id: int) -> Sequence[SlurmJob]:
        jobs = self.cluster.jobs(job_id)
        if not jobs:
            raise CannotCarryOutError(f"Slurm does not know job {job_id} any more")
        return jobs


def _id_of(jobs: Sequence[SlurmJob]) -> int:
    return jobs[0].het_id or jobs[0].id
