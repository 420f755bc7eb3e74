"""Compares values with those of comparable peers at one moment, for many series at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.medians import median_of, median_of_others, median_over_rows
from eagle_eye.detectors.signs.once import once_for_members
from eagle_eye.detectors.types import Floats, Integers, Window

SIGMA_PER_MAD = 1.4826  # of a normal distribution
PEERS_MIN = 2  # with one peer it is undecidable which of the two is off
SMALL_GROUP = 64  # up to this size a group's median excludes the value itself; beyond, one value has no influence


class GroupPositions(NamedTuple):
    """The position of each value in its group: all (S,), NaN if not observed or with too few peers.

    ``median`` is that of the other members, ``sigma`` their robust standard deviation (1.4826 times the median absolute
    deviation, Iglewicz & Hoaglin 1993), never below the floor; ``distance`` is (value - median) / sigma.
    """

    median: Floats
    sigma: Floats
    distance: Floats


def peers_median(values: Floats, groups: Integers, least: int = PEERS_MIN) -> Floats:
    """Return for each of (S,) values the median of the others of its group; NaN with fewer than ``least`` of them."""
    return median_of_mates(values, group_members(groups), least)


def median_of_mates(values: Floats, groups: Sequence[Integers], least: int = PEERS_MIN) -> Floats:
    """Return ``peers_median`` for groups given by their members."""
    result = np.full(values.shape, np.nan)
    if len(groups) > 1 and len(groups[0]) <= SMALL_GROUP and len({len(members) for members in groups}) == 1:
        table = np.array(groups)  # vectorised over all groups of this size
        result[table] = median_of_others(values[table].astype(np.float64), least)
        return result
    for members in groups:
        own = values[members]
        if len(members) <= SMALL_GROUP:
            result[members] = median_of_others(own[None, :].astype(np.float64), least)[0]
            continue
        known = own[np.isfinite(own)]
        if len(known) > least:
            result[members] = np.where(np.isfinite(own), median_of(known), np.nan)
    return result


def standing(values: Floats, groups: Integers, floor: float, least: int = PEERS_MIN) -> GroupPositions:
    """Return the position of each of (S,) values in its group; ``floor`` is the least sigma, in the values' unit."""
    median = peers_median(values, groups, least)
    spread = np.abs(values - median)
    sigma = np.maximum(SIGMA_PER_MAD * peers_median(spread, groups, least), floor)
    return GroupPositions(median, sigma, (values - median) / sigma)


def group_members(groups: Integers) -> list[Integers]:
    """Return each group's members as indexes, by group."""
    if len(groups) == 0:
        return []
    if groups[0] == groups[-1] and (groups == groups[0]).all():
        return [np.arange(len(groups))]
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    bounds = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(groups)]
    return [order[start:end] for start, end in pairwise(bounds)]


@once_for_members
def role_members(window: Window) -> list[Integers]:
    """Return each role's series as indexes, by role."""
    return group_members(window.role_of)


def latest(values: Floats, lines: int) -> Floats:
    """Return each column's newest observed value within the last ``lines`` rows of (rows, columns); NaN: none."""
    result = np.full(values.shape[1], np.nan)
    for row in values[-lines:]:
        np.copyto(result, row, where=~np.isnan(row))
    return result


def level(values: Floats, lines: int) -> Floats:
    """Return each column's median over its observed values of the last ``lines`` rows: (columns,), NaN: none."""
    return median_over_rows(values[-lines:])


def step_levels(window: Window, metric: str, first: int, index: int, peers: Integers) -> tuple[float, float]:
    """Return a rank's median of a metric from step line ``first`` on, and that of its peers; NaN unobserved."""
    values = window.steps.values.get(metric)
    if values is None:
        return np.nan, np.nan
    own, others = values[first:, index], values[first:, peers]
    own, others = own[np.isfinite(own)], others[np.isfinite(others)]
    return (float(np.median(own)) if len(own) else np.nan), (float(np.median(others)) if len(others) else np.nan)


def growth(values: Floats, lines: int) -> Floats:
    """Return by how much each counter grew over the last ``lines`` rows: (columns,), 0 or more, NaN if unobserved.

    A counter that decreases has restarted at zero with its source.
    """
    recent = values[-lines:]
    if len(recent) == 0:
        return np.full(values.shape[1], np.nan)
    total = np.zeros(recent.shape[1]) if len(recent) > 1 else np.full(recent.shape[1], np.nan)
    moved = np.flatnonzero((recent != recent[-1]).any(axis=0) | np.isnan(recent[-1]))  # the usual case: few or none
    if len(moved):
        total[moved] = _growth(np.asarray(recent[:, moved], dtype=np.float64))
    return total


def _growth(recent: Floats) -> Floats:
    known = np.isfinite(recent)
    filled = np.where(known, recent, -np.inf)
    # Carry the last observed value over gaps, so that growth across a gap counts.
    at = np.maximum.accumulate(np.where(known, np.arange(len(recent))[:, None], -1), axis=0)
    carried = np.take_along_axis(filled, np.maximum(at, 0), axis=0)
    carried = np.where(at >= 0, carried, np.nan)
    change = np.diff(carried, axis=0)
    grown = np.where(change >= 0, change, carried[1:])
    total = np.nansum(grown, axis=0)
    return np.where(known.sum(axis=0) >= 2, total, np.nan)
