"""Where a training step's time goes: a state machine over the moments that the hook sees.

It knows no torch and no clock: every moment is handed in, in seconds of a monotonic clock.
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

    The moments of one step: ``finish`` of the previous one, ``forward`` (the model is called),
    gradients (the caller sets ``last_gradient_s``), ``optimizer`` (the optimizer is about to step),
    ``finish``. Compute runs from a forward to the last gradient after it; what lies between the last
    gradient and the optimizer is the collective; what lies between ``finish`` and the first forward is the
    wait for data. Between ``pause`` and ``resume`` nothing counts.
    """

    __slots__ = (
        "_backwards",
        "_begin_s",
        "_collective_s",
        "_compute_s",
        "_data_wait_s",
        "_pause_s",
        "_paused",
        "_ready_s",
        "_reduces",
        "_segment_s",
        "last_gradient_s",
    )

    def __init__(self) -> None:
        self._begin_s: float | None = None  # the first step begins with its forward: what came before is start-up
        self._ready_s: float | None = None
        self._segment_s: float | None = None
        self._reduces = False
        self._paused = 0
        self._pause_s = 0.0
        self.last_gradient_s: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._compute_s: float | None = None
        self._data_wait_s: float | None = None
        self._collective_s: float | None = None
        self._backwards = 0

    @property
    def paused(self) -> bool:
        """Whether a phase is open, so that nothing counts."""
        return self._paused > 0

    def forward(self, now_s: float, *, reduces: bool) -> None:
        """The model was called for training. ``reduces``: its backward ends in a collective."""
        if self._paused:
            return
        if self._segment_s is not None:
            if self.last_gradient_s is None:
                return  # called again before any backward: the same stretch of compute goes on
            self._close_segment()
            if not self._reduces:
                # Where the backward before reduced, collective and data wait are mixed here: neither counts.
                self._data_wait_s = (self._data_wait_s or 0.0) + now_s - self.last_gradient_s
        elif self._ready_s is not None:
            self._data_wait_s = now_s - self._ready_s
        if self._begin_s is None:
            self._begin_s = now_s
        self._ready_s = None
        self._segment_s = now_s
        self._reduces = reduces
        self.last_gradient_s = None

    def compute_begin(self, now_s: float) -> None:
        """The wrapped module was entered: since ``forward`` the wrapper synchronised buffers."""
        if not self._paused and self._segment_s is not None and self.last_gradient_s is None:
            self._collective_s = (self._collective_s or 0.0) + now_s - self._segment_s
            self._segment_s = now_s

    def ignored_forward(self) -> None:
        """The model was called for something else than training: the wait for data cannot be told from it."""
        self._ready_s = None

    def optimizer(self, now_s: float) -> None:
        """The optimizer is about to step: gradients are reduced."""
        if self._paused or self._segment_s is None or self.last_gradient_s is None:
            return
        self._close_segment()
        self._collective_s = (self._collective_s or 0.0) + now_s - self.last_gradient_s
        self._segment_s = None

    def finish(self, now_s: float) -> StepParts:
        """The step ended; return its parts. The next one begins now."""
        if self._segment_s is not None and self.last_gradient_s is not None:
            self._close_segment()
            self._collective_s = None  # no optimizer told when the reduction was over
        parts = StepParts(
            None if self._begin_s is None or self._paused else now_s - self._begin_s,
            self._compute_s,
            self._data_wait_s,
            self._collective_s,
            self._backwards,
        )
        self._begin_s = self._ready_s = now_s
        self._segment_s = self.last_gradient_s = None
        self._clear()
        return parts

    def pause(self, now_s: float) -> None:
        """A phase began; phases may nest."""
        if not self._paused:
            self._pause_s = now_s
        self._paused += 1

    def resume(self, now_s: float) -> None:
        """A phase ended: its time is taken out of the step, and the wait for data begins anew."""
        self._paused = max(0, self._paused - 1)
        if self._paused:
            return
        away_s = now_s - self._pause_s
        if self._begin_s is not None:
            self._begin_s += away_s
        if self._segment_s is not None:
            self._segment_s += away_s
            if self.last_gradient_s is not None:
                self.last_gradient_s += away_s
        else:
            self._ready_s = now_s if self._begin_s is not None else None

    def _close_segment(self) -> None:
        assert self._segment_s is not None  # noqa: S101 - the callers looked
        assert self.last_gradient_s is not None  # noqa: S101 - the callers looked
        self._compute_s = (self._compute_s or 0.0) + self.last_gradient_s - self._segment_s
        self._backwards += 1
