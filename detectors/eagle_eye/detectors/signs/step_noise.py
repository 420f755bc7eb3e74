"""What chance makes of ranks' steps: their noise, its tails, and how long one stumble is remembered."""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.detectors.signs.medians import median_of, median_over_rows
from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.types import Floats, Window

STEPS_MIN = 3  # fewer steps say nothing about persistence
PEERS_SAMPLED = 256  # of a large role, enough for its spread
SCREEN_STEPS = 20  # newest steps from which noise is taken at first
NOISE_FLOOR_RATIO = 0.004  # identical peers still differ by a timer's grain
UNHEARD_OF_DIGITS = 8.0  # of chance, 1e-8, that short stretches of noisy steps must rule out
MEMORY_STEPS, MEMORY_STEPS_MIN = 64, 12  # newest steps that tell how long noise is remembered; fewer do not
MEMORY_UNKNOWN = 0.5  # lag-1 correlation until they do: recorded workers show 0.5 to 0.9 (Alibaba, 2021)
MEMORY_MIN = 0.4  # below it steps are as good as independent
OUTLIER_SIGMAS = 3.0


@once
def memory(window: Window, role: int) -> float:
    """Return the correlation of a rank's compute, beside its peers', in one step with that in the next.

    The median over the ranks of a role, so that a rank that is slow has no say; what the ranks' own levels in a short
    view hide is added (Kendall 1954).
    """
    members = np.flatnonzero(window.role_of == role)
    members = members[:: math.ceil(len(members) / PEERS_SAMPLED)] if len(members) else members
    relative = window.steps.relative_compute[-MEMORY_STEPS:, members]
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


def chance_digits(window: Window, role: int, elsewhere: Floats, centre: float, steps: int) -> float:
    """Return how improbable a rank's level over so many steps is by chance, as digits; inf where steps are independent.

    Where they are not, one stumble lasts for several steps, and these are one piece of evidence. How far one goes is
    taken from all that the other nodes' ranks did: of M values the highest comes once in M, and one that is k times as
    far off once in M to the k, or more seldom where tails are no heavier than exponential.
    """
    kept = memory(window, role)
    known = elsewhere[np.isfinite(elsewhere)]
    if kept < MEMORY_MIN or len(known) < 2:
        return math.inf
    most = max(highest(known) - 1, NOISE_FLOOR_RATIO)
    independent = max(1.0, steps * (1 - kept) / (1 + kept))
    return independent * math.log10(len(known)) * (centre - 1) / most


def screening_noise(relative: Floats) -> float:
    """Return a rough noise of single steps, from a sample of the newest."""
    newest = relative[-SCREEN_STEPS:, :: max(relative.shape[1] // PEERS_SAMPLED, 1)]
    known = newest[np.isfinite(newest)]
    return SIGMA_PER_MAD * median_of(np.abs(known - 1)) if len(known) else 0.0


def unheard_of(own: Floats, peers: Floats) -> bool:
    """Whether every step of a short stretch is slower than any that any peer showed: so often that chance is ruled out.

    One of M peers' steps tops them all with probability 1/M, n independent ones in a row with M to the -n.
    """
    known = peers[np.isfinite(peers)]
    return bool(len(known) > 1 and own.min() > known.max() and len(own) * math.log10(len(known)) >= UNHEARD_OF_DIGITS)


def highest(values: Floats) -> float:
    """Return the highest of the observed values, -inf of none."""
    return float(np.max(values, initial=-np.inf, where=np.isfinite(values)))
