"""A loss that is no number any more, on all ranks alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.broken_numbers import Broken, broken_numbers, first_broken
from eagle_eye.detectors.signs.course import since_rollback
from eagle_eye.detectors.types import Blind, Evidence, Verdict, Window

# Dynamic loss scaling (Micikevicius et al., ICLR 2018) skips a step whose gradient overflows and halves the scale:
# now and then one, at the start as many as the scale has too many bits. More in a row are no search for a scale.
SKIPPED_STEPS = 24
SKIPPED_LINES = 4  # and as many reports that say so: it may be reported every few steps only
CONFIDENCE_LOSS, CONFIDENCE_NORM, CONFIDENCE_SKIPPED, CONFIDENCE_SOME = 0.95, 0.92, 0.8, 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class LossNotFinite:
    """Finds a loss, or where none is reported a gradient norm, that is not finite now.

    After the reduction all ranks hold the same broken numbers, so the loss says nothing about where they came from:
    where one node's gradient broke first, ``SilentCorruption`` accuses it, and this verdict is its symptom. The verdict
    waits until every rank's row of that moment has arrived, and is over when the loss is a number again. A gradient
    norm that is not finite while the loss is means skipped steps: daily life in float16, told of after
    ``SKIPPED_STEPS`` in a row. A few ranks' losses alone are told of and no more. Blind where no rank reports a loss or
    gradient norm. Cannot see: a loss that broke and recovered between two rows.
    """

    name: str = "loss_not_finite"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        if not {"train_loss", "train_grad_norm"} & window.device.keys():
            raise Blind("no rank reports a loss or a gradient norm")
        broken = broken_numbers(window)
        if broken is None or not broken.settled:
            return []
        if broken.lost:
            return [self._loss(window, broken)]
        if broken.loss.any():
            return [self._some(window, broken)]
        skipped = _skipped_steps(window)
        if skipped < SKIPPED_STEPS or 2 * int(broken.norm.sum()) < broken.spoke_norm:
            return []
        return [self._norm(window, broken, skipped)]

    def _loss(self, window: Window, broken: Broken) -> Verdict:
        first = first_broken(window)
        if first:
            why = f"the gradient broke first on {window.series[first[0]].node}, before the reduction"
        elif "train_local_grad_norm" in window.device:
            why = "no single rank's gradient broke before the reduction"
        else:
            why = "gradients before the reduction are not reported, so no rank can be told from another"
        count = int(broken.loss.sum())
        summary = f"the loss is not finite on {count} of {broken.spoke} ranks that report one; {why}"
        return self._verdict(window, broken, CONFIDENCE_LOSS, summary, "train_loss", count, broken.spoke, fact=True)

    def _some(self, window: Window, broken: Broken) -> Verdict:
        count = int(broken.loss.sum())
        where = sorted({window.series[i].node for i in np.flatnonzero(broken.loss)})
        summary = (
            f"the loss is not finite on {count} of {broken.spoke} ranks that report one ({', '.join(where[:4])});"
            " the others' is"
        )
        return self._verdict(window, broken, CONFIDENCE_SOME, summary, "train_loss", count, broken.spoke)

    def _norm(self, window: Window, broken: Broken, skipped: int) -> Verdict:
        count = int(broken.norm.sum())
        known = broken.spoke > 0
        summary = f"the gradient norm has not been finite for {skipped} steps" + (
            " although the loss is: every step is skipped" if known else "; no rank reports a loss"
        )
        confidence = CONFIDENCE_SKIPPED if known else CONFIDENCE_NORM
        return self._verdict(window, broken, confidence, summary, "train_grad_norm", count, broken.spoke_norm)

    def _verdict(
        self,
        window: Window,
        broken: Broken,
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
            onset_s=broken.onset_s - window.interval_s,
            summary=summary,
            evidence=(
                Evidence(metric, None, None, "not finite"),
                Evidence(f"{metric}_not_finite_ranks", None, None, float(count), None, float(spoke) / 2, "ranks"),
            ),
            kinds=frozenset({"loss"}),
            fact=fact,
        )


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
