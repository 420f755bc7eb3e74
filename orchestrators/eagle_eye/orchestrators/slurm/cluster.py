"""Queries and commands for the cluster, each one or two Slurm commands. Runs processes."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eagle_eye.orchestrators.slurm.answers import (
    JOB_FIELDS,
    NODE_FIELDS,
    NONE_WORDS,
    REASON_FIELD,
    SEPARATOR,
    SlurmError,
    SlurmJob,
    SlurmNode,
    SlurmRefusedError,
    format_of,
    jobs_of_json,
    jobs_of_text,
    nodes_of_text,
)

# Runs Slurm's commands: argument lists and never a shell, bounded time and output, errors with Slurm's message.
#
# Runs processes. The environment is cut down to what Slurm needs: SQUEUE_*, SINFO_* and SBATCH_* would change what the
# commands do, and LC_ALL=C fixes their language.
OUTPUT_BYTES_MAX = 64 << 20
ERROR_BYTES_MAX = 64 << 10
SAID_CHARS_MAX = 300
END_S = 2.0  # from terminate to kill
KEPT_VARIABLES = ("PATH", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "LD_LIBRARY_PATH", "HOME", "USER", "TZ")


def environment(environ: Mapping[str, str], conf: str) -> dict[str, str]:
    """Return the part of our environment passed to commands; ``conf`` is the path of slurm.conf, "" for the default."""
    kept = {name: environ[name] for name in KEPT_VARIABLES if name in environ}
    return {**kept, **({"SLURM_CONF": conf} if conf else {}), "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


@dataclass(frozen=True)
class Commands:
    """Runs Slurm's commands; thread-safe. ``folder`` is where they are, "" for the PATH.

    ``jwt_file`` holds their authentication token; None: munge. It is read for each command.
    """

    folder: str = ""
    timeout_s: float = 20.0
    environ: Mapping[str, str] = field(default_factory=lambda: environment(os.environ, ""))
    jwt_file: Path | None = None

    def run(self, *words: str, before: Sequence[str] = (), given: bytes = b"") -> str:
        """Return the command's output. Raises SlurmError.

        ``before`` is a command prefix (sudo), ``given`` its stdin.
        """
        command = str(Path(self.folder, words[0])) if self.folder else words[0]
        shown = " ".join(words[:2])
        environ = self._environment()
        try:
            with tempfile.TemporaryFile() as source:  # not a pipe: a command that does not read must not block us
                source.write(given)
                source.seek(0)
                process = subprocess.Popen(
                    [*before, command, *words[1:]],
                    stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    env=environ, start_new_session=True,
                )  # fmt: skip
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            remedy = "install Slurm's client commands here, or name their folder with --slurm-bin"
            raise SlurmError(f"{[*before, command][0]} cannot be run: {why}; {remedy}") from None
        try:
            out, err = self._read(process, shown)
        finally:
            _end(process)
        if process.returncode:
            lines = err.decode("utf-8", "replace").strip().splitlines() or ["nothing on stderr"]
            said = "".join(char for char in lines[-1] if char.isprintable())[:SAID_CHARS_MAX]
            raise SlurmRefusedError(f"{shown}: {said}", said)
        return out.decode("utf-8", "replace")

    def _environment(self) -> dict[str, str]:
        if self.jwt_file is None:
            return dict(self.environ)
        try:
            token = self.jwt_file.read_text(encoding="ascii").strip().removeprefix("SLURM_JWT=")
        except (OSError, UnicodeDecodeError) as error:
            raise SlurmError(f"--jwt-file {self.jwt_file}: {type(error).__name__}") from None
        if not token or not token.isprintable() or " " in token:
            raise SlurmError(f"--jwt-file {self.jwt_file}: expected one line, as scontrol token prints it")
        return {**self.environ, "SLURM_JWT": token}

    def _read(self, process: subprocess.Popen[bytes], shown: str) -> tuple[bytes, bytes]:
        """Return all of stdout and the beginning of stderr, once the process has exited. Raises SlurmError."""
        until_s = time.monotonic() + self.timeout_s
        read = {process.stdout: bytearray(), process.stderr: bytearray()}
        with selectors.DefaultSelector() as selector:
            for stream in read:
                assert stream is not None  # noqa: S101 - asked for above
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(max(until_s - time.monotonic(), 0.0)):
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stderr:
                        read[process.stderr] += part[: ERROR_BYTES_MAX - len(read[process.stderr])]
                    else:
                        read[process.stdout] += part
                if len(read[process.stdout]) > OUTPUT_BYTES_MAX:
                    raise SlurmError(f"{shown}: more than {OUTPUT_BYTES_MAX} bytes of output")
                if time.monotonic() >= until_s:
                    break
        try:
            process.wait(max(until_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{shown}: no answer within {self.timeout_s:g} s (--command-timeout)") from None
        return bytes(read[process.stdout]), bytes(read[process.stderr])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, and close its pipes."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    for word in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, word)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


JSON_SINCE = (23, 2)  # the version whose JSON has all of a job's states, and honours --jobs
QUICK_S = 4.0
UNKNOWN_JOB = "Invalid job id"
DENIED = ("Invalid user id", "Access/permission denied")
_GPUS = re.compile(r"(?:gres[:/])?gpu(?:[:=][^:=]+)*?[:=](\d{1,6})(?:\(.*\))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


@dataclass
class Cluster:
    """One Slurm cluster, thread-safe; every method raises SlurmError.

    ``node_prefix`` is prefixed to scontrol for changing nodes (sudo): an Operator may not do that.
    """

    commands: Commands
    node_prefix: Sequence[str] = ()
    _json: bool | None = None

    def quick(self) -> Cluster:
        """Return the same cluster for callers that wait for the answer: at most QUICK_S per command."""
        return replace(self, commands=replace(self.commands, timeout_s=min(QUICK_S, self.commands.timeout_s)))

    def jobs(self, job_id: int) -> tuple[SlurmJob, ...]:
        """Return the job, or all components of a heterogeneous one; () where Slurm does not know it (any more)."""
        found = self._jobs(job_id)
        leader = next((job.het_id for job in found if job.id == job_id), 0)
        if leader and leader != job_id:
            found = self._jobs(leader)
        # For the array's own id, squeue lists all its tasks.
        return tuple(job for job in found if job.id == job_id or (leader and job.het_id == leader))

    def running_on(self, nodes: Collection[str]) -> tuple[SlurmJob, ...]:
        """Return all jobs with something running on one of the nodes."""
        if not nodes:
            return ()
        return self._squeue("--states=running,suspended,completing,configuring", f"--nodelist={_names(nodes)}")

    def nodes(self, names: Collection[str] = ()) -> tuple[SlurmNode, ...]:
        """Return the nodes of these names that Slurm knows; without names all, but without their reasons."""
        only = (f"--nodes={_names(names)}",) if names else ()
        fields = (*NODE_FIELDS, REASON_FIELD) if names else NODE_FIELDS
        text = self.commands.run("sinfo", "--all", "--Node", "--noheader", *only, f"--Format={format_of(fields)}")
        return tuple(node for node in nodes_of_text(text) if not names or node.name in names)

    def hosts(self, host_list: str) -> tuple[str, ...]:
        """Return the names in a host list, in order."""
        return tuple(self.commands.run("scontrol", "show", "hostnames", host_list).split()) if host_list else ()

    def names_of(self, jobs: Iterable[SlurmJob]) -> tuple[str, ...]:
        """Return the nodes of the jobs."""
        return tuple(dict.fromkeys(name for job in jobs for name in self.hosts(job.nodes)))

    def required_by(self, jobs: Iterable[SlurmJob]) -> tuple[str, ...]:
        """Return the nodes that the jobs request by name."""
        return tuple(dict.fromkeys(name for job in jobs for name in self.hosts(job.required)))

    def excluded(self, job: SlurmJob) -> str:
        """Return the job's ExcNodeList in Slurm's format, "" for none."""
        # --Format has no field for it, and in scontrol's text a job's name could imitate one.
        text = self.commands.run("squeue", "--all", "--states=all", "--noheader", f"--jobs={job.id}", "--format=%A|%x")
        for line in text.splitlines():
            job_id, _, listed = line.strip().partition(SEPARATOR)
            if job_id == str(job.id):
                return "" if listed in NONE_WORDS else listed
        raise SlurmError(f"squeue does not name job {job.id} any more")

    def drain(self, node: str, reason: str) -> None:
        """Drain the node: nothing new starts, running jobs continue to their end."""
        self._update_node(node, "DRAIN", f"Reason={reason}")

    def undrain(self, node: SlurmNode) -> None:
        """Undrain the node; one that is also down takes no job before it is back."""
        self._update_node(node.name, "UNDRAIN" if node.down else "RESUME")

    def exclude(self, job: SlurmJob, host_list: str) -> None:
        """Exclude these nodes for the job, which is waiting."""
        self.commands.run("scontrol", "update", f"JobId={job.name}", f"ExcNodeList={host_list}")

    def comment(self, job: SlurmJob) -> str:
        """Return the job's comment, "" for none."""
        form = format_of(("JobID", "Comment"))
        text = self.commands.run(
            "squeue", "--all", "--states=all", "--noheader", f"--jobs={job.id}", f"--Format={form}"
        )
        _, *said = re.split(rf"^(\d+) *\{SEPARATOR}", text, flags=re.MULTILINE)  # a comment may have several lines
        found = dict(zip(said[::2], said[1::2], strict=True)).get(str(job.id))
        if found is None:
            raise SlurmError(f"squeue does not name job {job.id} any more")
        comment = found.strip().removesuffix(SEPARATOR).strip()
        return "" if comment in NONE_WORDS else comment

    def set_comment(self, job: SlurmJob, comment: str) -> None:
        """Set the job's comment."""
        self.commands.run("scontrol", "update", f"JobId={job.name}", f"Comment={comment}")

    def gpus_per_node(self, job: SlurmJob) -> int | None:
        """Return how many GPUs per node the job requests; None where it does not."""
        (said,) = self._fields(job, "tres-per-node")
        found = (_GPUS.fullmatch(part.strip()) for part in said.split(","))
        return sum(int(one[1]) for one in found if one) or None

    def resize(self, job: SlurmJob, nodes: int) -> None:
        """Set the waiting job's number of nodes, with as many tasks and CPUs on each as before.

        Never a range: a job with tasks per node then waits forever where more nodes are free than it has tasks for, and
        others get only the minimum.
        """
        counts = zip(("NumTasks", "NumCPUs"), self._fields(job, "NumTasks", "NumCPUs"), strict=True)
        scaled = [f"{name}={scale(int(said), job.nodes_wanted, nodes)}" for name, said in counts if said.isdecimal()]
        self.commands.run("scontrol", "update", f"JobId={job.name}", f"NumNodes={nodes}", *scaled)

    def requeue_held(self, job: SlurmJob, *, incomplete: bool) -> None:
        """Stop the job and requeue it, held; of a heterogeneous one all components.

        ``incomplete``: only if it has not ended by now. Without it Slurm also requeues an ended or cancelled one.
        """
        self.commands.run("scontrol", "requeuehold", *(("Incomplete",) if incomplete else ()), job.name)

    def release(self, job: SlurmJob) -> None:
        """Release the held job."""
        self.commands.run("scontrol", "release", job.name)

    def cancel(self, job: SlurmJob) -> None:
        """Cancel the job for good."""
        self.commands.run("scancel", job.name)

    def _fields(self, job: SlurmJob, *names: str) -> list[str]:
        """Return fields of the job that its user cannot write."""
        form = format_of(("JobID", *names))
        text = self.commands.run(
            "squeue", "--all", "--states=all", "--noheader", f"--jobs={job.id}", f"--Format={form}"
        )
        for line in text.splitlines():
            job_id, *said = (field.strip() for field in line.split(SEPARATOR))
            if job_id == str(job.id):
                return said[: len(names)]
        raise SlurmError(f"squeue does not name job {job.id} any more")

    def _jobs(self, job_id: int) -> tuple[SlurmJob, ...]:
        try:
            return self._squeue("--states=all", f"--jobs={job_id}")
        except SlurmRefusedError as error:
            if UNKNOWN_JOB in error.said:
                return ()
            raise

    def _squeue(self, *which: str) -> tuple[SlurmJob, ...]:
        if self._json is None:
            self._json = self._version() >= JSON_SINCE
        if self._json:
            return jobs_of_json(self.commands.run("squeue", "--all", *which, "--json"))
        text = self.commands.run("squeue", "--all", "--noheader", *which, f"--Format={format_of(JOB_FIELDS)}")
        return jobs_of_text(text)

    def _version(self) -> tuple[int, int]:
        said = self.commands.run("squeue", "--version")
        found = re.search(r"(\d{2})\.(\d{1,2})", said)
        if found is None:
            raise SlurmError(f"squeue --version says {said[:80]!r}, no version")
        return int(found[1]), int(found[2])

    def _update_node(self, node: str, state: str, *more: str) -> None:
        words = ("scontrol", "update", f"NodeName={_names([node])}", f"State={state}", *more)
        try:
            self.commands.run(*words, before=self.node_prefix)
        except SlurmRefusedError as error:
            remedy = "; this account may not change nodes: see --node-prefix" if error.said.endswith(DENIED) else ""
            raise SlurmRefusedError(f"node {node}: {error.said}{remedy}", error.said) from None


def scale(count: int, nodes: int, others: int) -> int:
    """Return the number of tasks or CPUs on ``nodes``, given ``count`` on ``others``, with as many on each node."""
    return -(-count * others // nodes) if nodes else count


def _names(names: Collection[str]) -> str:
    """Return names as one argument; refuses names that could be read as anything else."""
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise SlurmError(f"{name[:64]!r} is no node's name")
    return ",".join(names)
