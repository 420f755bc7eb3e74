"""The file in which a node's checkpoint store publishes the state of each job's checkpoints for monitoring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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
