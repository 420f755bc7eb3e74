"""The interface between evidence gathering and its sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from eagle_eye.agent.evidence.bundle import Bundle
from eagle_eye.agent.evidence.suspects import Suspect

TOOLS_EARLIER_S = 0.25  # tools are killed this long before the deadline, so that their output can still be included


@dataclass(frozen=True)
class Scene:
    """What a source may examine, where it puts its findings, and its deadline, by ``monotonic_s``."""

    suspects: Sequence[Suspect]
    bundle: Bundle
    until_s: float
    proc: Path = Path("/proc")
    monotonic_s: Callable[[], float] = time.monotonic

    def left_s(self) -> float:
        """Return the seconds left; 0 when there are none."""
        return max(0.0, self.until_s - self.monotonic_s())

    @property
    def tools_until_s(self) -> float:
        """Deadline for host programs."""
        return self.until_s - TOOLS_EARLIER_S


class Task(NamedTuple):
    """One thing to find out. ``run`` has a thread of its own, may hang forever, and may raise anything."""

    what: str
    run: Callable[[], None]


class EvidenceSource(Protocol):
    """One kind of evidence."""

    @property
    def name(self) -> str:
        """The source's name in the manifest."""
        ...

    def tasks(self, scene: Scene) -> list[Task]:
        """Return the tasks; must not block."""
        ...
