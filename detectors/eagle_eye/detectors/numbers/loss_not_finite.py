"""Detects a loss that is not finite, or is exactly zero, on all ranks alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.broken_numbers import (
    MOST_RATIO,
    SCREEN_ROWS,
    BrokenNumbers,
    broken_numbers,
    first_broken,
    sound_until_s,
)
from eagle_eye.detectors.signs.medians import median_over_rows
from eagle_eye.detectors.signs.peers import latest
from eagle_eye.detectors.signs.step_series import since_rollback
from eagle_eye.detectors.types import Blind, Evidence, Verdict, Window

# Dynamic loss scaling (Micikevicius et al., ICLR 2018) skips a step whose gradient overflows and halves the scale:
# one now and then, at the start one per excess bit of the scale. More in a row are not a search for a scale.
SKIPPED_STEPS = 24
SKIPPED_LINES = 4  # and as many reports that say so: it may be reported only every few steps
ZERO_STEPS = 2  # with a loss of exactly zero: one may be a batch without a target
# The loss before it fell to zero: this many lines, none near zero. A loss that approached zero gradually, or is so
# small that rounding makes it zero, has only been learnt.
BEFORE_LINES, BEFORE_MIN = 32, 8
NEAR_ZERO_RATIO, ROUNDED_RATIO = 0.1, 10.0  # of the median, of the smallest difference between two
CONFIDENCE_ZERO, CONFIDENCE_ZERO_BROKEN = 0.85, 0.92
CONFIDENCE_LOSS, CONFIDENCE_NORM, CONFIDENCE_SKIPPED, CONFIDENCE_SOME = 0.95, 0.92, 0.8, 0.6


class Zero(NamedTuple):
    """The loss is exactly zero: number of steps, ranks affected, ranks in all, value before, onset."""

    steps: int
    ranks: int
    spoke: int
    before: float
    onset_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LossNotFinite:
    """Finds a loss, or if none is reported a gradient norm, that is currently not finite.

    After the reduction all ranks hold the same broken numbers, so the loss does not show their origin: if one node's
    gradient broke first, ``SilentCorruption`` accuses it, and this verdict is its symptom. The verdict waits until
    every rank's row of that moment has arrived, and ends when the loss is finite again. A gradient norm that is not
    finite while the loss is means skipped steps: normal in float16, reported after ``SKIPPED_STEPS`` in a row. If only
    a few ranks' losses are not finite, that is only reported. A loss that drops from its level to exactly zero is what
    programs substitute for a missing loss: reported after ``ZERO_STEPS``, and as certain as a loss that is not finite
    if the gradient norm is not finite either. Blind if no rank reports a loss or gradient norm. Cannot see: a loss that
    broke and recovered between two rows, or was zero within the first ``BEFORE_MIN`` reports.
    """

    name: str = "loss_not_finite"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        if not {"train_loss", "train_grad_norm"} & window.device.keys():
            raise Blind("no rank reports a loss or a gradient norm")
        broken = broken_numbers(window)
        if broken is not None and broken.loss.any():
            found = self._loss(window, broken) if broken.lost else self._some(window, broken)
            return [found] if broken.settled else []
        norm = broken is not None and 2 * int(broken.norm.sum()) >= broken.spoke_norm
        zero = _fell_to_zero(window)
        if zero is not None:
            return [self._zero(window, zero, norm)]
        skipped = _skipped_steps(window) if broken is not None and broken.settled and norm else 0
        return [self._norm(window, broken, skipped)] if broken is not None and skipped >= SKIPPED_STEPS else []

    def _loss(self, window: Window, broken: BrokenNumbers) -> Verdict:
        first = first_broken(window)
        if first:
            why = f"the gradient broke first on {window.series[first[0]].node}, before the reduction"
        elif "train_local_grad_norm" in window.device:
            why = "no single rank's gradient was seen to break before the reduction"
        else:
            why = "gradients before the reduction are not reported, so no rank can be told from another"
        count = int(broken.loss.sum())
        summary = f"the loss is not finite on {count} of {broken.spoke} ranks that report one; {why}"
        return self._verdict(window, broken, CONFIDENCE_LOSS, summary, "train_loss", count, broken.spoke, fact=True)

    def _some(self, window: Window, broken: BrokenNumbers) -> Verdict:
        count = int(broken.loss.sum())
        where = sorted({window.series[i].node for i in np.flatnonzero(broken.loss)})
        summary = (
            f"the loss is not finite on {count} of {broken.spoke} ranks that report one ({', '.join(where[:4])});"
            " the others' is"
        )
        return self._verdict(window, broken, CONFIDENCE_SOME, summary, "train_loss", count, broken.spoke)

    def _norm(self, window: Window, broken: BrokenNumbers, skipped: int) -> Verdict:
        count = int(broken.norm.sum())
        known = broken.spoke > 0
        summary = f"the gradient norm has not been finite for {skipped} steps" + (
            " although the loss is: every step is skipped" if known else "; no rank reports a loss"
        )
        confidence = CONFIDENCE_SKIPPED if known else CONFIDENCE_NORM
        return self._verdict(window, broken, confidence, summary, "train_grad_norm", count, broken.spoke_norm)

    def _zero(self, window: Window, zero: Zero, norm_broken: bool) -> Verdict:
        most = MOST_RATIO * zero.spoke
        summary = (
            f"the loss has been exactly 0 for {zero.steps} steps on {zero.ranks} of {zero.spoke} ranks that report one"
            f" ({zero.before:.4g} before)"
        )
        if norm_broken:
            summary += ", and the gradient norm is not finite"
        return Verdict(
            detector=self.name,
            fault="loss_not_finite",
            job=window.job,
            nodes=(),
            node=None,
            device=None,
            confidence=CONFIDENCE_ZERO_BROKEN if norm_broken else CONFIDENCE_ZERO,
            onset_s=zero.onset_s,
            summary=summary,
            evidence=(
                Evidence("train_loss", None, None, 0.0),
                Evidence("train_loss_usual", None, None, zero.before),
                Evidence("train_loss_zero_ranks", None, None, float(zero.ranks), None, most, "ranks"),
            ),
            kinds=frozenset({"loss", "gradient_norm"} if norm_broken else {"loss"}),
            asks=None if norm_broken else "notify",
        )

    def _verdict(
        self,
        window: Window,
        broken: BrokenNumbers,
        confidence: float,
        summary: str,
        metric: str,
        count: int,
        spoke: int,
        fact: bool = False,
    ) -> Verdict:
        return Verdict(
            detector=self.name,
            fault="loss_not_finite",
            job=window.job,
            nodes=(),
            node=None,
            device=None,
            confidence=confidence,
            onset_s=broken.sound_until_s,
            summary=summary,
            evidence=(
                Evidence(metric, None, None, "not finite"),
                Evidence(f"{metric}_not_finite_ranks", None, None, float(count), None, float(spoke) / 2, "ranks"),
            ),
            kinds=frozenset({"loss"}),
            fact=fact,
        )


def _fell_to_zero(window: Window) -> Zero | None:
    """Return since when the loss is exactly zero on most ranks that had another one; None if it is not."""
    loss, step = window.device.get("train_loss"), window.device.get("train_step")
    lines = window.steps.values.get("train_loss")
    if loss is None or step is None or lines is None:
        return None
    newest, past = latest(loss, SCREEN_ROWS), lines[-BEFORE_LINES:]
    if not (newest == 0).any():
        return None
    spoke = (past > 0).any(axis=0) & ~np.isnan(newest)
    fallen = np.flatnonzero(spoke & (newest == 0))
    if not len(fallen) or len(fallen) < MOST_RATIO * int(spoke.sum()):
        return None
    course = median_over_rows(past[:, fallen].T)
    course = course[~np.isnan(course)]
    before = course[: int(np.flatnonzero(course)[-1]) + 1] if course.any() else course[:0]
    if len(before) < BEFORE_MIN or not np.isfinite(before).all():
        return None
    level = float(np.median(before))
    apart = np.diff(np.unique(before))
    if float(before.min()) < NEAR_ZERO_RATIO * level or not len(apart) or level < ROUNDED_RATIO * float(apart.min()):
        return None
    one = fallen[0]
    usual = np.flatnonzero(loss[:, one] > 0)
    since = int(usual[-1]) if len(usual) else 0
    began = len(lines) - len(past) + int(np.flatnonzero((past[:, fallen] > 0).any(axis=1))[-1]) + 1
    changed = np.flatnonzero(np.diff(before))
    repeated = int(np.diff(np.concatenate([[-1], changed, [len(before) - 1]])).max())  # if only reported now and then
    steps = float(np.fmax.reduce(step[since:, one]) - step[since, one])
    if steps < max(ZERO_STEPS, repeated + 1):
        return None
    return Zero(int(steps), len(fallen), int(spoke.sum()), level, sound_until_s(window, window.steps.times_s, began))


def _skipped_steps(window: Window) -> int:
    """Return over how many steps up to the newest the job's gradient norm has not been finite."""
    norm = window.curve.values.get("train_grad_norm")
    if norm is None:
        return 0
    start = since_rollback(window.curve, 4 * SKIPPED_STEPS)
    number = window.curve.number[start:]
    finite = np.flatnonzero(np.isfinite(norm[start:]))
    since = int(finite[-1]) if len(finite) else 0
    if np.isposinf(norm[start + since :]).sum() < SKIPPED_LINES:
        return 0
    return int(number[-1] - number[since])
