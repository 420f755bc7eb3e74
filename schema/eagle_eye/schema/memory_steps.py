"""The file in which a node's checkpoint store lists its steps, for choosing where a job resumes.

Also starts a store, for ranks and launchers.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection
from pathlib import Path

import msgspec

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
