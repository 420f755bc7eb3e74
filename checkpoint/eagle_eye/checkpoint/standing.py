"""Reports the state of each job's checkpoints in a file for monitoring."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from pathlib import Path

import msgspec

from eagle_eye.checkpoint.held_job import HeldJob, write_whole
from eagle_eye.schema.memory_standing import (
    JOBS_MAX,
    OLDER_MAX,
    RANKS_MAX,
    SAID_EVERY_S,
    STANDING_FILE,
    JobStanding,
    OlderStep,
    Standing,
    encode_standing,
)

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class StandingFile:
    """The file in a store's folder: written on changes, at most twice a second, and periodically."""

    def __init__(self, folder: Path, unix_s: Callable[[], float] = time.time) -> None:
        self._path = folder / STANDING_FILE
        self._unix_s = unix_s
        self._said: list[JobStanding] | None = None
        self._said_s = self._looked_s = -math.inf

    def say(self, jobs: Iterable[HeldJob], now_s: float) -> None:
        """Write the jobs' state at ``now_s``, monotonic. Retried where it cannot be written."""
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        standing = [standing_of(job, now_s) for job in islice(jobs, JOBS_MAX)]
        changes = [msgspec.structs.replace(job, persisting_for_s=None) for job in standing]  # that passes by itself
        if changes == self._said and now_s - self._said_s < SAID_EVERY_S:
            return
        try:
            write_whole(self._path, encode_standing(Standing(self._unix_s(), standing)))
        except OSError as error:  # shared memory may be full of somebody else's
            _log.warning("%s is not written: %s", self._path, error)
            return
        self._said, self._said_s = changes, now_s

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def standing_of(job: HeldJob, now_s: float) -> JobStanding:
    """Return the state of a job's checkpoints at ``now_s``, monotonic."""
    counts, whole, persisting = job.counts, job.needed.newest_whole, job.needed.persisting
    since_s = job.persisting_since_s if persisting is not None else None
    # By ranks: after a restart one's shards may be in two kinds of slots for a time.
    held = {copy.rank for _, _, copy in job.copies() if copy.step == whole}
    wanted = {shard.rank for shard in job.shards.values() if shard.attempt == job.attempt}
    return JobStanding(
        job=job.name,
        attempt=job.attempt,
        pids=[shard.connection.peer_pid for shard in job.local if shard.connection is not None][:RANKS_MAX],
        step=job.step,
        whole_step=whole,
        copies=len(held),
        copies_wanted=0 if whole is None else len(wanted),
        older=_older(job, wanted),
        captured=counts.get("captured", 0),
        skipped=counts.get("skipped", 0) + counts.get("not_due", 0),
        void=counts.get("void", 0),
        blocked_s=round(job.blocked_s, 6),
        reserved_bytes=job.reserved_bytes,
        sent_bytes=counts.get("bytes_sent", 0),
        persisted_step=job.persisted,
        persisting_step=persisting,
        persisting_for_s=None if since_s is None else round(max(now_s - since_s, 0.0), 1),
        damaged=counts.get("damaged", 0),
    )


def _older(job: HeldJob, wanted: Collection[int]) -> list[OlderStep]:
    """Return the whole steps before the newest one of which every rank's shard that is wanted here is here."""
    held: dict[int, set[int]] = {step: set() for step in job.needed.known[:-1]}
    captured_s: dict[int, float] = {}
    for shard, _, copy in job.copies():
        if copy.step in held:
            held[copy.step].add(copy.rank)
            if shard.local:  # by this node's clock, like the reader of the file
                captured_s[copy.step] = max(captured_s.get(copy.step, 0.0), copy.captured_s)
    whole = [step for step, ranks in held.items() if step in captured_s and ranks.issuperset(wanted)]
    reported = whole if len(whole) <= OLDER_MAX else [*whole[: OLDER_MAX - 1], whole[-1]]
    return [OlderStep(step, captured_s[step]) for step in reported]
