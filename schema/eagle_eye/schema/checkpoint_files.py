"""Files and folders of checkpoints that several programs read: what a node's store publishes, steps on storage.

A store publishes the state of each job's checkpoints for monitoring, and its steps.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

STANDING_FILE = "standing.json"
STANDING_BYTES_MAX = 1 << 18
JOBS_MAX = 256
RANKS_MAX = 1_024  # per node: each may be a process of its own
OLDER_MAX = 16  # complete steps of one job, besides the newest
SAID_EVERY_S = 10.0  # even without changes: an older file is of a store that has ended or hangs
PERSIST_HANGS_S = 600.0  # one node writes to storage within minutes: after this, stop waiting for it

Count = Annotated[int, Meta(ge=0, le=1 << 53)]  # the largest integer that a float represents exactly
Seconds = Annotated[float, Meta(ge=0, le=1e12)]


class OlderStep(msgspec.Struct, frozen=True):
    """A complete step before the newest; ``captured_s`` (Unix) is when the last of this node's ranks captured it."""

    step: Count
    captured_s: Seconds


class JobStanding(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one job's checkpoints, as known to one node's store. Counts are since the store started.

    ``pids`` are the connected ranks, by process id as the store sees it. ``step`` is the newest that they have reached,
    captured or not, ``whole_step`` the newest that is complete on all nodes; None: none in this attempt. ``copies`` are
    the verified shards of ``whole_step`` here, this node's own and others', of ``copies_wanted``. ``older`` are the
    complete steps before it of which all these shards are here, the oldest first. ``blocked_s`` is summed over ranks.
    ``persisted_step`` is known only to the job's first node; ``persisting_for_s`` is how long this node has been
    writing, None while it has nothing to do or is done; the job's first node is done once all are.
    """

    job: str
    attempt: Count
    pids: Annotated[list[Count], Meta(max_length=RANKS_MAX)] = []
    step: Count | None = None
    whole_step: Count | None = None
    copies: Count = 0
    copies_wanted: Count = 0
    older: Annotated[list[OlderStep], Meta(max_length=OLDER_MAX)] = []
    captured: Count = 0
    skipped: Count = 0
    void: Count = 0
    blocked_s: Seconds = 0.0
    reserved_bytes: Count = 0
    sent_bytes: Count = 0
    persisted_step: Count | None = None
    persisting_step: Count | None = None
    persisting_for_s: Seconds | None = None
    damaged: Count = 0


class Standing(msgspec.Struct, frozen=True):
    """The state published by a store at ``time_s``, Unix seconds."""

    time_s: Seconds
    jobs: Annotated[list[JobStanding], Meta(max_length=JOBS_MAX)]


def encode_standing(standing: Standing) -> bytes:
    """Return the file's content."""
    return msgspec.json.encode(standing)


def decode_standing(content: bytes) -> Standing:
    """Return the contents of a file. Raises ValueError for content that no store writes, or that is too long."""
    if len(content) > STANDING_BYTES_MAX:
        raise ValueError(f"more than {STANDING_BYTES_MAX:,} bytes")
    try:
        return msgspec.json.decode(content, type=Standing)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no store's words: {error}") from None


def read_standing(folder: Path) -> Standing | None:
    """Return the state of the store in a folder, None if there is none. Raises ValueError as ``decode_standing``."""
    try:
        with (folder / STANDING_FILE).open("rb") as file:
            return decode_standing(file.read(STANDING_BYTES_MAX + 1))
    except OSError:
        return None


# A node's checkpoint store lists its steps in a file, for choosing where a job resumes. Ranks and launchers start it.

FOLDER_VARIABLE = "EAGLE_EYE_CHECKPOINT_STORE"
COPY_RATE_VARIABLE = "EAGLE_EYE_CHECKPOINT_COPY_RATE"  # --copy-rate of a store started without one
STEPS_FILE = "steps.json"
STEPS_BYTES_MAX = 16 << 20
MEMORY_PREFIX = "memory:"
STORE_WORDS = ["checkpoint", "store"]  # in a store's command line, after ``python -m`` and the module
STORE_SOCKET, STORE_LOG = "socket", "store.log"  # in its folder
# Environment that a store inherits. It outlives its starter, and the rest would make it look like a rank.
STORE_INHERITS = frozenset(
    {"HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV", COPY_RATE_VARIABLE}
)
STORE_IDLE_S = 60.0  # without any job or client, after which it ends


class MemoryStep(msgspec.Struct, frozen=True):
    """A verified copy of one rank's shard of one step. ``plan`` begins with the number of ranks, and a hyphen.

    ``attempt`` is the one that captured it: copies of different attempts do not form a step together.
    """

    job: str
    plan: str
    rank: int
    step: int
    captured_s: float
    attempt: int = 0


def store_folder(node: str) -> Path:
    """Return the folder of a node's store: from the environment, else one in shared memory for this user."""
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else Path(f"/dev/shm/eagle-eye-{os.getuid()}") / node  # noqa: S108 - it must be there


def spawn_store(program: list[str], folder: Path, node: str) -> None:
    """Start a node's store with the ``program`` eagle-eye, in its own session, so that it outlives its starter.

    It ends by itself once no client needs it, or another one has the folder. Raises OSError, CalledProcessError.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    words = [*program, *STORE_WORDS, "--folder", str(folder), "--node", node, "--exit-when-idle", f"{STORE_IDLE_S:g}"]
    # Neither a child of the rank nor, by its environment, taken for one: whatever ends ranks must not end it.
    environment = {name: value for name, value in os.environ.items() if name in STORE_INHERITS}
    with (folder / STORE_LOG).open("ab") as log:
        subprocess.run(
            ["/bin/sh", "-c", 'exec "$@" &', "sh", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            check=True,
        )


def read_steps(folder: Path, job: str) -> list[MemoryStep]:
    """Return the copies of a job's steps held by a store; none if there is no store, or it cannot be read."""
    try:
        with (folder / STEPS_FILE).open("rb") as file:
            found = msgspec.json.decode(file.read(STEPS_BYTES_MAX), type=list[MemoryStep])
    except (OSError, msgspec.DecodeError):
        return []
    return [one for one in found if one.job == job]


def whole_in_memory(copies: list[MemoryStep]) -> dict[int, float]:
    """Return the steps with a copy of every rank's shard, with the time when the last of them was captured."""
    held: dict[tuple[int, str, int], dict[int, float]] = {}
    for copy in copies:
        held.setdefault((copy.step, copy.plan, copy.attempt), {})[copy.rank] = copy.captured_s
    found: dict[int, float] = {}
    for (step, plan, _), ranks in held.items():
        if has_all_ranks(plan, ranks):
            found[step] = max(found.get(step, 0.0), *ranks.values())
    return found


def has_all_ranks(plan: str, ranks: Collection[int]) -> bool:
    """Return whether these are all ranks of a plan, whose name begins with their number; False without a number."""
    count = plan.partition("-")[0]
    return count.isdecimal() and set(ranks) == set(range(int(count)))


# On storage a checkpoint is a folder ``step_N``, for launchers and training programs. Torch.distributed.checkpoint
# writes ``.metadata`` last: without it a checkpoint is not complete.

METADATA = ".metadata"
_NAME = re.compile(r"step_(\d{1,18})", re.ASCII)


class StepFolder(NamedTuple):
    """A checkpoint folder. ``completed_s`` is the Unix time of its metadata; None: not complete."""

    step: int
    path: Path
    completed_s: float | None


def step_of(name: str) -> int | None:
    """Return the step of a folder by its name; None if it is not a checkpoint folder."""
    named = _NAME.fullmatch(name)
    return None if named is None else int(named[1])


def step_folders(directory: Path) -> list[StepFolder]:
    """Return the checkpoint folders in the directory, in no particular order; none if the directory does not exist.

    Raises OSError if it cannot be read: starting from nothing would then be wrong.
    """
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    named = ((step_of(path.name), path) for path in paths)
    return [StepFolder(step, path, _completed_s(path)) for step, path in named if step is not None]


def _completed_s(folder: Path) -> float | None:
    try:
        return (folder / METADATA).stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
