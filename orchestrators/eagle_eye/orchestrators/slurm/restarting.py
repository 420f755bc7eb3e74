"""Restarts a job elsewhere: stops and holds it, sets nodes to avoid, releases it, and waits. Runs processes.

Held in between, because Slurm accepts ExcNodeList only for waiting jobs, and a job that is not held could be started
where it came from. Each step checks the state first, so that the next process can continue after one was killed.
"""

from __future__ import annotations

import getpass
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from eagle_eye.orchestrators.ledger import write_whole
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Cause, OrchestratorError, Restart
from eagle_eye.orchestrators.slurm.answers import ID_MAX, NONE_WORDS, SlurmJob, SlurmRefusedError
from eagle_eye.orchestrators.slurm.cluster import Cluster, scale
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
from eagle_eye.planning.plan import Plan

# The restarts that this process has begun, and the jobs that it holds, in a file: the next process goes on with them.
#
# Slurm has the rest. The number of restarts before ours is saved because it shows whether the restart that Slurm counts
# is the requested one.

RESTARTS_KEPT_MAX = 1_000
RESTARTS_KEPT_S = 14 * 86_400.0


class BegunRestart(msgspec.Struct, frozen=True):
    """A restart in progress or done; ``restarts`` is Slurm's count before it. Times are Unix seconds.

    ``without`` are the nodes that we wrote into the job's ExcNodeList; ``held`` says that we hold it for lack of nodes.
    For a job that follows a plan, ``job`` is its name in the plan and ``wanted`` how many nodes it wants; "" and 0 for
    others. ``became`` is the job that was submitted in its place, 0 for none.
    """

    slurm_id: int
    restarts: int
    without: list[str]
    at_s: float
    held: bool = False
    job: str = ""
    wanted: int = 0
    became: int = 0


class SlurmMemory:
    """The restarts begun, by action; thread-safe. Raises OrchestratorError for a file that is not ours."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._path = path
        self._now = now
        self._lock = threading.Lock()
        try:
            self._begun = msgspec.json.decode(path.read_bytes(), type=dict[str, BegunRestart])
        except FileNotFoundError:
            self._begun = {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OrchestratorError(f"{path} cannot be read: {error}; move it away to begin anew") from None

    def of(self, action_id: str) -> BegunRestart | None:
        """Return the restart that was begun for an action, None for none."""
        with self._lock:
            return self._begun.get(action_id)

    def keep(self, action_id: str, begun: BegunRestart) -> None:
        """Save it to disk; entries older than MEMORY_S, or beyond ENTRIES_MAX, are forgotten."""
        with self._lock:
            oldest_s = self._now() - RESTARTS_KEPT_S
            kept = {name: one for name, one in self._begun.items() if one.at_s > oldest_s and name != action_id}
            kept[action_id] = begun
            self._begun = dict(list(kept.items())[-RESTARTS_KEPT_MAX:])
            write_whole(self._path, msgspec.json.encode(self._begun))

    def of_job(self, slurm_id: int) -> list[BegunRestart]:
        """Return the restarts of a job, oldest first, with those of the job that it was submitted to replace."""
        return [one for one in self.all().values() if slurm_id in (one.slurm_id, one.became)]

    def all(self) -> dict[str, BegunRestart]:
        """Return all that is known, oldest first."""
        with self._lock:
            return dict(self._begun)


# Resubmits a job that may not be requeued, with the script and options stored by Slurm.
#
# Runs processes. The new job waits for the end of the old one (``afterany``), so that neither is lost if a process
# dies in between, and is cancelled again unless Slurm reports the same fields for both. Slurm does not report the
# environment at submission: the new job gets a login environment (``--export=NONE``).
SEPARATOR = "\x1f"  # not "|": users write some of these fields
# squeue --Format's field, and the sbatch option that sets it for the new job; "" is covered by another one.
FIELDS = {
    "Account": "account",
    "QOS": "qos",
    "Partition": "partition",
    "TimeLimit": "time",
    "NumNodes": "nodes",
    "NumTasks": "ntasks",
    "cpus-per-task": "cpus-per-task",
    "tres-per-node": "gres",
    "Feature": "constraint",
    "Licenses": "licenses",
    "Reservation": "reservation",
    "Name": "job-name",
    "WorkDir": "chdir",
    "STDOUT": "output",
    "STDERR": "error",
    "MinMemory": "",
    "OverSubscribe": "",
    "NumCPUs": "",
}
_MAY_DIFFER = ("STDOUT", "STDERR")  # these may contain the job's id
_SIZES = ("NumNodes", "NumTasks", "NumCPUs")


@dataclass(frozen=True)
class Resubmission:
    """Resubmits jobs. ``prefix`` is a command before sbatch, with {user} in it; () leaves others' jobs alone."""

    cluster: Cluster
    prefix: Sequence[str] = ()

    def find(self, job: SlurmJob, cause: Cause) -> int | None:
        """Return the job that was already submitted for this action, None for none."""
        form = f"JobID:{SEPARATOR},Comment:{SEPARATOR}"
        text = self.cluster.commands.run(
            "squeue", "--all", "--states=all", "--noheader", f"--user={job.user}", f"--Format={form}"
        )
        for line in text.split("\n"):
            number, _, comment = line.partition(SEPARATOR)
            if comment.rstrip().rstrip(SEPARATOR).endswith(_mark(job, cause)) and number.strip().isdecimal():
                return int(number)
        return None

    def submit(
        self,
        job: SlurmJob,
        without: Collection[str],
        cause: Cause,
        word: str = "",
        nodes: int | None = None,
        allow: Collection[str] = (),
    ) -> int:
        """Return the new job's id; it starts once the old one has ended, with ``word`` in its comment.

        ``nodes`` is how many it starts on; None: as many as the old one. It excludes the old one's excluded nodes,
        except ``allow``, plus ``without``. Raises CannotCarryOutError if it was not submitted.
        """
        prefix = self._prefix(job)
        said = self._fields(job.id)
        try:
            script = self.cluster.commands.run("scontrol", "write", "batch_script", str(job.id), "-")
        except SlurmRefusedError as error:
            raise CannotCarryOutError(f"job {job.id} may not be requeued, and its script: {error.said}") from None
        excluded = [name for name in self.cluster.hosts(self.cluster.excluded(job)) if name not in allow]
        avoid = ",".join(dict.fromkeys([*excluded, *without]))
        sized = {} if nodes is None or nodes == job.nodes_wanted else _sizes(said, job, nodes)
        wished = {**said, **sized}
        options = [
            f"--{option}={_value(field, wished[field])}"
            for field, option in FIELDS.items()
            if _given(wished[field], option)
        ]
        new_id = self._sbatch(
            [
                *options, *([f"--exclude={avoid}"] if avoid else []),
                "--no-requeue", "--open-mode=append", "--export=NONE",
                f"--dependency=afterany:{job.id}", f"--comment={' '.join(filter(None, [word, _mark(job, cause)]))}",
            ],
            script, prefix,
        )  # fmt: skip
        may_differ = (*_MAY_DIFFER, *(_SIZES if sized else ()))
        differs = [
            field for field, value in self._fields(new_id).items() if field not in may_differ and value != said[field]
        ]
        if differs:
            self.cluster.commands.run("scancel", str(new_id))
            raise CannotCarryOutError(
                f"job {job.id} may not be requeued, and submitted again it would differ in {', '.join(differs)}; "
                "it goes on"
            )
        return new_id

    def _prefix(self, job: SlurmJob) -> list[str]:
        if job.user == getpass.getuser():
            return []
        if not self.prefix:
            raise CannotCarryOutError(
                f"job {job.id} may not be requeued (Requeue=0), and this account may not submit it anew for {job.user} "
                "(--submit-prefix)"
            )
        return [word.replace("{user}", job.user) for word in self.prefix]

    def _fields(self, job_id: int) -> dict[str, str]:
        names = [*FIELDS, "Command"]
        form = ",".join(f"{name}:{SEPARATOR}" for name in names)
        text = self.cluster.commands.run(
            "squeue", "--all", "--states=all", "--noheader", f"--jobs={job_id}", f"--Format={form}"
        )
        values = [value.strip() for value in text.strip("\n").split(SEPARATOR)]
        if len(values) != len(names) + 1 or values[-1]:
            raise CannotCarryOutError(f"job {job_id} may not be requeued, and its options are not understood")
        said = dict(zip(names, values, strict=False))
        if re.search(r"\s", said.pop("Command")):
            raise CannotCarryOutError(f"job {job_id} may not be requeued, and its script was submitted with arguments")
        return said

    def _sbatch(self, options: Sequence[str], script: str, prefix: Sequence[str]) -> int:
        try:
            said = self.cluster.commands.run("sbatch", "--parsable", *options, before=prefix, given=script.encode())
        except SlurmRefusedError as error:
            raise CannotCarryOutError(f"submitting it again: {error.said}; the job goes on") from None
        number = said.strip().partition(";")[0]
        if not number.isdecimal() or not 0 < int(number) < ID_MAX:
            raise CannotCarryOutError(f"sbatch says {said[:80]!r}, no job's id")
        return int(number)


def _sizes(said: Mapping[str, str], job: SlurmJob, nodes: int) -> dict[str, str]:
    """Return the job's fields for so many nodes, with as many tasks on each as before."""
    tasks = said["NumTasks"]
    return {
        "NumNodes": str(nodes),
        **({"NumTasks": str(scale(int(tasks), job.nodes_wanted, nodes))} if tasks.isdecimal() else {}),
    }


def _mark(job: SlurmJob, cause: Cause) -> str:
    action = re.sub(r"[^A-Za-z0-9._:-]", "_", cause.action_id)
    return f"eagle-eye: in place of job {job.id}, action {action}"


def _given(value: str, option: str) -> bool:
    return bool(option) and value not in NONE_WORDS


def _value(field: str, value: str) -> str:
    return value.removeprefix("gres:") if field == "tres-per-node" else value


# The word in a job's comment that tells its script where the next attempt resumes.
#
# A requeued job keeps the environment of its submission, which cannot be changed, but a script can read its comment.
# The word is valid for one attempt only (SLURM_RESTART_COUNT): by the next restart its step is outdated.
_WORD = re.compile(r"eagle-eye:attempt=\d+:resume_from=\S*", re.ASCII)


def resume_word(attempt: int, resume_from: str) -> str:
    """Return the word that makes this attempt resume from there (docs/how-to/checkpoint.md: the line that reads it)."""
    return f"eagle-eye:attempt={attempt}:resume_from={resume_from}"


def with_word(comment: str, word: str) -> str:
    """Return the comment prefixed with the word, replacing an earlier one. Long comments are read truncated."""
    others = [part for part in comment.split(" ") if part and not _WORD.fullmatch(part)]
    return " ".join([word, *others])


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
