"""What a window says about the job's progress: when it last made a step, its pace, how long it stands still.

Shared by the detectors of faults that stop a job. "Stands still" is judged on the clock of the rows, not on
the time of their arrival: late rows are no standstill.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.types import Blind, Window

PAUSE_MARGIN_RATIO = 1.5  # over the longest pause that the job has shown in the same phase
QUIET_PHASES = ("checkpoint", "eval")  # phases in which no step is due
QUIET_PHASE_FLOORS = 10.0  # a phase without history may last this many floors


@dataclass(frozen=True, slots=True)
class Progress:
    """The job's progress as of the newest row.

    ``advanced_s`` is the end of the interval in which a step finished last; ``standstill_s`` is the time since then, or
    since a rank last changed its phase; ``typical_step_s`` is the median step; ``due_s`` is how long a standstill must
    last before it means anything, given the job's phase and own history.
    """

    advanced_s: float
    standstill_s: float
    typical_step_s: float
    due_s: float
    phase: str

    @property
    def stopped(self) -> bool:
        """Whether a step is overdue."""
        return self.standstill_s >= self.due_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a standstill is nobody's fault: an absolute floor, typical steps, a deadline for the start."""

    floor_s: float
    typical_steps: float
    start_deadline_s: float
    warmup_steps: int


def progress(window: Window, patience: Patience) -> Progress:
    """Return the job's progress.

    Raises Blind when no rank reports steps, when nobody was heard of late, and while the job is starting.
    """
    steps = window.device.get("train_step")
    if steps is None or not np.isfinite(steps).any():
        return _never_stepped(window, patience)
    newest_s = float(window.times_s[-1])
    if window.now_s - newest_s > 4 * window.interval_s:
        raise Blind(f"the newest row is {window.now_s - newest_s:.1f} s old")
    highest = np.fmax.reduce(np.where(np.isfinite(steps), steps, -1.0), axis=1)
    highest = np.maximum.accumulate(highest)
    seen = highest >= 0
    first, last = float(highest[seen][0]), float(highest[-1])
    # The line in which the highest step was first seen: the step finished in the interval that it ends.
    advanced_s = float(window.times_s[int(np.argmax(highest == last))])
    typical_s = _typical_step_s(window)
    if last - first < patience.warmup_steps and newest_s - window.started_s < patience.start_deadline_s:
        raise Blind(f"{last - first + 1:.0f} steps of this attempt seen; its pace is not known yet")
    phase = _phase(window)
    return Progress(
        advanced_s=advanced_s,
        standstill_s=max(newest_s - max(advanced_s, _phase_changed_s(window)), 0.0),
        typical_step_s=typical_s,
        due_s=_due_s(window, patience, typical_s, phase),
        phase=phase,
    )


def _never_stepped(window: Window, patience: Patience) -> Progress:
    """Return the progress of an attempt without a step: none is due before the start's deadline."""
    since_s = window.now_s - window.started_s
    if since_s < patience.start_deadline_s:
        raise Blind("no rank has reported a step; the job may be starting or run without the hook")
    if not np.isfinite(window.device.get("nccl_sequence", np.array(np.nan))).any():
        raise Blind(f"no rank has reported a step in {since_s:.0f} s; the job may run without the hook")
    return Progress(
        advanced_s=window.started_s,
        standstill_s=since_s,
        typical_step_s=patience.start_deadline_s,
        due_s=patience.start_deadline_s,
        phase="start",
    )


def _typical_step_s(window: Window) -> float:
    seconds = window.device.get("train_step_seconds")
    if seconds is None or not np.isfinite(seconds).any():
        return window.interval_s
    return float(np.median(seconds[np.isfinite(seconds)]))


def _phase(window: Window) -> str:
    """Return the phase in which no step is due when any rank is in one: the others then wait for it."""
    return next((name for name in QUIET_PHASES if name in window.phase), "")


def _phase_changed_s(window: Window) -> float:
    """Return when a rank last changed its phase; -inf when none said. A phase that ends is progress too."""
    return float(np.max(window.phase_since_s, initial=-np.inf))


def _due_s(window: Window, patience: Patience, typical_s: float, phase: str) -> float:
    due_s = max(patience.floor_s, patience.typical_steps * typical_s)
    if phase and not any(pause.phase == phase for pause in window.pauses):
        return due_s * QUIET_PHASE_FLOORS
    longest_s = max((pause.seconds for pause in window.pauses if pause.phase == phase), default=0.0)
    return max(due_s, PAUSE_MARGIN_RATIO * longest_s)
