"""Detects a loss that departs from its own trend, for a few steps or permanently."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.faults import DefaultAction
from eagle_eye.detectors.signs.broken_numbers import sound_until_s
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.signs.step_series import course, since_rollback
from eagle_eye.detectors.types import Blind, Curve, Evidence, Floats, Verdict, Window

LAGS = (4, 12, 36, 108, 324)  # observations held out as possibly departed, the smallest that reaches behind the onset
BASELINE_MAX, BASELINE_MIN = 500, 16  # observations before them that define what is usual
# The median deviation of n observations has an error of about 1.2 / sqrt(n): with 16 it may be half of the true value.
FEW = 16.0  # so the sigmas of n observations count 1 + 16/n times
NORM_BASELINE_MIN = 50  # gradient norms are noisy for longer: the warm-up of the learning rate
LEVEL = 32  # newest of these, whose median is the level
NEWEST = LAGS[-1] + BASELINE_MAX
BLOCKS = 13  # blocks of LEVEL observations whose lowest median a departure must exceed, before anything is computed
SIGMA_FLOOR = 0.01  # of the logarithm: a loss over a large batch still varies by a percent
LOSS_SIGMAS, NORM_SIGMAS = 8.0, 6.0
# Data stages and learning-rate restarts move a loss by up to a fifth: a smaller jump is no spike.
LOSS_RATIO = 1.25
NORM_RATIO = 5.0  # the jump of loss or gradient norm that ByteRobust acts on (Wan et al., SOSP 2025)
DEPART_SIGMAS, DEPART_RATIO = 4.0, 1.05  # above which an observation belongs to the departure
LOSS_OF_NEWEST, NORM_OF_NEWEST = (2, 3), (3, 4)  # this many of the newest must be up: one noisy step is normal
FIRST_STEPS = 5  # initial observations of an attempt, which are noisy by nature
DIVERGED_REPORTS = 6  # observations, and...
DIVERGED_STEPS = 20  # ...steps up without coming back, after which a rising loss counts as lost
NORM_STEPS = 40  # a loss that stays level with its gradient norm up: a long spike looks the same
FLAT_STEPS, FLAT_RATIO = 60, 2.0  # a level that neither rises nor falls may be other data: requires longer, and far up
# Where single observations are too noisy to be a departure: this many newest, whose lower quartile is up.
LASTING_MIN, LASTING_MAX, LASTING_QUANTILE = 24, 300, 0.25
LASTING_BLOCKS = 6  # medians of that many before, which show how much a loss swings
SWINGS_RATIO = 0.4  # of the height: a loss that rose by more before is one that swings
FAR_STEPS = 30  # far up with its gradient norm: two signs against a spike, half of what either needs
RISING_RATIO = 1.1  # ratio of the medians of the departure's second and first half
# Between its last two quarters, relative and in standard errors: recovering.
FALLING_RATIO, FALLING_ERRORS = 0.03, 2.0
BACK_RATIO = 0.6  # of the departure's height, below which the newest count as recovered
NORM_UP_RATIO = 2.0  # gradient norms up with the loss: the training has changed, not the data
CONFIDENCE_SPIKE, CONFIDENCE_START, CONFIDENCE_NAMED, CONFIDENCE_SURE, CONFIDENCE_MAX = 0.85, 0.6, 0.8, 0.9, 0.95
RESTART_RATIO = 1.2  # over the previous attempt at the same steps, that is worth reporting
RESTART_REPORTS, RESTART_NEWEST = 20, 64  # common observations, of that many newest
CONFIDENCE_RESTART = 0.7


class Departure(NamedTuple):
    """A departure: the newest observations are above their trend.

    ``sigma``, ``threshold`` and ``excess`` (n,), the height above the level of each observation since the onset, are of
    scaled values. ``onset`` is the curve line of the first that departed. ``newest`` is the median of the newest three
    and ``usual`` the level, in the metric's own unit.
    """

    onset: int
    sigma: float
    threshold: float
    excess: Floats
    newest: float
    usual: float

    @property
    def ratio(self) -> float:
        """By what factor the newest are above the level; for values around zero, by how many typical magnitudes."""
        return self.newest / self.usual if self.usual > 0 else 1.0 + float(np.median(self.excess[-3:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCourse:
    """Distinguishes a transient spike of the loss or gradient norm from a loss that has diverged.

    Works on the job's medians over the ranks, so findings concern all ranks alike. Observations are standardised by the
    median and MAD of the logarithms of the preceding 16 to 500 (detrended); linear if a loss can be negative. Two of
    the newest three losses ``LOSS_RATIO`` and ``LOSS_SIGMAS`` up, or three of four gradient norms ``NORM_RATIO`` up,
    are a spike, over as soon as they recover. A loss that is still up and rising after ``DIVERGED_STEPS`` has diverged;
    one that stays level needs ``NORM_STEPS`` if its gradient norm is also up (``FAR_STEPS`` if it is ``FLAT_RATIO`` up
    as well), and otherwise ``FLAT_STEPS``. A loss less than ``FLAT_RATIO`` up without its gradient norm may be other
    data, however long it lasts, and is only reported. Confidence grows with duration. After a restart the loss is
    compared with the previous attempt's at the same steps. Blind if no rank reports either. Cannot see: departures
    within the first ``BASELINE_MIN`` observations of a job, or shorter than two reports; a loss that only stops
    falling.
    """

    name: str = "loss_course"
    by_step: bool = True

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        curve = window.curve
        if not {"train_loss", "train_grad_norm"} & (window.device.keys() | curve.values.keys()):
            raise Blind("no rank reports a loss or a gradient norm")
        if not len(curve.number):
            return []
        joined, own = _joined(curve, window.earlier)
        if own < FIRST_STEPS:
            return []
        loss = departure(joined, "train_loss", LOSS_SIGMAS, LOSS_RATIO, LOSS_OF_NEWEST)
        if loss is None:
            level = lasting(joined)
            diverged = self._diverged(window, joined, level, LASTING_MIN) if level is not None else None
            if diverged is not None:
                return [diverged]
            norm = departure(joined, "train_grad_norm", NORM_SIGMAS, NORM_RATIO, NORM_OF_NEWEST, NORM_BASELINE_MIN)
            return [self._spike(window, joined, norm, "train_grad_norm")] if norm else self._worse(window)
        return [self._diverged(window, joined, loss) or self._spike(window, joined, loss, "train_loss")]

    def _spike(self, window: Window, curve: Curve, found: Departure, metric: str) -> Verdict:
        count = len(found.excess)
        what = "loss" if metric == "train_loss" else "gradient norm"
        return self._verdict(
            window,
            curve,
            found,
            metric,
            fault="loss_spike",
            confidence=CONFIDENCE_SPIKE,
            summary=(
                f"the {what} of all ranks has been up for {count} steps: {found.newest:.4g} where {found.usual:.4g}"
                f" was usual ({found.ratio:.1f} times)"
            ),
        )

    def _diverged(self, window: Window, curve: Curve, found: Departure, newest: int = 3) -> Verdict | None:
        """Return the verdict if the loss does not recover; None while it may. ``newest`` reports give its value."""
        excess = found.excess
        steps = float(curve.number[-1] - curve.number[found.onset]) + 1
        now = float(np.median(excess[-newest:]))
        if len(excess) < DIVERGED_REPORTS or now < math.log(LOSS_RATIO):
            return None
        half, quarter = len(excess) // 2, len(excess) // 4
        early, late = float(np.median(excess[:half])), float(np.median(excess[half:]))
        third, fourth = float(np.median(excess[-2 * quarter : -quarter])), float(np.median(excess[-quarter:]))
        error = 1.2533 * found.sigma * math.sqrt(2 / quarter)
        falling = third - fourth > max(FALLING_RATIO * third, FALLING_ERRORS * error)
        if falling or now < BACK_RATIO * float(np.sort(excess)[-2]):
            return None
        rising = late > RISING_RATIO * early + error and fourth > third - 0.5 * error
        norm = departure(curve, "train_grad_norm", DEPART_SIGMAS, NORM_UP_RATIO, LOSS_OF_NEWEST)
        level = FLAT_STEPS if norm is None else NORM_STEPS if found.ratio < FLAT_RATIO else FAR_STEPS
        patience = DIVERGED_STEPS if rising else level
        confidence = CONFIDENCE_START + (CONFIDENCE_SURE - CONFIDENCE_START) * steps / patience
        if confidence < CONFIDENCE_NAMED:
            return None
        alone = norm is None and (found.ratio < FLAT_RATIO or newest > 3)
        known = (("it still rises", rising), ("the gradient norm is up, too", norm))
        signs = [sign for sign, there in known if there]
        if alone:
            signs.append("nothing else is unusual, so it may be other data")
        verdict = self._verdict(
            window,
            curve,
            found,
            "train_loss",
            fault="loss_divergence",
            confidence=min(confidence, CONFIDENCE_MAX),
            summary=(
                f"the loss of all ranks left its course {steps:.0f} steps ago and does not come back:"
                f" {found.newest:.4g} where {found.usual:.4g} was usual" + "".join(f"; {sign}" for sign in signs)
            ),
            kinds=frozenset({"loss", "gradient_norm"} if norm is not None else {"loss"}),
            asks="notify" if alone else None,
        )
        return replace(verdict, onset_s=sound_until_s(window, curve.times_s, found.onset))

    def _worse(self, window: Window) -> list[Verdict]:
        """Return a notification if the loss is higher than the previous attempt's at the same steps."""
        found = _against_earlier(window)
        if found is None:
            return []
        onset_s, now, then, common = found
        return [
            Verdict(
                detector=self.name,
                fault="loss_divergence",
                job=window.job,
                nodes=(),
                node=None,
                device=None,
                confidence=CONFIDENCE_RESTART,
                onset_s=onset_s,
                summary=(
                    f"the loss is {now / then:.2f} times what the attempt before had at the same {common} steps"
                    f" ({now:.4g} against {then:.4g}): it may have started from another state or with other data"
                ),
                evidence=(Evidence("train_loss", None, None, now, then, RESTART_RATIO * then),),
                kinds=frozenset({"earlier_attempt"}),
                asks="notify",
            )
        ]

    def _verdict(
        self,
        window: Window,
        curve: Curve,
        found: Departure,
        metric: str,
        *,
        fault: str,
        confidence: float,
        summary: str,
        kinds: frozenset[str] = frozenset({"loss"}),
        asks: DefaultAction | None = None,
    ) -> Verdict:
        limit = found.usual * math.exp(found.threshold) if found.usual > 0 else None
        return Verdict(
            detector=self.name,
            fault=fault,
            job=window.job,
            nodes=(),
            node=None,
            device=None,
            confidence=confidence,
            onset_s=float(curve.times_s[found.onset]) - window.interval_s,
            summary=summary,
            evidence=(
                Evidence(metric, None, None, found.newest, None, limit),
                Evidence(f"{metric}_usual", None, None, found.usual),
                Evidence(f"{metric}_reports_up", None, None, float(len(found.excess)), None, None, "reports"),
            ),
            kinds=kinds,
            asks=asks,
        )


def departure(
    curve: Curve, metric: str, sigmas: float, ratio: float, of_newest: tuple[int, int], baseline: int = BASELINE_MIN
) -> Departure | None:
    """Return how the newest observations of a metric have departed upwards from their trend; None if they have not.

    ``of_newest`` (up, newest): how many of how many newest must be ``ratio`` times and ``sigmas`` above the level.
    ``baseline`` is how many there must be before them.
    """
    up, newest = of_newest
    if metric not in curve.values or _clearly_not_up(curve.values[metric][-BLOCKS * LEVEL :], newest, ratio):
        return None
    seen = course(curve, metric, NEWEST)
    if len(seen.value) < baseline + newest or np.isposinf(curve.values[metric][-newest:]).any():
        return None
    scaled, least = _scaled(seen.value, ratio)
    if scaled is None or not _may_be_up(scaled, up, newest, least):
        return None
    found: Departure | None = None
    longest = len(scaled) - baseline  # a young job's baseline is all of its earlier observations
    for lag in (*(lag for lag in LAGS if lag < longest), min(longest, NEWEST - baseline)):
        before = scaled[max(len(scaled) - lag - BASELINE_MAX, 0) : len(scaled) - lag]
        level, sigma = float(np.median(before[-LEVEL:])), _sigma(before)
        threshold = max(sigmas * (1 + FEW / len(before)) * sigma, least)
        excess = scaled[-lag:] - level
        if int((excess[-newest:] > threshold).sum()) < up:
            continue
        high = excess > min(max(DEPART_SIGMAS * sigma, math.log(DEPART_RATIO)), threshold)
        high[1:-1] |= high[:-2] & high[2:]  # a single dip does not end a departure
        low = np.flatnonzero(~high[:-1])
        start = int(low[-1]) + 1 if len(low) else 0
        usual = float(np.median(seen.value[: len(scaled) - lag][-LEVEL:]))
        at = len(scaled) - lag + start
        found = Departure(
            onset=int(seen.line[at]),
            sigma=sigma,
            threshold=threshold,
            excess=excess[start:],
            newest=float(np.median(seen.value[-3:])),
            usual=usual,
        )
        if start > 0:
            break  # otherwise the onset is further back
    return found


def lasting(curve: Curve) -> Departure | None:
    """Return how the loss has stayed above its level as a whole, if single observations are too noisy.

    Of all candidate onsets, the one before which it was lowest; None if it has not stayed up, or has swung like this
    before.
    """
    values = curve.values.get("train_loss")
    if values is None or np.isposinf(values[-1:]).any():
        return None
    seen = course(curve, "train_loss", NEWEST)
    scaled, least = _scaled(seen.value, LOSS_RATIO) if len(seen.value) >= BASELINE_MIN + LASTING_MIN else (None, 0.0)
    if scaled is None:
        return None
    now, past = float(np.quantile(scaled[-LASTING_MIN:], LASTING_QUANTILE)), scaled[-BLOCKS * LEVEL :]
    if now - float(np.partition(past, len(past) // 8)[len(past) // 8]) < least:
        return None
    highest, found = least, 0
    for lag in range(LASTING_MIN, min(LASTING_MAX, len(scaled) - BASELINE_MIN) + 1, LASTING_MIN // 2):
        level = float(np.median(scaled[:-lag][-LEVEL:]))
        height = min(now, float(np.quantile(scaled[-lag:], LASTING_QUANTILE))) - level
        if height > highest:
            highest, found = height, lag
    before = scaled[:-found][-BASELINE_MAX:]
    blocks = np.median(before[len(before) % LASTING_MIN :].reshape(-1, LASTING_MIN), axis=1)
    if not found or len(blocks) < LASTING_BLOCKS:
        return None
    if float((blocks - np.minimum.accumulate(blocks)).max()) > SWINGS_RATIO * highest:
        return None
    return Departure(
        onset=int(seen.line[len(scaled) - found]),
        sigma=_sigma(before),
        threshold=least,
        excess=scaled[-found:] - float(np.median(before[-LEVEL:])),
        newest=float(np.median(seen.value[-LASTING_MIN:])),
        usual=float(np.median(seen.value[:-found][-LEVEL:])),
    )


def _scaled(values: Floats, ratio: float) -> tuple[Floats | None, float]:
    """Return the logarithms, or magnitudes if values may be zero or less, and ``ratio`` on that scale."""
    if float(values.min()) > 0:
        return np.log(values), math.log(ratio)
    unit = float(np.median(np.abs(values)))
    return (values / unit, ratio - 1.0) if unit > 0 else (None, 0.0)


def _clearly_not_up(values: Floats, newest: int, ratio: float) -> bool:
    """Whether none of the newest is ``ratio`` times the low values of the past: cheap, and nearly always True."""
    high, low = np.fmax.reduce(values[-newest:]), np.partition(values, len(values) // 8)[len(values) // 8]
    return bool(low > 0 and high < ratio * low)


def _may_be_up(scaled: Floats, up: int, newest: int, least: float) -> bool:
    """Whether the newest are far enough above the lowest level of the past to justify computing more."""
    blocks = min(len(scaled) // LEVEL, BLOCKS)
    if not blocks:
        return True
    high = float(np.sort(scaled[-newest:])[newest - up])
    past = np.sort(scaled[-blocks * LEVEL :].reshape(blocks, LEVEL), axis=1)[:, LEVEL // 2]
    # In a young job there may be no whole block before the departure.
    first = float(np.median(scaled[:BASELINE_MIN])) if blocks < BLOCKS else math.inf
    return high - min(float(past.min()), first) > least


def _sigma(before: Floats) -> float:
    """Return the robust noise of a baseline around its trend: a line through the medians of its halves."""
    half = len(before) // 2
    first, second = float(np.median(before[:half])), float(np.median(before[half:]))
    slope = (second - first) / (len(before) / 2)
    off = before - slope * np.arange(len(before))
    return max(SIGMA_PER_MAD * float(np.median(np.abs(off - np.median(off)))), SIGMA_FLOOR)


def _joined(curve: Curve, earlier: Curve | None) -> tuple[Curve, int]:
    """Return the attempt's curve with the previous one's before its first step, and how many lines are its own."""
    start = since_rollback(curve, NEWEST)
    own = len(curve.number) - start
    if earlier is None or own >= NEWEST or not len(earlier.number):
        return curve, own
    from_line = since_rollback(earlier, 2 * NEWEST)
    until = from_line + int(np.searchsorted(earlier.number[from_line:], curve.number[start]))
    before, after = slice(max(until - NEWEST, from_line), until), slice(start, None)
    names = curve.values.keys() & {"train_loss", "train_grad_norm"}
    unknown = np.full(before.stop - before.start, np.nan)
    return Curve(
        number=np.concatenate([earlier.number[before], curve.number[after]]),
        times_s=np.concatenate([earlier.times_s[before], curve.times_s[after]]),
        values={
            name: np.concatenate(
                [earlier.values[name][before] if name in earlier.values else unknown, curve.values[name][after]]
            )
            for name in names
        },
    ), own


def _against_earlier(window: Window) -> tuple[float, float, float, int] | None:
    """Return the onset, the loss now, the previous attempt's at the same steps, and their number; None: not worse."""
    earlier, curve = window.earlier, window.curve
    if earlier is None or "train_loss" not in earlier.values or "train_loss" not in curve.values:
        return None
    start = max(since_rollback(curve, len(curve.number)) + FIRST_STEPS, len(curve.number) - RESTART_NEWEST)
    number, loss = curve.number[start:], curve.values["train_loss"][start:]
    from_line = since_rollback(earlier, len(earlier.number))
    past = earlier.number[from_line:]
    if not len(number) or not len(past) or number[0] > past[-1]:
        return None
    at = np.clip(np.searchsorted(past, number), 0, len(past) - 1)
    then = earlier.values["train_loss"][from_line:][at]
    common = (past[at] == number) & np.isfinite(loss) & np.isfinite(then) & (loss > 0) & (then > 0)
    if int(common.sum()) < RESTART_REPORTS:
        return None
    ratio = loss[common] / then[common]
    if float(np.median(ratio)) < RESTART_RATIO or float(np.quantile(ratio, 0.25)) < 1 + (RESTART_RATIO - 1) / 2:
        return None
    onset_s = float(curve.times_s[start:][common][0]) - window.interval_s
    return onset_s, float(np.median(loss[common])), float(np.median(then[common])), int(common.sum())
