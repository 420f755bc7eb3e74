"""What an attempt inherits from those before it. Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from eagle_eye.detectors.types import Curve


class Earlier(NamedTuple):
    """``curve`` is the course of the last attempt that made steps, None where none did.

    ``mute_starts`` is how many attempts right before were past the start's deadline without a step.
    """

    curve: Curve | None = None
    mute_starts: int = 0


NOTHING = Earlier()


class Before(Protocol):
    """The attempt before, as far as it matters here."""

    started_s: float
    earlier: Earlier

    @property
    def curve(self) -> Curve:
        """The job's course by step."""
        ...


def inherited(before: Before | None, now_s: float, start_deadline_s: float) -> Earlier:
    """Return what an attempt that begins at ``now_s`` inherits from the one before, None where there is none."""
    if before is None:
        return NOTHING
    if len(before.curve.number):
        return Earlier(before.curve)
    mute = now_s - before.started_s >= start_deadline_s
    return before.earlier._replace(mute_starts=before.earlier.mute_starts + mute)
