"""The job's progress in a window: its last step, its pace, and how long it has stood still.

Shared by the detectors of faults that stop a job. A standstill is measured by the rows' timestamps, not their arrival:
late rows are no standstill. It is first *due* (a step should have finished by now), then *ripe*: it has lasted so long
that a claim about it may be acted on. A job that reports no steps stands still while its GPUs do not work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from eagle_eye.detectors.signs.last_work import worked_until_s
from eagle_eye.detectors.signs.medians import median_of
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.unread_log import unread_log
from eagle_eye.detectors.signs.unstarted import steps_expected
from eagle_eye.detectors.signs.without_hook import most_freed, work
from eagle_eye.detectors.types import Blind, Curve, Evidence, Floats, Window

PAUSE_MARGIN_RATIO = 1.5  # over the longest pause that the job has made in the same phase
STARTING = "start"  # the phase before the first step
QUIET_PHASES = ("checkpoint", "eval")  # phases in which no step is due
QUIET_PHASE_FLOORS = 10.0  # a phase without history may last this many floors
PAUSE_FLOORS = 10.0  # a standstill that looks like a pause or a write: this many floors before acting
SHORT_STEP_S = 1.0  # with shorter steps, a standstill of many steps is still short
PROMPT_S = 10.0  # garbage collections, retransmits and page faults are shorter
PACE_STEPS = 64  # newest steps whose median is the typical one
STALE_INTERVALS = 4.0  # if the newest row is older, the current state is unknown


@dataclass(frozen=True, slots=True)
class Progress:
    """The job's progress as of the newest row.

    ``advanced_s`` is the end of the interval in which the last step finished, or until which the job did something else
    (``last_work.py``); ``standstill_s`` is the time since then, or since a rank last changed its phase;
    ``typical_step_s`` is the median step. ``due_s`` is how long a standstill must last before it means anything,
    ``ripe_s`` before it may be acted on, given the job's phase and history.
    ``accused_due_s``, at most ``due_s``, applies if two kinds of evidence single out one node: earlier pauses in which
    no node stood out do not excuse that. ``known_pause_s`` is the longest pause that the job is known to have made in
    any phase, 0 if none. ``reported`` is False if no rank reports steps and GPU activity is used instead.
    """

    advanced_s: float
    standstill_s: float
    typical_step_s: float
    due_s: float
    ripe_s: float
    phase: str
    accused_due_s: float
    reported: bool = True
    known_pause_s: float = 0.0

    @property
    def stopped(self) -> bool:
        """Whether a step is overdue."""
        return self.standstill_s >= self.due_s

    @property
    def accusable(self) -> bool:
        """Whether a step is overdue, given that two kinds of evidence single out one node."""
        return self.standstill_s >= self.accused_due_s

    @property
    def prompt(self) -> bool:
        """Whether two independent kinds of evidence against one node already suffice to act.

        Jobs with very short steps pause for many of them without harm, so for them only a ripe standstill counts.
        """
        long_steps = self.typical_step_s >= SHORT_STEP_S
        return self.overstayed or (long_steps and self.standstill_s >= max(self.due_s, PROMPT_S))

    @property
    def outlasts_pauses(self) -> bool:
        """Whether it has lasted longer than anything the job is known to do: then it need not be ripe.

        False for a job that has made no pause yet, since the length of its first one is unknown.
        """
        known_s = self.known_pause_s
        # GPUs rest in many more ways than ranks pause, and the longest of them is soon exceeded.
        margin_s = min((PAUSE_MARGIN_RATIO - 1) * known_s, PROMPT_S) if self.reported else known_s
        longer_s = max(PROMPT_S, self.accused_due_s, known_s + margin_s)
        return known_s >= PROMPT_S and self.standstill_s >= longer_s

    @property
    def past_own_pauses(self) -> bool:
        """Whether it has lasted longer than any known pause of the job, and for more than a moment.

        Then hardware that is seen to be broken may be acted on, however short the job's steps are.
        """
        longer_s = max(PROMPT_S, self.due_s, PAUSE_MARGIN_RATIO * self.known_pause_s)
        return self.known_pause_s > 0 and self.standstill_s >= longer_s

    @property
    def overstayed(self) -> bool:
        """Whether it is ripe, or need not be: no pause explains it, so it may be acted on."""
        return self.ripe or self.outlasts_pauses

    @property
    def ripe(self) -> bool:
        """Whether the standstill has lasted longer than the site's floor and all the job's own pauses."""
        return self.standstill_s >= self.ripe_s

    @property
    def evidence(self) -> Evidence:
        """The standstill as evidence."""
        if not self.reported:
            return Evidence("gpu_idle_seconds", None, None, self.standstill_s, None, self.due_s, "seconds")
        metric, typical_s = "train_step_standstill_seconds", self.typical_step_s
        return Evidence(metric, None, None, self.standstill_s, typical_s, self.due_s, "seconds")

    def __str__(self) -> str:
        """Return it as the beginning of a sentence."""
        if not self.reported:
            return f"the job's GPUs have only waited for {self.standstill_s:.1f} s"
        if self.phase == STARTING:
            return f"no rank has finished a first step within {self.standstill_s:.0f} s of the attempt's start"
        return f"no step for {self.standstill_s:.1f} s where {self.typical_step_s:.2f} s are typical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a standstill is tolerated: an absolute floor, typical steps, a deadline for the start.

    A standstill is due after ``typical_steps`` and ripe after ``floor_s`` as well.
    """

    floor_s: float
    typical_steps: float
    start_deadline_s: float
    warmup_steps: int


@once
def progress(window: Window, patience: Patience) -> Progress:
    """Return the job's progress.

    Raises Blind if neither steps nor GPU activity are reported, if no node reported recently, and while the job is
    starting. Of a job whose log is not understood the steps are unknown: only its GPUs tell.
    """
    if unread := unread_log(window):
        if work(window) is None:
            raise Blind(unread)
        return _unreported(window, patience)
    if not np.isfinite(window.last_step):
        unheard = hooked(window) or _start_overdue(window, patience)
        return _never_stepped(window, patience) if unheard else _unreported(window, patience)
    if warms_up(window, patience):
        done = window.last_step - window.first_step
        raise Blind(f"{done + 1:.0f} steps of this attempt seen; its pace is not known yet")
    return _stepping(window, patience)


def first_steps(window: Window, patience: Patience) -> Progress:
    """Return the progress of an attempt that ``warms_up``: none of its first steps is due before the floor.

    Raises Blind if no node reported recently.
    """
    state = _stepping(window, patience)
    return replace(state, due_s=state.ripe_s, accused_due_s=state.ripe_s)


def warms_up(window: Window, patience: Patience) -> bool:
    """Whether the attempt has made steps, and too few to know its pace. Raises Blind if no node reported recently."""
    done = window.last_step - window.first_step
    return done < patience.warmup_steps and _newest_s(window) - window.started_s < patience.start_deadline_s


def _stepping(window: Window, patience: Patience) -> Progress:
    newest_s = _newest_s(window)
    typical_s = typical_step_s(window)
    phase = quiet_phase(window)
    made_s = patience.typical_steps * max(typical_s, window.interval_s)
    # The time between two reports is known to an interval.
    least_s = max(made_s, patience.typical_steps * (window.reports.usual_s - window.interval_s))
    unknown_s = max(least_s, QUIET_PHASE_FLOORS * max(made_s, patience.floor_s))
    due_s = _own_pauses_s(window, patience, phase, least_s, unknown_s)
    ripe_s = max(due_s, patience.floor_s)
    accused_s = max((pause.seconds for pause in window.pauses if pause.accused and pause.phase == phase), default=0.0)
    advanced_s = _advanced_s(window, patience, window.advanced_s, least_s, ripe_s)
    return Progress(
        advanced_s=advanced_s,
        standstill_s=max(newest_s - max(advanced_s, _phase_changed_s(window)), 0.0),
        typical_step_s=typical_s,
        due_s=due_s,
        ripe_s=ripe_s,
        phase=phase,
        accused_due_s=due_s if phase else min(due_s, max(least_s, PAUSE_MARGIN_RATIO * accused_s)),
        # What is no standstill yet says nothing of how long the job's standstills are.
        known_pause_s=max((pause.seconds for pause in window.pauses if pause.seconds > least_s), default=0.0),
    )


def _advanced_s(window: Window, patience: Patience, stepped_s: float, least_s: float, ripe_s: float) -> float:
    """Return when the job last made progress: a step, or what it did after one was overdue."""
    return max(stepped_s, worked_until_s(window, stepped_s + least_s, at_work_s(patience, ripe_s)))


def at_work_s(patience: Patience, ripe_s: float) -> float:
    """Return how long one node may work for the others before that counts as a hang."""
    return max(PAUSE_FLOORS * ripe_s, patience.start_deadline_s)


@once
def typical_step_s(window: Window) -> float:
    """Return the median of the newest steps' durations; the interval if no rank reports them."""
    typical_s = newest_steps_s(window.curve)
    if not math.isfinite(typical_s):
        reported = window.device.get("train_step_seconds")
        typical_s = _newest_median(reported[-1] if reported is not None and len(reported) else None)
    return typical_s if math.isfinite(typical_s) else window.interval_s


def newest_steps_s(curve: Curve) -> float:
    """Return the median duration of the newest steps that ranks reported; NaN if they report none."""
    return _newest_median(curve.values.get("train_step_seconds"))


def _newest_median(seconds: Floats | None) -> float:
    newest = np.zeros(0) if seconds is None else seconds[-PACE_STEPS:]
    return median_of(newest[np.isfinite(newest)])


@once
def hooked(window: Window) -> bool:
    """Whether the job's ranks report anything themselves."""
    return "train_step" in window.device or "nccl_sequence" in window.device or any(window.phase)


def _newest_s(window: Window) -> float:
    """Return the time of the newest row; raise Blind if it is too old to describe the present."""
    newest_s = float(window.times_s[-1]) if len(window.times_s) else -np.inf
    if window.now_s - newest_s > STALE_INTERVALS * window.interval_s:
        raise Blind(f"the newest row is {window.now_s - newest_s:.1f} s old")
    return newest_s


def _unreported(window: Window, patience: Patience) -> Progress:
    """Return the progress of a job whose ranks report nothing: it goes on while its GPUs work.

    Checkpoints and evaluations are not announced there, so nothing is due before the site's short limit, and nothing is
    ripe before the floor.
    """
    newest_s = _newest_s(window)
    seen = work(window)
    if seen is None:
        raise Blind("no rank reports steps, and nobody what its GPUs do")
    if seen.idle_s > 0:
        if seen.worked_s < patience.floor_s:
            raise Blind(f"the job's GPUs have worked for {seen.worked_s:.0f} s in view: it may be starting")
        if most_freed(window, newest_s - seen.idle_s):
            raise Blind(
                "the job's processes have ended; whether that was meant is not reported, and none has worked since"
            )
    longest_s = seen.longest_pause_s if seen.idle_s > 0 else 0.0
    least_s = max(PROMPT_S, patience.typical_steps * window.interval_s)
    due_s = max(least_s, PAUSE_MARGIN_RATIO * longest_s)
    ripe_s = max(due_s, patience.floor_s)
    advanced_s = _advanced_s(window, patience, newest_s - seen.idle_s, least_s, ripe_s)
    return Progress(
        advanced_s=advanced_s,
        standstill_s=newest_s - advanced_s,
        typical_step_s=window.interval_s,
        due_s=due_s,
        ripe_s=ripe_s,
        phase="",
        accused_due_s=due_s,
        reported=False,
        # Up to as much time again around two rows of work is unobserved: a single row without work is no pause of the
        # job.
        known_pause_s=longest_s if longest_s - 2 * window.interval_s >= PROMPT_S else 0.0,
    )


def _never_stepped(window: Window, patience: Patience) -> Progress:
    """Return the progress of an attempt without a step: none is due before the start deadline, or the launcher's."""
    since_s = window.now_s - window.started_s
    deadline_s = patience.start_deadline_s
    if window.beginning.held_up_by:
        deadline_s = min(deadline_s, since_s)
    if since_s < deadline_s:
        raise Blind("no rank has reported a step; the job may be starting or run without the hook")
    waiting = np.isfinite(window.device.get("nccl_sequence", np.array(np.nan))).any()
    if not waiting and not _start_overdue(window, patience):
        raise Blind(f"no rank has reported a step in {since_s:.0f} s; the job may run without the hook")
    return Progress(
        advanced_s=window.started_s,
        standstill_s=since_s,
        typical_step_s=deadline_s,
        due_s=deadline_s,
        ripe_s=deadline_s,
        phase=STARTING,
        accused_due_s=deadline_s,
    )


def _start_overdue(window: Window, patience: Patience) -> bool:
    """Whether a first step should have been seen by now, even by a server started later; see ``steps_expected``."""
    since_s = window.now_s - max(window.started_s, window.watching_since_s)
    due = since_s >= patience.start_deadline_s or bool(window.beginning.held_up_by)
    return due and steps_expected(window)


@once
def quiet_phase(window: Window) -> str:
    """Return the phase without due steps that any rank is in, "" if none: the others then wait for that rank."""
    return next((name for name in QUIET_PHASES if name in window.phase), "")


def _phase_changed_s(window: Window) -> float:
    """Return when a rank last changed its phase; -inf if none was reported. The end of a phase is progress too."""
    return float(np.max(window.phase_since_s, initial=-np.inf))


def _own_pauses_s(window: Window, patience: Patience, phase: str, least_s: float, unknown_s: float) -> float:
    if phase and not any(pause.phase == phase for pause in window.pauses):
        return unknown_s
    longest_s = max((pause.seconds for pause in window.pauses if pause.phase == phase), default=0.0)
    return max(least_s, PAUSE_MARGIN_RATIO * longest_s, patience.floor_s if phase else 0.0)
