"""Resubmits a job that may not be requeued, with the script and options stored by Slurm.

Runs processes. The new job waits for the end of the old one (``afterany``), so that neither is lost if a process dies
in between, and is cancelled again unless Slurm reports the same fields for both. Slurm does not report the environment
at submission: the new job gets a login environment (``--export=NONE``).
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.protocol import Cause
from eagle_eye.orchestrators.slurm.answers import ID_MAX, NONE_WORDS, SlurmJob
from eagle_eye.orchestrators.slurm.cluster import Cluster, scale
from eagle_eye.orchestrators.slurm.errors import SlurmRefusedError

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
