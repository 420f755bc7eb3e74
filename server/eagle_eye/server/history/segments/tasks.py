"""What the server asks of the process that keeps segments in shape, and what it answers: a JSON line each."""

from __future__ import annotations

from typing import Literal

import msgspec

from eagle_eye.server.history.segments.facts import Facts
from eagle_eye.server.history.segments.levels import LevelFacts


class Downsample(msgspec.Struct, frozen=True, tag="downsample"):
    """Write the level's segment of ``facts`` from ``sources``: raw segments, or for hours those of minutes.

    With ``existing``, the window's segment until now, only what is new are sources: its buckets are added to, or, of
    hours that a source has anew (they begin at ``anew_s``), replaced.
    """

    facts: LevelFacts
    sources: tuple[str, ...]
    existing: str | None = None
    anew_s: tuple[float, ...] = ()


class Merge(msgspec.Struct, frozen=True, tag="merge"):
    """Write the raw segment ``name`` with all frames of the sources."""

    name: str
    sources: tuple[str, ...]


Task = Downsample | Merge


class TaskResult(msgspec.Struct, frozen=True):
    """What became of a task.

    done: the segment is on the disk (none where both facts are None: there was nothing for it). broken: the segment
    ``broken`` cannot be read. unlike: it has the columns of another version, and is not merged. failed: for another
    reason.
    """

    outcome: Literal["done", "broken", "unlike", "failed"]
    level_facts: LevelFacts | None = None
    facts: Facts | None = None
    broken: str = ""
    reason: str = ""
