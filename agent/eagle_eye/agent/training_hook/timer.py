"""Splits a training step's time: a state machine over the moments that the hook sees.

It uses neither torch nor a clock: every moment is passed in, in seconds of one clock, the host's or a device's.
"""

from __future__ import annotations

from typing import NamedTuple


class StepParts(NamedTuple):
    """One step's durations in seconds; None: not observed. ``backwards`` counts its backward passes."""

    step_s: float | None
    compute_s: float | None
    data_wait_s: float | None
    collective_s: float | None
    backwards: int = 0


class StepTimer:
    """Splits a step into data wait, compute and collective.

    The moments of one step: ``finish`` of the previous one, ``forward`` (the model is called), ``backward_end`` (its
    gradients are computed), ``reduced`` (they are summed over the ranks, where the model does that by itself at the end
    of its backward pass), ``optimizer`` (the optimizer is about to step), ``finish``. Compute runs from a forward to
    the last end of a backward pass after it. The collective runs from there to ``reduced``, or to ``optimizer`` where
    ``reduced`` is not called. The time between ``finish`` and the first forward is the data wait. Between ``pause`` and
    ``resume`` nothing counts.
    """

    __slots__ = (
        "_backward_s",
        "_backwards",
        "_begin_s",
        "_collective_s",
        "_compute_s",
        "_data_wait_s",
        "_entering",
        "_pause_s",
        "_paused",
        "_ready_s",
        "_reduced",
        "_segment_s",
    )

    def __init__(self) -> None:
        self._begin_s: float | None = None  # the first step starts at its forward: everything before is start-up
        self._ready_s: float | None = None
        self._segment_s: float | None = None
        self._backward_s: float | None = None  # the segment's compute ends here, as far as is known
        self._entering = False  # the segment was just opened by a wrapper's forward
        self._reduced = False
        self._paused = 0
        self._pause_s = 0.0
        self._clear()

    def _clear(self) -> None:
        self._compute_s: float | None = None
        self._data_wait_s: float | None = None
        self._collective_s: float | None = None
        self._backwards = 0

    @property
    def paused(self) -> bool:
        """Whether a phase is open, so that no time counts."""
        return self._paused > 0

    def forward(self, now_s: float) -> None:
        """Record that the model is called for training."""
        if self._paused:
            return
        self._entering = False
        if self._segment_s is not None:
            if self._backward_s is None:
                return  # called again before any backward: the same compute segment continues
            self._close_segment()
            self._data_wait_s = (self._data_wait_s or 0.0) + now_s - self._backward_s
        elif self._ready_s is not None:
            self._data_wait_s = now_s - self._ready_s
        if self._begin_s is None:
            self._begin_s = now_s
        self._ready_s = None
        self._segment_s = now_s
        self._entering = True
        self._reduced = False
        self._backward_s = None

    def compute_begin(self, now_s: float) -> None:
        """Record that the wrapped module was entered: since ``forward`` the wrapper synchronised buffers."""
        if not self._paused and self._entering and self._segment_s is not None:
            self._collective_s = (self._collective_s or 0.0) + now_s - self._segment_s
            self._segment_s = now_s
            self._entering = False

    def ignored_forward(self) -> None:
        """Record a call outside training: the data wait cannot be separated from it."""
        self._ready_s = None

    def backward_end(self, now_s: float) -> None:
        """Record that a backward pass computed its last gradient."""
        if not self._paused and self._segment_s is not None:
            self._entering = False
            self._backward_s = now_s
            self._backwards += 1

    def reduced(self, now_s: float) -> None:
        """Record that the gradients of the backward pass that just ended are reduced."""
        if self._paused or self._segment_s is None or self._backward_s is None:
            return
        waited_s = now_s - self._backward_s
        self._collective_s = (self._collective_s or 0.0) + waited_s
        # Shifted by the wait, so that the segment holds only compute, also when a second backward pass follows.
        self._segment_s += waited_s
        self._backward_s = now_s
        self._reduced = True

    def optimizer(self, now_s: float) -> None:
        """Record that the optimizer is about to step: gradients are reduced."""
        if self._paused or self._segment_s is None or self._backward_s is None:
            return
        self._close_segment()
        if not self._reduced:
            self._collective_s = (self._collective_s or 0.0) + now_s - self._backward_s
        self._segment_s = None

    def finish(self, now_s: float) -> StepParts:
        """End the step; return its parts. The next one starts now."""
        if self._segment_s is not None and self._backward_s is not None:
            self._close_segment()
            if not self._reduced:
                self._collective_s = None  # the end of the reduction is unknown
        parts = StepParts(
            None if self._begin_s is None or self._paused else now_s - self._begin_s,
            self._compute_s,
            self._data_wait_s,
            self._collective_s,
            self._backwards,
        )
        self._begin_s = self._ready_s = now_s
        self._segment_s = self._backward_s = None
        self._reduced = False
        self._clear()
        return parts

    def pause(self, now_s: float) -> None:
        """Start a phase; phases may nest."""
        if not self._paused:
            self._pause_s = now_s
        self._paused += 1

    def resume(self, now_s: float) -> None:
        """End a phase: its time is excluded from the step, and the data wait starts over."""
        self._paused = max(0, self._paused - 1)
        if self._paused:
            return
        away_s = now_s - self._pause_s
        if self._begin_s is not None:
            self._begin_s += away_s
        if self._segment_s is not None:
            self._segment_s += away_s
            if self._backward_s is not None:
                self._backward_s += away_s
        else:
            self._ready_s = now_s if self._begin_s is not None else None

    def _close_segment(self) -> None:
        assert self._segment_s is not None  # noqa: S101 - the callers looked
        assert self._backward_s is not None  # noqa: S101 - the callers looked
        self._compute_s = (self._compute_s or 0.0) + self._backward_s - self._segment_s
