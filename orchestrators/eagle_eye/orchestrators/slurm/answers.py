"""Parses squeue's and sinfo's output into jobs and nodes. Pure; strict, with untrusted input.

JSON is parsed from 23.02 on, which has all states of a job ("CANCELLED" and "COMPLETING"), before that columns. A query
is for one job or a few nodes, so an invalid line invalidates the whole answer: acting on the rest would be acting on a
guess.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import msgspec

from eagle_eye.orchestrators.protocol import CannotCarryOutError, RejectedError, ServerUnreachableError
from eagle_eye.schema.slurm import JobPhase, JobReading, NodeReading, read_job, read_node, state_names


# Errors between us and Slurm.
#
# CannotCarryOutError (orchestrators/protocol.py) └── SlurmError a command could not be run, or did not answer in time,
# or not with what was expected └── SlurmRefusedError Slurm answered, and said no
class SlurmError(CannotCarryOutError):
    """Slurm's state is unknown; the message names the command and is suitable for operators."""


class SlurmRefusedError(SlurmError):
    """Slurm refused; ``said`` is its last line on stderr."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said


# squeue --Format. Text formatted by Slurm or its plugins comes last; text written by users is not requested.
JOB_FIELDS = (
    "JobID",
    "ArrayJobID",
    "ArrayTaskID",
    "HetJobID",
    "State",
    "RestartCnt",
    "Requeue",
    "BatchFlag",
    "NumNodes",
    "NodeList",
    "ReqNodes",
    "Partition",
    "UserName",
    "PriorityLong",
    "PreemptTime",
    "Reason",
)
# sinfo --Format: the reason is arbitrary text, newlines included, and requested only where needed.
NODE_FIELDS = ("NodeList", "StateComplete", "Partition")
REASON_FIELD = "Reason"
SEPARATOR = "|"
ID_MAX = 1 << 32
RESTARTS_MAX = (1 << 31) - 1
NONE_WORDS = frozenset({"", "N/A", "(null)", "None", "none", "NONE"})


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One Slurm job: array tasks and components of a heterogeneous job are jobs of their own.

    ``words`` are its state names. ``nodes`` is Slurm's host list, "" for none, ``required`` likewise the nodes it
    requests by name; ``nodes_wanted`` how many it has, or waits for at least. ``array_id`` and ``het_id`` are 0 for a
    job that is neither; ``task`` is -1 likewise.
    """

    id: int
    array_id: int
    task: int
    het_id: int
    words: tuple[str, ...]
    restarts: int
    requeues: bool
    batch: bool
    nodes_wanted: int
    nodes: str
    required: str
    partitions: frozenset[str]
    user: str
    held: bool
    preempted: bool
    why: str

    @property
    def name(self) -> str:
        """Its id in commands. An array's last task has the array's own id, which would mean all its tasks."""
        return f"{self.array_id}_{self.task}" if self.array_id else str(self.id)

    @property
    def phase(self) -> JobPhase:
        """Its phase."""
        return self._reading.phase

    @property
    def completing(self) -> bool:
        """Whether processes of it may still be exiting, whatever its phase."""
        return self._reading.completing

    @property
    def _reading(self) -> JobReading:
        return read_job(self.words, preempted=self.preempted)


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node; ``words`` are its state names, ``reason`` why it is out, "" where none is given."""

    name: str
    words: frozenset[str]
    partitions: frozenset[str]
    reason: str

    @property
    def drained(self) -> bool:
        """Whether it is drained."""
        return self._reading.drained

    @property
    def down(self) -> bool:
        """Whether it is out of service, drained or not."""
        return self._reading.down

    @property
    def usable(self) -> bool:
        """Whether Slurm starts jobs on it, now or once it is free and back."""
        return self._reading.usable

    @property
    def free(self) -> bool:
        """Whether it is idle, and a job could start there now."""
        return self._reading.free

    @property
    def _reading(self) -> NodeReading:
        return read_node(self.words)


def jobs_of_text(text: str) -> tuple[SlurmJob, ...]:
    """Return the jobs of ``squeue --noheader --Format`` with JOB_FIELDS. Raises SlurmError."""
    return tuple(_read(_lines(text), _job_of_line, "squeue"))


def jobs_of_json(text: str) -> tuple[SlurmJob, ...]:
    """Return the jobs of ``squeue --json``. Raises SlurmError."""
    try:
        answer = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise SlurmError(f"squeue --json: not understood: {str(error)[:120]}") from None
    jobs = answer.get("jobs") if isinstance(answer, dict) else None
    if not isinstance(jobs, list):
        raise SlurmError("squeue --json: not understood: no list of jobs")
    return tuple(_read(jobs, _job_of_json, "squeue --json"))


def nodes_of_text(text: str) -> tuple[SlurmNode, ...]:
    """Return the nodes of ``sinfo --Node --noheader --Format`` with NODE_FIELDS, and REASON_FIELD or not.

    sinfo has a line for each partition of a node. Raises SlurmError.
    """
    found: dict[str, SlurmNode] = {}
    for node in _read(_lines(text), _node_of_line, "sinfo"):
        before = found.get(node.name)
        partitions = node.partitions | before.partitions if before else node.partitions
        found[node.name] = SlurmNode(node.name, node.words, partitions, node.reason)
    return tuple(found.values())


def format_of(fields: Sequence[str]) -> str:
    """Return the --Format argument: each field ended by SEPARATOR, so that none is cut off."""
    return ",".join(f"{field}:{SEPARATOR}" for field in fields)


def _lines(text: str) -> list[str]:
    """Return the lines; not splitlines, which also splits where Slurm does not."""
    return text.removesuffix("\n").split("\n") if text else []


def _read(items: Iterable[Any], read: Any, who: str) -> Iterable[Any]:
    for item in items:
        try:
            yield read(item)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise SlurmError(f"{who}: not understood: {str(item)[:120]!r} ({error})") from None


def _job_of_line(line: str) -> SlurmJob:
    fields = [field.strip() for field in line.split(SEPARATOR, len(JOB_FIELDS) - 1)]
    if len(fields) != len(JOB_FIELDS) or not fields[-1].endswith(SEPARATOR):
        raise ValueError(f"expected {len(JOB_FIELDS)} fields")
    said = dict(zip(JOB_FIELDS, fields, strict=True))
    return _job(
        job_id=int(said["JobID"]),
        array_id=_optional(said["ArrayJobID"]),
        task=_optional(said["ArrayTaskID"], -1),
        het_id=_optional(said["HetJobID"]),
        words=state_names(said["State"]),
        restarts=int(said["RestartCnt"]),
        requeues=_flag(said["Requeue"]),
        batch=_flag(said["BatchFlag"]),
        nodes_wanted=_at_least(said["NumNodes"]),
        nodes="" if said["NodeList"] in NONE_WORDS else said["NodeList"],
        required="" if said["ReqNodes"] in NONE_WORDS else said["ReqNodes"],
        partitions=said["Partition"],
        user=said["UserName"],
        held=said["PriorityLong"] == "0",
        preempted=said["PreemptTime"].isdecimal() and int(said["PreemptTime"]) > 0,
        why=said["Reason"].removesuffix(SEPARATOR),
    )


def _job_of_json(said: Any) -> SlurmJob:
    preempted = _number(said.get("preempt_time"))
    task = _number(said.get("array_task_id"))
    nodes, required = said.get("nodes") or "", said.get("required_nodes") or ""
    if not isinstance(nodes, str) or not isinstance(required, str):
        raise TypeError("nodes is no text")
    return _job(
        job_id=_number(said["job_id"]) or 0,
        array_id=_number(said.get("array_job_id")) or 0,
        task=-1 if task is None else task,
        het_id=_number(said.get("het_job_id")) or 0,
        words=state_names(said["job_state"]),
        restarts=_number(said["restart_cnt"]) or 0,
        requeues=bool(_number(said["requeue"])),
        batch=bool(_number(said["batch_flag"])),
        nodes_wanted=_number(said.get("node_count")) or 0,
        nodes=nodes,
        required=required,
        partitions=str(said.get("partition") or ""),
        user=str(said.get("user_name") or ""),
        held=_number(said["priority"]) == 0,
        preempted=bool(preempted),
        why=str(said.get("state_reason") or ""),
    )


def _job(*, job_id: int, array_id: int, task: int, partitions: str, restarts: int, **rest: Any) -> SlurmJob:
    if not 0 < job_id < ID_MAX or not 0 <= restarts <= RESTARTS_MAX or not rest["words"]:
        raise ValueError("an id, a number of restarts or a state out of range")
    is_task = task >= 0 and array_id > 0
    if not is_task:
        array_id, task = 0, -1
    names = frozenset(name for name in partitions.split(",") if name)
    return SlurmJob(id=job_id, array_id=array_id, task=task, partitions=names, restarts=restarts, **rest)


def _node_of_line(line: str) -> SlurmNode:
    *fields, reason = [field.strip() for field in line.split(SEPARATOR, len(NODE_FIELDS))]
    if len(fields) != len(NODE_FIELDS) or (reason and not reason.endswith(SEPARATOR)):
        raise ValueError(f"expected {len(NODE_FIELDS)} or {len(NODE_FIELDS) + 1} fields")
    name, state, partition = fields
    reason = reason.removesuffix(SEPARATOR).strip()
    words = frozenset(state_names(state))
    if not name or not words:
        raise ValueError("a node without a name or a state")
    partitions = frozenset({partition.rstrip("*")} - {""})
    return SlurmNode(name, words, partitions, "" if reason in NONE_WORDS else reason)


def _optional(text: str, otherwise: int = 0) -> int:
    """Return a number, or ``otherwise`` for Slurm's "none" and for the waiting tasks of an array ("3-9%1")."""
    return int(text) if text.isascii() and text.isdigit() else otherwise


def _at_least(text: str) -> int:
    """Return the lower number of "2" or "2-4"."""
    return int(text.partition("-")[0])


def _flag(text: str) -> bool:
    if text not in ("0", "1", "2"):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return text != "0"


def _number(value: Any) -> int | None:
    """Return a number in either of Slurm's formats; None: not set or infinite."""
    if isinstance(value, dict):
        if value.get("infinite") or not value.get("set", True):
            return None
        value = value.get("number")
    return value if isinstance(value, int) else None


KEPT_S = 10.0
KEPT_MAX = 10_000
ASK_S = 2.0
SOURCE = "slurm:"


class Asks(Protocol):
    """The part of a server client that is needed here."""

    def call(self, method: str, path: str, body: object = None, timeout_s: float = ASK_S) -> object:
        """Return the answer's JSON."""


class JobNames:
    """Slurm ids of jobs that may use another name (EAGLE_EYE_JOB); thread-safe."""

    def __init__(self, server: Asks, monotonic: Callable[[], float]) -> None:
        self._server = server
        self._monotonic = monotonic
        self._kept: dict[str, tuple[float, int | None]] = {}
        self._lock = threading.Lock()

    def id_of(self, job: str) -> int | None:
        """Return the id, None for a job that is not Slurm's. Raises SlurmError where that is unknown."""
        now_s = self._monotonic()
        with self._lock:
            kept = self._kept.get(job)
        if kept is not None and now_s - kept[0] < KEPT_S:
            return kept[1]
        try:
            found = self._ask(job)
        except (RejectedError, ServerUnreachableError) as error:
            # An action must not wait for a server that is away: what the name meant before still holds, and a number is
            # an id, for agents take it from Slurm. Whether that job runs where the action says, Slurm itself tells.
            found = _id(job) if kept is None else kept[1]
            if found is None:
                raise SlurmError(f"which of Slurm's jobs {job!r} is: {error}") from None
        with self._lock:
            if len(self._kept) >= KEPT_MAX:
                self._kept.clear()
            self._kept[job] = (now_s, found)
        return found

    def _ask(self, job: str) -> int | None:
        """Ask the server first: agents may name a job by a number that is not a Slurm id.

        Raises RejectedError, ServerUnreachableError.
        """
        try:
            answer = self._server.call("GET", f"/api/v1/jobs/{quote(job, safe='')}", timeout_s=ASK_S)
        except RejectedError as error:
            if error.status != 404:
                raise
            answer = None
        said = answer.get("scheduled_as") if isinstance(answer, dict) else None
        if isinstance(said, str) and said:
            return _id(said.removeprefix(SOURCE)) if said.startswith(SOURCE) else None
        return _id(job)


def _id(text: str) -> int | None:
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else 0
    return number if 0 < number < ID_MAX else None
