"""Determines a process's job and rank from its initial environment, as the kernel keeps it.

The variables and their order are the hook's (``launch_variables``), so that both agree about a process. An observer
also needs names for jobs that the hook would call "default". The text is untrusted: any invalid value rejects the whole
process, since a guess would mix up two jobs' numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from eagle_eye.agent.processes.cycle_info import job_of
from eagle_eye.agent.processes.visible_devices import hides_gpus
from eagle_eye.agent.training_hook.launch_variables import ATTEMPTS, DIGITS_MAX, JOBS, RANK_SOURCES, is_number
from eagle_eye.agent.training_hook.launch_variables import job as job_named
from eagle_eye.agent.training_hook.message import DEVICES_MAX, RANKS_MAX
from eagle_eye.agent.training_hook.sender import Identity
from eagle_eye.schema.names import NAME_CHARS_MAX

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
