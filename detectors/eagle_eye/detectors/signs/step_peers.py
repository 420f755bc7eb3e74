"""Whom a rank's steps are compared with, and how much those differ from step to step and from each other. Pure."""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.detectors.signs.medians import median_of, trimmed_means
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.signs.step_noise import NOISE_FLOOR_RATIO, PEERS_SAMPLED, STEPS_MIN
from eagle_eye.detectors.types import Floats, Integers, Window

FEW_PEERS = 4.0  # the error of n peers counts 1 + 4/n times (Student's t against the normal, far in the tail)
TRIM_EFFICIENCY = 1.06  # standard error of a trimmed mean over that of a mean, normal distribution
SIGMA_PER_MEAN_DEVIATION = 1.2533  # of the normal distribution


class StepNoise:
    """The noise of (steps, ranks) relative values, sorted once for as many questions as there are suspects."""

    def __init__(self, relative: Floats) -> None:
        known = np.isfinite(relative)
        enough = known.sum(axis=0) >= STEPS_MIN
        self._place_of = np.append(np.where(enough, np.cumsum(enough) - 1, -1), -1)
        self._centres = trimmed_means(relative[:, enough])
        spread = np.abs(relative[:, enough] - self._centres).T  # (ranks, steps): of a rank lies together
        seen = np.isfinite(spread)
        self._spread = spread[seen]
        self._bounds = np.concatenate([[0], np.cumsum(seen.sum(axis=1))])
        order = np.argsort(self._spread, kind="stable")
        self._ordered = self._spread[order]
        self._rank_of = np.empty_like(order)
        self._rank_of[order] = np.arange(len(order))
        self._total = float(self._spread.sum())

    def of_others(self, columns: Integers, steps: Integers) -> tuple[Floats, Floats]:
        """Return the noise of single steps, and the error of a mean over so many: the ranks' spread counts, too.

        Each without the rank of its column (-1: of all ranks); infinite where no other reports enough steps.
        """
        places = self._place_of[columns]
        others = len(self._centres) - (places >= 0)
        noise, between = np.full(len(places), np.inf), np.full(len(places), np.inf)
        for at in np.flatnonzero(others > 0).tolist():
            # The mean deviation reaches into the tails that the median deviation does not see.
            median, mean = self._spread_without(int(places[at]))
            noise[at] = max(SIGMA_PER_MAD * median, SIGMA_PER_MEAN_DEVIATION * mean)
            centres = np.delete(self._centres, places[at]) if places[at] >= 0 else self._centres
            between[at] = SIGMA_PER_MAD * median_of(np.abs(centres - median_of(centres)))
        error = TRIM_EFFICIENCY * np.maximum(noise, NOISE_FLOOR_RATIO) / np.sqrt(np.maximum(steps, 1))
        few = 1 + FEW_PEERS / np.maximum(others, 1)  # a spread taken from few is not well known
        return noise, few * np.maximum(np.maximum(error, between), NOISE_FLOOR_RATIO)

    def _spread_without(self, place: int) -> tuple[float, float]:
        """Return the median and the mean of all deviations but those of one rank."""
        first, end = self._bounds[place : place + 2] if place >= 0 else (0, 0)
        gone = np.sort(self._rank_of[first:end])
        count = len(self._ordered) - len(gone)
        low, high = (count - 1) // 2, count // 2
        # What is k-th of the rest is k + j-th of all, if j of those that are gone stand before it.
        gone -= np.arange(len(gone))
        low += int(np.searchsorted(gone, low, side="right"))
        high += int(np.searchsorted(gone, high, side="right"))
        median = float(self._ordered[low] + self._ordered[high]) / 2
        return median, (self._total - float(self._spread[first:end].sum())) / count


class StepPeers:
    """Whom each rank of a window is compared with: its role's others, a sample of a large one."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._members: dict[int, Integers] = {}  # of each role that somebody asked for

    def of(self, index: int) -> Integers:
        """Return a rank's peers as indexes."""
        members = self._sample(int(self._window.role_of[index]))
        peers: Integers = members[members != index]
        return peers

    def elsewhere(self, index: int) -> Integers:
        """Return those of them on other nodes: all of a node may be slow."""
        peers = self.of(index)
        elsewhere: Integers = peers[self._window.node_of[peers] != self._window.node_of[index]]
        return elsewhere

    def noise(self, indexes: Integers, steps: Integers, first: int, end: int = 0) -> tuple[Floats, Floats]:
        """Return the noise of each rank's peers in lines ``first`` to ``end`` (0: the newest), (ranks,).

        And the error of a mean over so many steps.
        """
        noise, error = np.empty(len(indexes)), np.empty(len(indexes))
        roles = self._window.role_of[indexes]
        for role in np.unique(roles).tolist():
            of_role = np.flatnonzero(roles == role)
            members = self._sample(role)
            place = np.minimum(np.searchsorted(members, indexes[of_role]), len(members) - 1)
            columns = np.where(members[place] == indexes[of_role], place, -1)
            values = self._window.steps.relative_compute[first : end or None][:, members]
            noise[of_role], error[of_role] = StepNoise(values).of_others(columns, steps[of_role])
        return noise, error

    def _sample(self, role: int) -> Integers:
        if role not in self._members:
            members = np.flatnonzero(self._window.role_of == role)
            self._members[role] = members[:: math.ceil((len(members) - 1) / PEERS_SAMPLED) or 1]
        return self._members[role]
