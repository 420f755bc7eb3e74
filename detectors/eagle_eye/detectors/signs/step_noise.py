"""Models chance in a rank's step times: its peers, noise, tails, and how long a disturbance persists."""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.detectors.signs.medians import median_of, median_over_rows, trimmed_means
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.types import Floats, Integers, Window

STEPS_MIN = 3  # fewer steps say nothing about persistence
PEERS_SAMPLED = 256  # of a large role, enough for its spread
SCREEN_STEPS = 20  # newest steps from which noise is first estimated
FEW_PEERS = 4.0  # the error of n peers counts 1 + 4/n times (Student's t against the normal, far in the tail)
TRIM_EFFICIENCY = 1.06  # standard error of a trimmed mean over that of a mean, normal distribution
SIGMA_PER_MEAN_DEVIATION = 1.2533  # of the normal distribution
NOISE_FLOOR_RATIO = 0.004  # identical peers still differ by a timer's resolution
UNHEARD_OF_DIGITS = 8.0  # of chance, 1e-8, that a few noisy steps must rule out
MEMORY_STEPS, MEMORY_STEPS_MIN = 64, 12  # newest steps that show the noise's autocorrelation; fewer do not
MEMORY_UNKNOWN = 0.5  # lag-1 correlation until they do: recorded workers show 0.5 to 0.9 (Alibaba, 2021)
MEMORY_MIN = 0.4  # below it steps count as independent
OUTLIER_SIGMAS = 3.0
TAIL_INDEX = 2.5  # of what lasts: Student's t with so few degrees of freedom has no kurtosis, hosts' metrics have one
# With levels that drift for minutes some are near and some far, and the median deviation sees only the near ones: this
# quantile of the deviations, over the normal distribution's, sees both. A fifth of the peers may be slow themselves.
WIDE_QUANTILE, SIGMA_PER_WIDE = 0.8, 1 / 1.2816


@once
def role_sample(window: Window, role: int) -> Integers:
    """Return (a sample of) the ranks of a role, as indexes."""
    members = np.flatnonzero(window.role_of == role)
    sample: Integers = members[:: math.ceil((len(members) - 1) / PEERS_SAMPLED) or 1]
    return sample


def step_peers(window: Window, index: int) -> Integers:
    """Return the peers of a rank, as indexes: the others of its role, or a sample of a large one."""
    members = role_sample(window, int(window.role_of[index]))
    peers: Integers = members[members != index]
    return peers


def peers_elsewhere(window: Window, index: int) -> Integers:
    """Return the peers on other nodes, since all ranks of a node may be slow."""
    peers = step_peers(window, index)
    elsewhere: Integers = peers[window.node_of[peers] != window.node_of[index]]
    return elsewhere


class StepNoise:
    """The noise of (steps, ranks) relative values, sorted once for queries about several suspects.

    ``node_of`` (ranks,) is each rank's node: ranks of a slow node do not show how far apart healthy ones are.
    """

    def __init__(self, relative: Floats, node_of: Integers) -> None:
        known = np.isfinite(relative)
        enough = known.sum(axis=0) >= STEPS_MIN
        self._place_of = np.append(np.where(enough, np.cumsum(enough) - 1, -1), -1)
        self._centres, self._node_of = trimmed_means(relative[:, enough]), node_of[enough]
        spread = np.abs(relative[:, enough] - self._centres).T  # (ranks, steps): contiguous per rank
        seen = np.isfinite(spread)
        self._spread = spread[seen]
        self._bounds = np.concatenate([[0], np.cumsum(seen.sum(axis=1))])
        order = np.argsort(self._spread, kind="stable")
        self._ordered = self._spread[order]
        self._rank_of = np.empty_like(order)
        self._rank_of[order] = np.arange(len(order))
        self._total = float(self._spread.sum())

    def of_others(self, columns: Integers, steps: Integers) -> tuple[Floats, Floats]:
        """Return the noise of single steps, and the error of a mean over that many, including the ranks' spread.

        Each without the rank of its column (-1: of all ranks); infinite if no other reports enough steps.
        """
        places = self._place_of[columns]
        others = len(self._centres) - (places >= 0)
        noise, between = np.full(len(places), np.inf), np.full(len(places), np.inf)
        for at in np.flatnonzero(others > 0).tolist():
            # The mean deviation covers the tails that the median deviation does not.
            median, mean = self._spread_without(int(places[at]))
            noise[at] = max(SIGMA_PER_MAD * median, SIGMA_PER_MEAN_DEVIATION * mean)
            centres = np.delete(self._centres, places[at]) if places[at] >= 0 else self._centres
            between[at] = SIGMA_PER_MAD * median_of(np.abs(centres - median_of(centres)))
            own_node = self._node_of[places[at]] if places[at] >= 0 else -1
            between[at] = max(between[at], _wide_spread(self._centres[self._node_of != own_node]))
        error = TRIM_EFFICIENCY * np.maximum(noise, NOISE_FLOOR_RATIO) / np.sqrt(np.maximum(steps, 1))
        few = 1 + FEW_PEERS / np.maximum(others, 1)  # a spread estimated from few values is poorly known
        return noise, few * np.maximum(np.maximum(error, between), NOISE_FLOOR_RATIO)

    def _spread_without(self, place: int) -> tuple[float, float]:
        """Return the median and the mean of all deviations except those of one rank."""
        first, end = self._bounds[place : place + 2] if place >= 0 else (0, 0)
        gone = np.sort(self._rank_of[first:end])
        count = len(self._ordered) - len(gone)
        low, high = (count - 1) // 2, count // 2
        # The k-th of the rest is the (k + j)-th of all if j of the removed ones precede it.
        gone -= np.arange(len(gone))
        low += int(np.searchsorted(gone, low, side="right"))
        high += int(np.searchsorted(gone, high, side="right"))
        median = float(self._ordered[low] + self._ordered[high]) / 2
        return median, (self._total - float(self._spread[first:end].sum())) / count


def spread_of(levels: Floats) -> float:
    """Return the standard deviation that mostly healthy ranks' levels imply, NaN ignored; 0 if there are none."""
    known = levels[np.isfinite(levels)]
    return max(SIGMA_PER_MAD * median_of(np.abs(known - median_of(known))), _wide_spread(known)) if len(known) else 0.0


def _wide_spread(values: Floats) -> float:
    """Return the standard deviation implied by the larger deviations, 0 if there are none."""
    if not len(values):
        return 0.0
    apart, place = np.abs(values - median_of(values)), int(WIDE_QUANTILE * (len(values) - 1))
    return SIGMA_PER_WIDE * float(np.partition(apart, place)[place])


def noise_of_peers(
    window: Window, indexes: Integers, steps: Integers, first: int, end: int = 0
) -> tuple[Floats, Floats]:
    """Return the noise of each rank's peers in lines ``first`` to ``end`` (0: the newest), (ranks,).

    And the error of a mean over that many steps.
    """
    noise, error = np.empty(len(indexes)), np.empty(len(indexes))
    roles = window.role_of[indexes]
    for role in np.unique(roles).tolist():
        of_role = np.flatnonzero(roles == role)
        members = role_sample(window, role)
        place = np.minimum(np.searchsorted(members, indexes[of_role]), len(members) - 1)
        columns = np.where(members[place] == indexes[of_role], place, -1)
        values = window.steps.relative_compute[first : end or None][:, members]
        noise[of_role], error[of_role] = StepNoise(values, window.node_of[members]).of_others(columns, steps[of_role])
    return noise, error


@once
def memory(window: Window, role: int) -> float:
    """Return the correlation of a rank's compute, relative to its peers', between consecutive steps.

    The median over the ranks of a role, so that a slow rank has no influence; the small-sample bias is corrected
    (Kendall 1954).
    """
    relative = window.steps.relative_compute[-MEMORY_STEPS:, role_sample(window, role)]
    relative = relative[:, np.isfinite(relative).sum(axis=0) >= MEMORY_STEPS_MIN]
    if relative.size == 0:
        return MEMORY_UNKNOWN
    apart = relative - median_over_rows(relative)
    spread = OUTLIER_SIGMAS * SIGMA_PER_MAD * median_over_rows(np.abs(apart))
    apart = np.nan_to_num(np.clip(apart, -spread, spread))
    power = (apart**2).sum(axis=0)
    moving = power > 0
    if not moving.any():
        return 0.0
    lagged = (apart[1:] * apart[:-1]).sum(axis=0)[moving] / power[moving]
    seen = median_of(lagged)
    return float(np.clip(seen + (1 + 3 * seen) / len(relative), 0.0, 0.95))


def chance_digits(window: Window, index: int, centre: float, steps: int) -> float:
    """Return how improbable a rank's mean over some steps is by chance, in decimal digits; inf if independent.

    Where steps are not independent one disturbance lasts for several, which are one piece of evidence. Its possible
    size is estimated from all ranks of the other nodes, from single steps or from what has lasted as long as one piece
    of evidence, whichever says more: a stumble of one step says nothing about slowness that lasts. Of M values the
    highest comes once in M, and one k times as far off once in M to the k if single steps' tails are no heavier than
    exponential. Those of what lasts are taken to be as heavy as those of hosts' metrics: k to the ``TAIL_INDEX`` times
    more rarely.
    """
    kept = memory(window, int(window.role_of[index]))
    elsewhere = window.steps.relative_compute[:, peers_elsewhere(window, index)]
    known = elsewhere[np.isfinite(elsewhere)]
    if kept < MEMORY_MIN or len(known) < 2:
        return math.inf
    most = max(highest(known) - 1, NOISE_FLOOR_RATIO)
    independent = max(1.0, steps * (1 - kept) / (1 + kept))
    single = independent * math.log10(len(known)) * (centre - 1) / most
    lasting = _lasting(
        window, int(window.role_of[index]), int(window.node_of[index]), math.ceil((1 + kept) / (1 - kept))
    )
    if len(lasting) < 2:
        return single
    times = (centre - 1) / max(highest(lasting) - 1, NOISE_FLOOR_RATIO)
    return max(single, independent * (math.log10(len(lasting)) + TAIL_INDEX * math.log10(times)))


@once
def _lasting(window: Window, role: int, node: int, steps: int) -> Floats:
    """Return the medians over each so many consecutive steps of a role's ranks on other nodes."""
    members = role_sample(window, role)
    elsewhere = window.steps.relative_compute[:, members[window.node_of[members] != node]]
    blocks = elsewhere[len(elsewhere) % steps :].reshape(-1, steps, elsewhere.shape[1])
    medians = median_over_rows(blocks.swapaxes(0, 1).reshape(steps, -1))
    return np.asarray(medians[np.isfinite(medians)])


def screening_noise(relative: Floats) -> float:
    """Return a rough noise of single steps, from a sample of the newest."""
    newest = relative[-SCREEN_STEPS:, :: max(relative.shape[1] // PEERS_SAMPLED, 1)]
    known = newest[np.isfinite(newest)]
    return SIGMA_PER_MAD * median_of(np.abs(known - 1)) if len(known) else 0.0


def unheard_of(own: Floats, peers: Floats) -> bool:
    """Whether each of a few steps is slower than any step of any peer, often enough to rule out chance.

    One of M peers' steps exceeds them all with probability 1/M, n independent ones in a row with M to the -n.
    """
    known = peers[np.isfinite(peers)]
    return bool(len(known) > 1 and own.min() > known.max() and len(own) * math.log10(len(known)) >= UNHEARD_OF_DIGITS)


def highest(values: Floats) -> float:
    """Return the highest of the observed values, -inf if there are none."""
    return float(np.max(values, initial=-np.inf, where=np.isfinite(values)))
