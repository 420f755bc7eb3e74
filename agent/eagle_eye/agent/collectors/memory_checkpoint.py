"""State of in-memory checkpoints, from files that this node's checkpoint stores write. Touches: the files, /proc."""

from __future__ import annotations

import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from eagle_eye.agent.collector import Observed
from eagle_eye.agent.foreign_files import Identity, NotTheirs, follow, open_file, shown, stat_of
from eagle_eye.agent.processes.process_files import Environments, ProcessEnvironment, root_of
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.schema.checkpoint_files import (
    FOLDER_VARIABLE,
    PERSIST_HANGS_S,
    SAID_EVERY_S,
    STANDING_BYTES_MAX,
    STANDING_FILE,
    JobStanding,
    OlderStep,
    decode_standing,
)
from eagle_eye.schema.events import Event

LOOK_EVERY_S = 5.0  # how often to look for new stores
STORES_MAX = 8  # per node: usually one per user
FOLDERS_MAX = 32  # per user in shared memory
QUIET_S = 3 * SAID_EVERY_S  # how long a store's report counts as current


class _Store(NamedTuple):
    """A store's folder, owned by the user; no link on the path leads out of ``root``. ``ranks`` may be elsewhere."""

    folder: Path
    root: Path
    uid: int
    ranks: list[tuple[TrainingProcess, ProcessEnvironment]]


class _Found(NamedTuple):
    """A job with ranks here, and the state of its checkpoints."""

    ranks: tuple[TrainingProcess, ...]
    standing: JobStanding


class MemoryCheckpointCollector:
    """The newest complete step, and the cost of capturing, for the job whose ranks run on this node.

    A store is looked up where the ranks' environment says, else in shared memory, where each user has a folder. For
    ranks of several jobs on one node only additive metrics are reported: counts, seconds and bytes.
    ``checkpoint_stuck`` is reported once for each step that this node has not persisted within PERSIST_HANGS_S.

    Cannot see: stores of processes whose environment may not be read, and data a store held for ranks that have exited.
    """

    name = "memory_checkpoint"

    def __init__(
        self,
        processes: TrainingProcesses,
        step: Callable[[TrainingProcess], float | None] = lambda _process: None,
        *,
        proc: Path = Path("/proc"),
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``step`` returns the last step that a rank has finished, None where it is unknown."""
        self._processes = processes
        self._step = step
        self._environments = Environments(proc)
        self._monotonic_s = monotonic_s
        self._look_s = -math.inf
        self._looked_for: tuple[TrainingProcess, ...] = ()
        self._stores: tuple[_Store, ...] = ()
        self._reported_stuck: set[tuple[str, int, int]] = set()

    def collect(self, now_s: float) -> Observed:
        """Return the node's row: empty where no job keeps checkpoints in memory."""
        observed = Observed()
        problems: list[str] = []
        processes = self._processes.all()
        monotonic_s = self._monotonic_s()
        if processes != self._looked_for or monotonic_s - self._look_s >= LOOK_EVERY_S:
            self._stores = _stores(self._environments.of(processes))
            self._looked_for, self._look_s = processes, monotonic_s
        found = [one for store in self._stores for one in _read(store, now_s, problems)]
        observed.node = self._row(found, now_s)
        observed.events = self._stuck(found, now_s)
        observed.problem = "; ".join(problems)
        return observed

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _row(self, found: Sequence[_Found], now_s: float) -> dict[str, float]:
        if not found:
            return {}
        jobs = [one.standing for one in found]
        row = {
            "memory_checkpoint_captures_total": float(sum(job.captured for job in jobs)),
            "memory_checkpoint_skips_total": float(sum(job.skipped for job in jobs)),
            "memory_checkpoint_damaged_total": float(sum(job.damaged for job in jobs)),
            "memory_checkpoint_blocked_seconds_total": sum(job.blocked_s for job in jobs),
            "memory_checkpoint_bytes": float(sum(job.reserved_bytes for job in jobs)),
            "memory_checkpoint_persist_seconds": max(job.persisting_for_s or 0.0 for job in jobs),
        }
        if len(found) > 1:
            return row
        ((ranks, job),) = found
        if job.persisted_step is not None:
            row["memory_checkpoint_persisted_step"] = float(job.persisted_step)
        if job.whole_step is not None:
            row["memory_checkpoint_step"] = float(job.whole_step)
            row["memory_checkpoint_copies"] = float(job.copies)
            row["memory_checkpoint_copies_wanted"] = float(job.copies_wanted)
            row["memory_checkpoint_age_steps"] = self._newest(ranks, job, job.whole_step) - job.whole_step
            row |= _older(job.older, now_s)
        return row

    def _newest(self, ranks: Iterable[TrainingProcess], job: JobStanding, whole: int) -> float:
        """Return the newest step that the ranks have finished, at least ``whole``.

        A hook may count steps differently from the program's captures: its step is used only where it is beyond
        ``whole``.
        """
        reported = [step for step in map(self._step, ranks) if step is not None]
        return max((*reported, float(job.step or 0), float(whole)))

    def _stuck(self, found: Iterable[_Found], now_s: float) -> list[Event]:
        events, stuck = [], set()
        for ranks, job in found:
            step, for_s = job.persisting_step, job.persisting_for_s
            if step is None or for_s is None or for_s < PERSIST_HANGS_S:
                continue
            stuck.add((job.job, job.attempt, step))
            if (job.job, job.attempt, step) not in self._reported_stuck:
                text = f"step {step} has been on its way to storage for {for_s:.0f} s: does the storage answer?"
                said = {"step": step, "job": ranks[0].job, "text": text}
                events.append(Event(now_s, "checkpoint_stuck", attributes=said))
        self._reported_stuck = stuck
        return events


def _older(steps: Sequence[OlderStep], now_s: float) -> dict[str, float]:
    """Return the metrics of the complete steps before the newest one, oldest first; {} where there are none."""
    reported = {"previous": steps[-1:], "second_oldest": steps[1:2], "oldest": steps[:1]}
    row = {}
    for which, of_it in reported.items():
        for older in of_it:
            row[f"memory_checkpoint_{which}_step"] = float(older.step)
            row[f"memory_checkpoint_{which}_age_seconds"] = max(now_s - older.captured_s, 0.0)
    return row


def _stores(environments: Mapping[TrainingProcess, ProcessEnvironment]) -> tuple[_Store, ...]:
    """Return the stores of these processes, each once even if several paths lead to it."""
    found: dict[Identity, _Store] = {}
    for process, environment in environments.items():
        for folder in _folders(environment):
            root = root_of(folder, environment)
            try:
                state = stat_of(folder, root)
            except OSError:
                continue
            identity = (state.st_dev, state.st_ino)
            if identity in found or len(found) < STORES_MAX:
                found.setdefault(identity, _Store(folder, root, environment.uid, [])).ranks.append(
                    (process, environment)
                )
    return tuple(found.values())


def _folders(environment: ProcessEnvironment) -> list[Path]:
    """Return the paths where a process's store may be, as this agent sees them."""
    said = environment.first(FOLDER_VARIABLE)
    if said:
        return [environment.path(said)]
    base = environment.path(f"/dev/shm/eagle-eye-{environment.uid}")  # noqa: S108 - where stores are, by default
    node = environment.first("EAGLE_EYE_NODE")
    return [base / node] if node else [base / name for name in _listed(base, environment)]


def _listed(base: Path, environment: ProcessEnvironment) -> list[str]:
    """Return the user's folders under ``base``, a bounded number; none where ``base`` is not the user's own."""
    try:
        named, _ = follow(base, root_of(base, environment))
    except OSError:
        return []
    try:
        state = os.fstat(named)
        if state.st_uid != environment.uid or not stat.S_ISDIR(state.st_mode):
            return []
        with os.scandir(f"/proc/self/fd/{named}") as entries:
            return sorted(entry.name for entry in islice(entries, FOLDERS_MAX))
    except OSError:
        return []
    finally:
        os.close(named)


def _read(store: _Store, now_s: float, problems: list[str]) -> list[_Found]:
    """Return the checkpoint state of the jobs the ranks belong to."""
    path = store.folder / STANDING_FILE
    try:
        with os.fdopen(open_file(path, store.root, store.uid), "rb") as file:
            said = decode_standing(file.read(STANDING_BYTES_MAX + 1))
    except (FileNotFoundError, ProcessLookupError):
        return []  # the store does not exist yet, or no longer
    except NotTheirs as error:
        problems.append(str(error))
        return []
    except (OSError, ValueError) as error:
        problems.append(f"{shown(path)}: {getattr(error, 'strerror', None) or error}")
        return []
    if said.time_s < now_s - QUIET_S:
        problems.append(f"{shown(path)}: its store has said nothing for {now_s - said.time_s:.0f} s")
        return []
    found = []
    for job in said.jobs:
        pids = set(job.pids)
        # A job's checkpoints may use another name than the launcher gave the job; then its processes identify it.
        mine = tuple(
            p for p, environment in store.ranks if p.job == job.job or not pids.isdisjoint((p.pid, environment.own_pid))
        )
        if mine:
            found.append(_Found(mine, job))
    return found
