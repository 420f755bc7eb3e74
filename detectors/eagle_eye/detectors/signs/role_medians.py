"""Medians of all roles at once, from a sample of each role's ranks, without a loop over roles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.once import once_for_members
from eagle_eye.detectors.types import Floats, Integers, Window

SAMPLE_MAX = 256  # of a role's ranks: the sample median is within a tenth of their spread
NARROW = 1 << 16  # fewer roles than this sort by radix


class Roles(NamedTuple):
    """Roles of at least some size: ``sample`` (R, M) holds columns of each, ``size`` (R,) the number of ranks.

    ``place`` (S,) is each column's line in ``sample``, -1 in a role that is too small. A role smaller than M has each
    of its columns in ``sample`` equally often.
    """

    sample: NDArray[np.intp]
    size: NDArray[np.intp]
    place: NDArray[np.intp]


def roles_of(role_of: Integers, least: int) -> Roles:
    """Return the roles with at least ``least`` ranks."""
    counts = np.bincount(role_of) if len(role_of) else np.zeros(0, np.intp)
    large = np.flatnonzero(counts >= max(least, 1))
    size = counts[large]
    place = np.full(len(counts), -1)
    place[large] = np.arange(len(large))
    if not len(large):
        return Roles(np.zeros((0, 0), np.intp), size, np.full(len(role_of), -1))
    order = np.argsort(role_of.astype(np.uint16) if len(counts) < NARROW else role_of, kind="stable")
    start = (np.cumsum(counts) - counts)[large]
    width = min(int(size.max()), SAMPLE_MAX)
    within = np.arange(width)[None, :] * size[:, None] // width
    return Roles(order[start[:, None] + within], size, place[role_of])


@once_for_members
def window_roles(window: Window, least: int) -> Roles:
    """Return the roles of a window's series with at least ``least`` ranks."""
    return roles_of(window.role_of, least)


def medians(values: Floats, roles: Roles, least: int) -> Floats:
    """Return the median of each role in each line: (lines, S) to (lines, R); NaN with fewer than ``least`` known."""
    lines, width = len(values), roles.sample.shape[1]
    picked = np.sort(values[:, roles.sample], axis=2)
    large = width >= max(least, 1) and bool((roles.size >= least).all())
    if large and np.isfinite(picked[:, :, [0, -1]]).all():  # the usual case: no holes
        middle: Floats = (picked[:, :, (width - 1) // 2] + picked[:, :, width // 2]) / 2
        return middle
    known = np.isfinite(picked).sum(axis=2)
    low = np.take_along_axis(picked, np.maximum((known - 1) // 2, 0)[:, :, None], axis=2)[:, :, 0]
    high = np.take_along_axis(picked, np.minimum(known // 2, width - 1)[:, :, None], axis=2)[:, :, 0]
    # In a small role each rank may be in the sample more than once.
    enough = known * np.minimum(roles.size, width)[None, :] >= least * width
    with np.errstate(invalid="ignore"):  # infinite values sort last and are not picked if there are enough known ones
        return np.where(enough & (known > 0), (low + high) / 2, np.nan).reshape(lines, len(roles.size))
