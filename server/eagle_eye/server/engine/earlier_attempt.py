"""The state that an attempt inherits from earlier ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from eagle_eye.detectors.progress.failed_start import UNREACHED
from eagle_eye.detectors.types import Curve, Pause, Verdict
from eagle_eye.server.engine.pauses import PauseLog

UNREACHED_MAX = 16  # nodes of consecutive failed starts that are remembered


class Earlier(NamedTuple):
    """``curve`` is that of the last attempt that made steps, None if none did.

    ``mute_starts`` counts the immediately preceding attempts that passed the start deadline without a step,
    ``unreached`` lists the nodes named in such attempts as the only ones unable to reach the others. ``pauses`` are
    those that the job has made: a restart does not change what the program does.
    """

    curve: Curve | None = None
    mute_starts: int = 0
    unreached: tuple[str, ...] = ()
    pauses: tuple[Pause, ...] = ()

    @property
    def starts(self) -> tuple[int, tuple[str, ...]]:
        """What the immediately preceding attempts without a step imply for this one's start."""
        return self.mute_starts, self.unreached


NOTHING = Earlier()


class Before(Protocol):
    """The previous attempt, as far as it matters here."""

    started_s: float
    earlier: Earlier
    unreached: tuple[str, ...]
    course: PauseLog

    @property
    def curve(self) -> Curve:
        """The job's curve by step."""
        ...


def unreached_by(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """Return the nodes that verdicts name as the only ones unable to reach the others as the attempt started."""
    return next((verdict.nodes for verdict in verdicts if UNREACHED in verdict.kinds), ())


def inherited(before: Before | None, now_s: float, start_deadline_s: float) -> Earlier:
    """Return what an attempt that begins at ``now_s`` inherits from the previous one, None if there is none."""
    if before is None:
        return NOTHING
    if len(before.curve.number):
        return Earlier(before.curve, pauses=before.course.pauses)
    mute = now_s - before.started_s >= start_deadline_s
    unreached = (*before.earlier.unreached, *before.unreached)[-UNREACHED_MAX:]
    return Earlier(before.earlier.curve, before.earlier.mute_starts + mute, unreached, before.course.pauses)
