"""A job started again elsewhere: stopped and held, told which nodes to avoid, released, and waited for. Runs processes.

Held in between, because Slurm takes ExcNodeList of waiting jobs alone, and a job that is not held could be started
where it came from. Each step looks first, so that a process killed in between is taken up by the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.protocol import Cause, Restart
from eagle_eye.orchestrators.slurm.answers import NONE_WORDS, Job
from eagle_eye.orchestrators.slurm.cluster import Cluster
from eagle_eye.orchestrators.slurm.decisions import (
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
from eagle_eye.orchestrators.slurm.memory import Begun, Memory
from eagle_eye.orchestrators.slurm.resubmission import Resubmission
from eagle_eye.orchestrators.slurm.resume_word import resume_word, with_word

PACE_S = 1.0
PACE_S_MAX = 10.0


@dataclass(frozen=True)
class Limits:
    """How long is waited, in seconds: for a job's processes to end, and for it to run again."""

    stop_s: float = 180.0
    run_s: float = 600.0
    when_full: WhenFull = "queue"


@dataclass(frozen=True)
class Time:
    """The clocks, so that tests need not wait."""

    now: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Restarting:
    """Restarts jobs. Every method raises CannotCarryOutError."""

    cluster: Cluster
    memory: Memory
    resubmission: Resubmission
    limits: Limits
    time: Time

    def restart(self, jobs: Sequence[Job], request: Restart) -> str:
        """The job runs again, or waits for its turn; returns which, and where it runs."""
        cause, without = request.cause, request.without
        job_id = jobs[0].het_id or jobs[0].id
        begun = self.memory.of(cause.action_id)
        if begun is not None and restarts_of(jobs) == begun.restarts + 1:
            return self._go_on(jobs, begun, request)
        if begun is not None and not jobs[0].requeues:
            resubmitted = self.resubmission.find(jobs[0], cause)
            if resubmitted is not None:
                return self._resubmitted(jobs, resubmitted, begun, cause)
        if restarts_of(jobs) > (request.over_attempt if begun is None else begun.restarts):
            return f"{title_of(jobs)} was restarted already; {self._runs(job_id, restarts_of(jobs), cause)}"
        jobs = self.settled(jobs)
        way = way_of(jobs, without, self.cluster.required_by(jobs))
        begun = Begun(job_id, restarts_of(jobs), list(without), self.time.now())
        self.memory.keep(cause.action_id, begun)
        if way == "resubmit":
            word = resume_word(0, request.resume_from) if request.resume_from else ""
            return self._resubmitted(jobs, self.resubmission.submit(jobs[0], without, cause, word), begun, cause)
        self.cluster.requeue_held(jobs[0], incomplete=phase_of(jobs) == "running")
        cause.tell(f"{title_of(jobs)} is being stopped; it will wait in the queue, held")
        return self._go_on(self._known(job_id), begun, request)

    def room(self, jobs: Sequence[Job], without: Collection[str]) -> Capacity:
        """Return what room there is for the job without some nodes."""
        return capacity_of(jobs, self.cluster.nodes(), without, self.cluster.names_of(jobs))

    def avoid(self, jobs: Sequence[Job], nodes: Collection[str], allow: Collection[str] = ()) -> None:
        """The job, which waits, is not started on the nodes, nor where its user wants it not; again on ``allow``."""
        for job in jobs:
            said = self.cluster.excluded(job)
            known = self.cluster.hosts(said)
            wanted = [*(name for name in known if name not in allow), *(name for name in nodes if name not in known)]
            if len(wanted) != len(known) or set(wanted) != set(known):
                self.cluster.exclude(job, ",".join(wanted))

    def settled(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Return the job once it is not just ending: only then it shows how it ended."""
        job_id = jobs[0].het_id or jobs[0].id
        return self._wait(job_id, jobs, lambda found: phase_of(found) != "completing", self.limits.stop_s)

    def _go_on(self, jobs: Sequence[Job], begun: Begun, request: Restart) -> str:
        """Return how the job that was ordered to be requeued goes on, from wherever it is."""
        cause = request.cause
        jobs = self._requeued(begun, jobs)
        title = title_of(jobs)
        told = self._tell_resume(jobs, begun.restarts + 1, request.resume_from)
        if phase_of(jobs) == "pending" and any(job.held for job in jobs):
            self.avoid(jobs, begun.without)
            why = hold_for_room(self.room(jobs, begun.without), self.limits.when_full)
            if why:
                self.memory.keep(cause.action_id, _held(begun))
                raise CannotCarryOutError(
                    f"{title} was stopped and is held: {why}. It goes on when one of its nodes is readmitted, or after "
                    f"scontrol release {jobs[0].name}"
                )
            self.cluster.release(jobs[0])
            cause.tell(f"{title} waits in the queue")
        return f"{title} requeued{told}; {self._runs(begun.slurm_id, begun.restarts + 1, cause)}"

    def _tell_resume(self, jobs: Sequence[Job], attempt: int, resume_from: str) -> str:
        """The job's comment has the word for this attempt, where it still waits for it; returns what became of it."""
        if not resume_from:
            return ""
        comment, word = self.cluster.comment(jobs[0]), resume_word(attempt, resume_from)
        if word not in comment.split():
            if phase_of(jobs) != "pending":
                return f", and started before it was told to resume from {resume_from}"
            try:
                self.cluster.set_comment(jobs[0], with_word(comment, word))
            except SlurmRefusedError as error:  # held for it, the job would do nothing at all
                return f", and not told to resume from {resume_from}: {error.said}"
        return f", told in its comment to resume from {resume_from}"

    def _resubmitted(self, jobs: Sequence[Job], new_id: int, begun: Begun, cause: Cause) -> str:
        """Return how the job goes on that was submitted anew and starts once the old one has ended."""
        self.memory.keep(cause.action_id, begun)
        if phase_of(jobs) in ("running", "suspended", "pending"):
            self.cluster.cancel(jobs[0])
        cause.tell(f"{title_of(jobs)} is being cancelled; job {new_id} starts in its place")
        return f"{title_of(jobs)} cancelled and submitted again as job {new_id}; {self._runs(new_id, 0, cause)}"

    def _requeued(self, begun: Begun, jobs: Sequence[Job]) -> Sequence[Job]:
        """Return the job once it waits (or runs again). Raises CannotCarryOutError where it was ended meanwhile."""

        def done(found: Sequence[Job]) -> bool:
            phase = phase_of(found)
            if restarts_of(found) <= begun.restarts and phase not in ("running", "completing"):
                if phase != "failed":
                    ended = "+".join(found[0].words)
                    raise CannotCarryOutError(f"{title_of(found)} ended meanwhile ({ended}) and was not requeued")
                self.cluster.requeue_held(found[0], incomplete=False)  # it failed in the moment before
                return False
            return restarts_of(found) > begun.restarts and phase in ("pending", "running")

        found = self._wait(begun.slurm_id, jobs, done, self.limits.stop_s)
        if not done(found):
            raise CannotCarryOutError(
                f"{title_of(found)} was requeued, and its processes have not ended after {self.limits.stop_s:g} s; it "
                f"stays held: scontrol release {found[0].name} once they have"
            )
        return found

    def _runs(self, job_id: int, restarts: int, cause: Cause) -> str:
        """Return where the job runs, or that it still waits and for what, after ``run_s``."""
        told = ""

        def over(found: Sequence[Job]) -> bool:
            nonlocal told
            why = found[0].why
            if phase_of(found) == "pending" and why not in (told, *NONE_WORDS):
                told = why
                cause.tell(f"{title_of(found)} waits in the queue: {why}")
            return phase_of(found) not in ("pending", "completing")

        found = self._wait(job_id, self._known(job_id), over, self.limits.run_s)
        phase, title = phase_of(found), title_of(found)
        if phase == "running" and restarts_of(found) >= restarts:
            return f"{title} runs again as attempt {restarts_of(found)} on {', '.join(self.cluster.names_of(found))}"
        words = "+".join(found[0].words)
        if phase == "pending":
            held = " and is held by somebody" if any(job.held for job in found) else ""
            return f"{title} still waits in the queue after {self.limits.run_s:g} s{held}: {found[0].why}"
        if phase == "finished":
            return f"{title} ran again as attempt {restarts_of(found)} and has finished"
        raise CannotCarryOutError(f"{title} is {words} as attempt {restarts_of(found)}; it does not run again")

    def _wait(
        self, job_id: int, jobs: Sequence[Job], over: Callable[[Sequence[Job]], bool], within_s: float
    ) -> Sequence[Job]:
        """Return the job as it is when ``over``, or after ``within_s``."""
        until_s = self.time.monotonic() + within_s
        pace_s = PACE_S
        while not over(jobs) and self.time.monotonic() < until_s:
            self.time.sleep(pace_s)
            pace_s = min(pace_s * 1.2, PACE_S_MAX)
            jobs = self._known(job_id)
        return jobs

    def _known(self, job_id: int) -> Sequence[Job]:
        jobs = self.cluster.jobs(job_id)
        if not jobs:
            raise CannotCarryOutError(f"Slurm does not know job {job_id} any more")
        return jobs


def _held(begun: Begun) -> Begun:
    return Begun(begun.slurm_id, begun.restarts, begun.without, begun.at_s, held=True)
