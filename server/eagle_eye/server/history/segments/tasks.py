"""What the server asks of the process that keeps segments in shape, and what it answers: a JSON line each."""

from __future__ import annotations

from typing import Literal

import msgspec

from eagle_eye.server.history.segments.levels import LevelFacts


class Downsample(msgspec.Struct, frozen=True):
    """Write the level's segment of ``facts`` from ``sources``: raw segments, or for hours those of minutes.

    With ``existing``, the window's segment until now, only what is new are sources: its buckets are added to, or, of
    hours that a source has anew (they begin at ``anew_s``), replaced.
    """

    facts: LevelFacts
    sources: tuple[str, ...]
    existing: str | None = None
    anew_s: tuple[float, ...] = ()


class TaskResult(msgspec.Struct, frozen=True):
    """What became of a task.

    done: the segment is on the disk (none where the facts are None: there was nothing for it). broken: the segment
    ``broken`` cannot be read. failed: for another reason.
    """

    outcome: Literal["done", "broken", "failed"]
    level_facts: LevelFacts | None = None
    broken: str = ""
    reason: str = ""
