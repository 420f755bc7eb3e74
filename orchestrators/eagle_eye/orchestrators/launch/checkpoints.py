"""Chooses the checkpoint to resume from. Reads file names and times below one folder; the choice itself is pure.

A checkpoint in the nodes' memory counts like one in the folder: by the time of its capture.

A checkpoint is a folder ``step_<N>`` written by torch.distributed.checkpoint, which writes ``.metadata`` last: without
it the checkpoint is incomplete, and its modification time is when it was completed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from eagle_eye.schema.checkpoint_files import MEMORY_PREFIX, MemoryStep, step_folders, whole_in_memory


class Checkpoint(msgspec.Struct, frozen=True):
    """A complete checkpoint; ``written_s`` is the Unix time at which it was completed."""

    path: str
    step: int
    written_s: float

    @property
    def folder(self) -> Path | None:
        """Return its folder; None for one in the nodes' memory."""
        return None if self.path.startswith(MEMORY_PREFIX) else Path(self.path)


def in_memory(copies: list[MemoryStep]) -> list[Checkpoint]:
    """Return the complete checkpoints formed by these copies."""
    return [Checkpoint(f"{MEMORY_PREFIX}{step}", step, at_s) for step, at_s in whole_in_memory(copies).items()]


class Span(msgspec.Struct, frozen=True):
    """A span of Unix time, both ends included, in which written checkpoints are not to be trusted."""

    since_s: float
    until_s: float

    def covers(self, time_s: float) -> bool:
        """Whether the time lies in the span."""
        return self.since_s <= time_s <= self.until_s


def find_checkpoints(folder: Path | None) -> list[Checkpoint]:
    """Return the complete checkpoints in the folder, in no particular order; none where the folder does not exist.

    Raises OSError where the folder exists but cannot be read: starting from scratch would then be wrong.
    """
    found = [] if folder is None else step_folders(folder)
    return [Checkpoint(str(one.path), one.step, one.completed_s) for one in found if one.completed_s is not None]


def beginning(known: Sequence[Checkpoint], distrusted: Sequence[Span], *, finds_newest: bool) -> str:
    """Return what ranks that start from scratch are told: "", or not to resume from existing checkpoints.

    Ranks that find the newest step by themselves, as with checkpoints in memory, would take a corrupt one.
    """
    return f"{MEMORY_PREFIX}0" if finds_newest and known and not trusted(known, distrusted) else ""


def trusted(found: Iterable[Checkpoint], distrusted: Sequence[Span]) -> list[Checkpoint]:
    """Return the checkpoints not written in any of the spans."""
    return [one for one in found if not any(span.covers(one.written_s) for span in distrusted)]


def choose_checkpoint(
    found: Iterable[Checkpoint], distrusted: Sequence[Span], suspected: Collection[float] = ()
) -> Checkpoint | None:
    """Return the last written checkpoint outside the distrusted spans, None where there is none.

    By time and not by step: after a return to an earlier step, the higher steps are the corrupt ones. One written at a
    ``suspected`` time is taken only where there is no other: it is better than starting from scratch.
    """
    left = trusted(found, distrusted)
    clear = [one for one in left if one.written_s not in suspected]
    return max(clear or left, key=lambda one: (one.written_s, one.step), default=None)
