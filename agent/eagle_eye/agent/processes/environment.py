"""Determines a process's job, rank and devices from its initial environment, as the kernel keeps it; a node's names.

The variables and their order are the hook's (``launch_variables``), so that both agree about a process. An observer
also needs names for jobs that the hook would call "default". The text is untrusted: any invalid value rejects the whole
process, since a guess would mix up two jobs' numbers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from eagle_eye.agent.training_hook.launch_variables import ATTEMPTS, DIGITS_MAX, JOBS, RANK_SOURCES, is_number
from eagle_eye.agent.training_hook.launch_variables import job as job_named
from eagle_eye.agent.training_hook.message import DEVICES_MAX, RANKS_MAX
from eagle_eye.agent.training_hook.sender import Identity
from eagle_eye.schema.names import NAME_CHARS_MAX

# What tells a process its node. NODE_NAME is a convention of Kubernetes manifests (downward API, spec.nodeName) and
# means nothing outside a pod.
NODE_NAME_VARIABLES: Mapping[str, str] = {
    "SLURMD_NODENAME": "Slurm",
    "EAGLE_EYE_NODE": "the launcher",
    "NODE_NAME": "Kubernetes",
}


class NodeName(NamedTuple):
    """A name of this node and its source."""

    source: str
    name: str


def same_node(one: str, other: str) -> bool:
    """Whether two names mean one node: equal ignoring case, or one is the other without its domain."""
    one, other = _plain(one), _plain(other)
    if one == other:
        return bool(one)
    if _is_address(one) or _is_address(other):
        return False
    short, _, domain = one.partition(".")
    other_short, _, other_domain = other.partition(".")
    return bool(short) and short == other_short and not (domain and other_domain)


def node_names(agent: str, host: str, full: str, environ: Mapping[str, str], *, pod: bool) -> tuple[NodeName, ...]:
    """Return all names of this node, the agent's first; unset ones are left out.

    ``host`` is the kernel's name, ``full`` the one with its domain. ``environ`` is a process's environment,
    ``pod`` whether that process runs in a pod.
    """
    given = [NodeName("the agent", agent), NodeName("the host", host), NodeName("the host with its domain", full)]
    given += [
        NodeName(f"{source} ({variable})", environ.get(variable, ""))
        for variable, source in NODE_NAME_VARIABLES.items()
        if pod or variable != "NODE_NAME"
    ]
    return tuple(item for item in given if item.name and len(item.name) <= NAME_CHARS_MAX and item.name.isprintable())


def name_conflicts(names: Iterable[NodeName]) -> list[str]:
    """Return, for people, each name that does not match the first; empty when all agree."""
    names = list(names)
    return [
        f"{other.source} calls this node {other.name!r}, {names[0].source} {names[0].name!r}"
        for other in names[1:]
        if not same_node(names[0].name, other.name)
    ]


def _plain(name: str) -> str:
    return name.strip().rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


# Extracts the job name from the paths of NVRx's cycle files. Pure: opens no file.
#
# NVIDIA's resiliency extension describes each cycle of a job, a restart inside it, in a file, and gives each rank the
# path of the link to the newest in ``NVRX_CURRENT_CYCLE_INFO``: ``<folder>/cycle_info.<job>.current``. The rest of the
# files, which nodes take part and which are spares, is the launcher's plan; this agent reports the ranks that run.
_CURRENT = re.compile(r"(?:.*/)?cycle_info\.([^/]{1,253})\.current")


def job_of(current: str) -> str:
    """Return the job in the path of a ``.current`` link; "" where there is none."""
    found = _CURRENT.fullmatch(current)
    return found[1] if found else ""


# Determines which GPU a process uses, as far as its environment shows; rows are NVML's indexes.
#
# CUDA numbers visible devices from 0 in the order of ``CUDA_VISIBLE_DEVICES`` and stops at the first invalid entry
# (CUDA programming guide, environment variables). Its indexes follow the PCI bus with ``CUDA_DEVICE_ORDER=
# PCI_BUS_ID``, and also without it where all GPUs are of one model; where they are not, the fastest is 0 and the
# environment is not enough: NVML's list of processes is.
#
# Slurm gives global ids in ``SLURM_STEP_GPUS`` (or ``SLURM_JOB_GPUS``, the batch script's), while its
# ``CUDA_VISIBLE_DEVICES`` counts from 0 within the job where devices are constrained by cgroups, and not where they
# are not. A container that was given some GPUs (``NVIDIA_VISIBLE_DEVICES``) sees only those, in the order of the bus.
ENTRIES_MAX = 1_024
_MIG_OF_OLD = re.compile(r"mig-(gpu-[0-9a-f-]{36})/\d{1,3}/\d{1,3}")  # drivers before 470: parent, GPU and compute id
_INDEX_DIGITS_MAX = 4


class Gpus(NamedTuple):
    """The node's GPUs: rows by UUID, including known MIG instances, and the rows in bus order."""

    by_uuid: Mapping[str, int]
    in_order: Sequence[int]


def gpus(devices_by_uuid: Mapping[str, int], devices_by_bus_id: Mapping[str, int]) -> Gpus:
    """Return the node's GPUs as this module looks them up."""
    by_uuid = {uuid.lower(): device for uuid, device in devices_by_uuid.items()}
    return Gpus(by_uuid, [device for _, device in sorted((key.lower(), row) for key, row in devices_by_bus_id.items())])


def hides_gpus(variables: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves the process no GPU."""
    text = variables.get("CUDA_VISIBLE_DEVICES")
    return text is not None and not _entries(text)


def named_device(variables: Mapping[str, str], node: Gpus) -> int | None:
    """Return the only GPU or MIG instance in CUDA_VISIBLE_DEVICES if given by UUID; None otherwise."""
    entries = _entries(variables.get("CUDA_VISIBLE_DEVICES", ""))
    return _by_uuid(entries[0], node) if len(entries) == 1 else None


def listed_device(variables: Mapping[str, str], local_rank: int, node: Gpus) -> int | None:
    """Return the rank's GPU among the visible ones: the only one, else the one at its local rank; None: unknown."""
    seen = _seen(variables, node)
    if seen is None:
        return None
    if len(seen) == 1:
        return seen[0]
    return seen[local_rank] if local_rank < len(seen) else None


def _seen(variables: Mapping[str, str], node: Gpus) -> list[int] | None:
    """Return the rows that the process sees, in CUDA's order; None where unknown."""
    given = _given(variables, node)
    text = variables.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return given
    entries = _entries(text)
    if not entries or not all(_is_index(entry) for entry in entries):
        rows = [_by_uuid(entry, node) for entry in entries]
        return [row for row in rows if row is not None] if None not in rows else None
    indexes = [int(entry) for entry in entries]
    slurm = _entries(variables.get("SLURM_STEP_GPUS") or variables.get("SLURM_JOB_GPUS", ""))
    if slurm and all(_is_index(entry) for entry in slurm):
        reported = _of_slurm(indexes, [int(entry) for entry in slurm])
        return None if reported is None else _rows(reported, node.in_order)
    return _rows(indexes, given if given is not None else node.in_order)


def _given(variables: Mapping[str, str], node: Gpus) -> list[int] | None:
    """Return the rows that the container was given, in bus order; None where unknown."""
    entries = _entries(variables.get("NVIDIA_VISIBLE_DEVICES", ""))
    rows: set[int] = set()
    for entry in entries:
        found = _rows([int(entry)], node.in_order) if _is_index(entry) else []
        row = found[0] if found else _by_uuid(entry, node)
        if row is None:  # also "all", "void" and device folders
            return None
        rows.add(row)
    order = {row: place for place, row in enumerate(node.in_order)}
    return sorted(rows, key=lambda row: order.get(row, row)) or None


def _of_slurm(indexes: Sequence[int], allocated: Sequence[int]) -> list[int] | None:
    """Return global indexes; None where counting within the job and globally are both possible and differ."""
    ways: list[list[int]] = []
    if all(index in allocated for index in indexes):
        ways.append(list(indexes))
    if all(index < len(allocated) for index in indexes):
        ways.append([allocated[index] for index in indexes])
    return ways[0] if ways and ways[0] == ways[-1] else None


def _rows(indexes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the rows at the indexes; without NVML's order the index itself, up to CUDA's first invalid entry."""
    if not order:
        return list(indexes)
    rows: list[int] = []
    for index in indexes:
        if index >= len(order):
            break
        rows.append(order[index])
    return rows


def _by_uuid(entry: str, node: Gpus) -> int | None:
    """Return the row of a UUID or of a prefix of one; None: unknown or ambiguous."""
    entry = entry.lower()
    if not entry.startswith(("gpu-", "mig-")):
        return None
    old = _MIG_OF_OLD.fullmatch(entry)
    if old:
        entry = old[1]
    if entry in node.by_uuid:
        return node.by_uuid[entry]
    found = [row for uuid, row in node.by_uuid.items() if uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _entries(text: str) -> list[str]:
    """Return the entries as CUDA reads them: up to the first invalid one."""
    entries: list[str] = []
    for item in text.split(",", ENTRIES_MAX)[:ENTRIES_MAX]:
        entry = item.strip()
        if not entry or entry.startswith("-"):
            break
        entries.append(entry)
    return entries


def _is_index(entry: str) -> bool:
    return entry.isascii() and entry.isdecimal() and len(entry) <= _INDEX_DIGITS_MAX


VALUE_BYTES_MAX = 8_192  # the UUIDs of 112 MIG instances take 4,700
_NUMBERS = tuple(
    dict.fromkeys([*(name for item in RANK_SOURCES for name in (item.rank, item.size, item.local) if name), *ATTEMPTS])
)
_NAMES = (*JOBS, "EAGLE_EYE_ROLE", "ROLE_NAME")
# What a launcher changes for each process it starts, and a rank leaves unchanged for its own children.
_LAUNCH = (*_NUMBERS, *JOBS, "GROUP_RANK", "SLURM_STEP_ID")
# What differs between the ranks of one launch, or when it starts them again.
_OWN = frozenset(
    {name for item in RANK_SOURCES for name in (item.rank, item.local)} | {"GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"}
)
_ELASTIC = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
_OTHERS = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS"),
    *("SLURMD_NODENAME", "NODE_NAME", "EAGLE_EYE_NODE", "NVRX_CURRENT_CYCLE_INFO"),
)
_WANTED = tuple(dict.fromkeys((*_LAUNCH, *_NAMES, *_OTHERS)))
_MARKS = (b"RANK=", b"SLURM_PROCID=", b"JOB_COMPLETION_INDEX=")  # without any of these there is no rank


class BadEnvironment(ValueError):
    """An environment that names a rank but is not trustworthy; the text says which variable and why."""


def may_name_a_rank(environ: bytes) -> bool:
    """Whether the environment is worth parsing; most on a host are not."""
    return any(mark in environ for mark in _MARKS)


def variables(environ: bytes) -> dict[str, str]:
    """Return the relevant variables from ``/proc/<pid>/environ``; of duplicates the first, as in Python.

    Invalid UTF-8 becomes surrogates, which no name may hold. Raises BadEnvironment for a value beyond the limit.
    """
    found: dict[str, str] = {}
    environ = b"\0" + environ
    for name in _WANTED:  # searched for, not split: a megabyte may hold half a million others
        at = environ.find(b"\0%s=" % name.encode())
        if at < 0:
            continue
        begin = at + len(name) + 2
        end = environ.find(b"\0", begin)
        value = environ[begin : end if end >= 0 else len(environ)]
        if len(value) > VALUE_BYTES_MAX:
            raise BadEnvironment(f"{name} has {len(value)} bytes; at most {VALUE_BYTES_MAX} are read")
        found[name] = value.decode("utf-8", "surrogateescape")
    return found


def launch(found: Mapping[str, str]) -> tuple[str, ...]:
    """Return what distinguishes a launcher from the processes it starts: equal for a rank and its children."""
    return tuple(found.get(name, "") for name in _LAUNCH)


def cohort(found: Mapping[str, str]) -> tuple[str, ...]:
    """Return what the ranks of one launch share: its values, and which variables number its ranks."""
    values = zip(_LAUNCH, launch(found), strict=True)
    return tuple("set" if value and name in _OWN else value for name, value in values)


def is_elastic_worker(found: Mapping[str, str]) -> bool:
    """Whether a launcher of torch's elastic kind started it, or what it was started by: torchrun, accelerate, NVRx.

    Others give their processes as much, but so do programs to their helpers: ``RANK`` and ``LOCAL_RANK`` are often set
    in the program. Where it may see no GPU, it is not one that has yet to open one.
    """
    return all(found.get(name) for name in _ELASTIC) and not hides_gpus(found)


def identity(found: Mapping[str, str], slurm_job: str = "") -> Identity | None:
    """Return who the process is; None where its environment names no rank.

    ``slurm_job`` is the job of the process's cgroup: where the environment names no job, it takes precedence over the
    name in NVRx's cycle file, and both over the hook's "default". Raises BadEnvironment.
    """
    if not any(found.get(item.rank) and (found.get(item.size) or not item.sized) for item in RANK_SOURCES):
        return None
    for name in _NUMBERS:
        _check_number(name, found.get(name, ""))
    environ = dict(found)
    if not job_named(found):
        environ["EAGLE_EYE_JOB"] = slurm_job or job_of(found.get("NVRX_CURRENT_CYCLE_INFO", ""))
    if found.get("ROLE_NAME", "default") != "default":  # torchrun's role, where the job gave it a name
        environ["EAGLE_EYE_ROLE"] = found.get("EAGLE_EYE_ROLE") or found["ROLE_NAME"]
    for name in _NAMES:
        _check_name(name, environ.get(name, ""))
    return _checked(Identity.of(environ))


def _checked(who: Identity) -> Identity:
    if not (who.rank < who.world_size <= RANKS_MAX and who.attempt < RANKS_MAX):
        raise BadEnvironment(
            f"rank {who.rank} of {who.world_size}, attempt {who.attempt}: at most {RANKS_MAX} are known"
        )
    if who.local_rank >= DEVICES_MAX:
        raise BadEnvironment(f"local rank {who.local_rank}: at most {DEVICES_MAX} on one node are known")
    return who


def _check_number(name: str, text: str) -> None:
    if text and not is_number(text):
        raise BadEnvironment(f"{name} is {text[:80]!r}; expected a number of at most {DIGITS_MAX} digits")


def _check_name(name: str, text: str) -> None:
    if len(text) > NAME_CHARS_MAX or not text.isprintable():
        raise BadEnvironment(f"{name} is {text[:80]!r}; expected at most {NAME_CHARS_MAX} printable characters")
