"""Parses Slurm's answers into jobs and nodes: squeue's and slurmrestd's JSON, squeue's and sinfo's columns. Pure.

JSON differs between versions (v0.0.37 to v0.0.44): a state is a word or a list of words, a number is plain or ``{"set":
true, "infinite": false, "number": 3}``. Both forms are accepted; other fields are ignored. Nothing is trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

import msgspec

from eagle_eye.schema.slurm import BadHostList, expand_hosts, read_job, read_node, state_names
from eagle_eye.server.jobs.source import (
    HELD_STATES,
    JOBS_MAX,
    NODES_MAX,
    TEXT_CHARS_MAX,
    ScheduledJob,
    ScheduledNode,
    ScheduledState,
    SourceFailed,
)
from eagle_eye.server.model.records import NodeState

# squeue --Format: a field, and after the colon its terminator. No field may contain user text.
JOB_FIELDS = (
    "JobID",
    "HetJobID",
    "State",
    "RestartCnt",
    "StartTime",
    "EndTime",
    "TimeLimit",
    "PreemptTime",
    "UserName",
    "NodeList",
)
# sinfo --Format: the reason is free text, and so comes last.
NODE_FIELDS = ("NodeList", "StateComplete", "Reason")
SEPARATOR = "|"
NO_LIMIT = ("UNLIMITED", "NOT_SET", "Partition_Limit", "N/A", "")
TIME_S_MAX = 4e9  # later than any real time of this century: Slurm's infinities
ATTEMPT_MAX = (1 << 31) - 1

# A heterogeneous job's state is the first of these that any of its components has.
_OF_COMPONENTS: tuple[ScheduledState, ...] = (
    "cancelled",
    "preempted",
    "timeout",
    "failed",
    "suspended",
    "running",
    "completing",
    "pending",
    "finished",
    "",
)

RecordT = TypeVar("RecordT", ScheduledJob, ScheduledNode)


class _Job(msgspec.Struct):
    job_id: Any
    job_state: Any
    het_job_id: Any = 0
    restart_cnt: Any = 0
    nodes: Any = ""
    start_time: Any = 0
    end_time: Any = 0
    time_limit: Any = None
    preempt_time: Any = 0
    user_name: Any = ""


class _Node(msgspec.Struct):
    name: str
    state: Any
    state_flags: Any = ()
    reason: Any = ""


class _Jobs(msgspec.Struct):
    jobs: list[_Job]
    errors: list[Any] = []


class _Nodes(msgspec.Struct):
    nodes: list[_Node]
    errors: list[Any] = []


_JOBS = msgspec.json.Decoder(_Jobs)
_NODES = msgspec.json.Decoder(_Nodes)


def jobs_of_json(body: bytes, left_out: Counter[str]) -> tuple[ScheduledJob, ...]:
    """Return the jobs of an answer; ignored ones are counted by reason in ``left_out``. Raises SourceFailed."""
    answer = _decoded(body, _JOBS)
    _refuse_more(len(answer.jobs), JOBS_MAX, "jobs")
    return _whole(_each(answer.jobs, _job_of_json, left_out))


def nodes_of_json(body: bytes, left_out: Counter[str]) -> tuple[ScheduledNode, ...]:
    """Return the nodes of an answer. Raises SourceFailed."""
    answer = _decoded(body, _NODES)
    _refuse_more(len(answer.nodes), NODES_MAX, "nodes")
    return tuple(_each(answer.nodes, _node_of_json, left_out))


def jobs_of_text(body: bytes, left_out: Counter[str]) -> tuple[ScheduledJob, ...]:
    """Return the jobs of ``squeue --noheader`` with JOB_FIELDS, each ended by SEPARATOR. Raises SourceFailed."""
    lines = body.decode("utf-8", "replace").splitlines()
    _refuse_more(len(lines), JOBS_MAX, "jobs")
    return _whole(_each(lines, _job_of_line, left_out))


def nodes_of_text(body: bytes, left_out: Counter[str]) -> tuple[ScheduledNode, ...]:
    """Return the nodes of ``sinfo --Node --noheader --Format`` with NODE_FIELDS, one per partition of a node."""
    lines = body.decode("utf-8", "replace").splitlines()
    _refuse_more(len(lines), 16 * NODES_MAX, "lines of nodes")
    found = {node.name: node for node in _each(lines, _node_of_line, left_out)}
    _refuse_more(len(found), NODES_MAX, "nodes")
    return tuple(found.values())


def _decoded(body: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        answer = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceFailed("malformed", f"Slurm's answer is not what is expected: {str(error)[:200]}") from None
    if answer.errors:
        first = answer.errors[0]
        said = first.get("description") or first.get("error") or first if isinstance(first, dict) else first
        raise SourceFailed("refused", f"Slurm answers with an error: {_printable(str(said))}")
    return answer


def _refuse_more(count: int, most: int, what: str) -> None:
    if count > most:
        raise SourceFailed("oversized", f"Slurm names {count} {what}; at most {most} are read")


def _each(items: Iterable[Any], read: Callable[[Any], RecordT], left_out: Counter[str]) -> Iterator[RecordT]:
    for item in items:
        try:
            record = read(item)
        except BadHostList:
            left_out["host_list"] += 1
            continue
        except (ValueError, TypeError, OverflowError):
            left_out["malformed"] += 1
            continue
        if not record.state:
            left_out["unknown_state"] += 1
        yield record


def _job_of_json(said: _Job) -> ScheduledJob:
    limit = _number(said.time_limit)
    return _job(
        _number(said.job_id) or 0,
        _number(said.het_job_id) or 0,
        state_names(said.job_state),
        _number(said.restart_cnt) or 0,
        said.nodes if isinstance(said.nodes, str) else "",
        _time(_number(said.start_time)),
        _time(_number(said.end_time)) if limit else None,
        _time(_number(said.preempt_time)) is not None,
        said.user_name if isinstance(said.user_name, str) else "",
    )


def _job_of_line(line: str) -> ScheduledJob:
    fields = line.split(SEPARATOR)
    if len(fields) != len(JOB_FIELDS) + 1:
        raise ValueError(f"{len(fields)} fields")
    job_id, first, state, restarts, started, ends, limit, preempted, user, nodes = (
        field.strip() for field in fields[:-1]
    )
    limited = limit not in NO_LIMIT
    return _job(
        int(job_id),
        int(first) if first.isdigit() else 0,
        state_names(state),
        int(restarts),
        nodes,
        _time(_plain(started)),
        _time(_plain(ends)) if limited else None,
        _time(_plain(preempted)) is not None,
        user,
    )


def _job(
    job_id: float,
    first: float,
    names: tuple[str, ...],
    restarts: float,
    nodes: str,
    started_s: float | None,
    ends_s: float | None,
    preempted: bool,
    user: str,
) -> ScheduledJob:
    if not 0 < job_id < 1 << 32 or not 0 <= restarts <= ATTEMPT_MAX:
        raise ValueError("a job's id or restarts out of range")
    state = _state(names, preempted)
    # A component of a heterogeneous job uses the first one's id, as SLURM_JOB_ID does.
    name = str(int(first)) if 0 < first < 1 << 32 else str(int(job_id))
    return ScheduledJob(
        id=name,
        name=name,
        state=state,
        attempt=int(restarts),
        nodes=expand_hosts(nodes),
        started_s=None if state == "pending" else started_s,  # for a waiting job it is an estimate
        ends_s=ends_s if state in HELD_STATES else None,
        said="+".join(names),
        owner=_printable(user),
    )


def _state(names: tuple[str, ...], preempted: bool) -> ScheduledState:
    """Return our state. A job whose nodes are still booting is treated like one waiting in the queue."""
    phase = read_job(names, preempted=preempted).phase
    if phase == "configuring":
        return "pending"
    return "" if phase == "unknown" else phase


def _whole(jobs: Iterable[ScheduledJob]) -> tuple[ScheduledJob, ...]:
    """Return the jobs with the components of heterogeneous ones merged."""
    found: dict[str, list[ScheduledJob]] = {}
    for job in jobs:
        found.setdefault(job.id, []).append(job)
    return tuple(components[0] if len(components) == 1 else _joined(components) for components in found.values())


def _joined(components: list[ScheduledJob]) -> ScheduledJob:
    states = {job.state for job in components}
    state = next(state for state in _OF_COMPONENTS if state in states)
    leading = next(job for job in components if job.state == state)
    ends = [job.ends_s for job in components if job.ends_s is not None]
    starts = [job.started_s for job in components if job.started_s is not None]
    return ScheduledJob(
        id=leading.id,
        name=leading.name,
        state=state,
        attempt=max(job.attempt for job in components),
        nodes=tuple(dict.fromkeys(node for job in components for node in job.nodes)),
        started_s=min(starts, default=None),
        ends_s=min(ends, default=None),
        said=leading.said,
        owner=leading.owner,
    )


def _node_of_json(said: _Node) -> ScheduledNode:
    return _node(said.name, (*state_names(said.state), *state_names(said.state_flags)), str(said.reason or ""))


def _node_of_line(line: str) -> ScheduledNode:
    name, state, reason = line.split(SEPARATOR, len(NODE_FIELDS) - 1)
    reason = reason.strip().removesuffix(SEPARATOR)
    return _node(name.strip(), state_names(state.strip()), "" if reason in ("none", "N/A") else reason)


def _node(name: str, names: tuple[str, ...], reason: str) -> ScheduledNode:
    (only,) = expand_hosts(name, 1)
    node = read_node(names)
    state: NodeState | Literal[""] = "in_service" if node.usable else ""
    if node.drained or node.down:
        state = "draining" if node.drained and node.busy else "excluded"
    return ScheduledNode(only, state, _printable(reason), node.drained, node.maintenance)


def _number(value: Any) -> float | None:
    """Return a number in either of Slurm's forms; None if not set, infinite or not a number."""
    if isinstance(value, dict):
        if value.get("infinite") or not value.get("set", True):
            return None
        value = value.get("number")
    return _plain(value) if isinstance(value, str) else value if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _time(value: float | None) -> float | None:
    return float(value) if value is not None and 0 < value < TIME_S_MAX else None


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:TEXT_CHARS_MAX])
