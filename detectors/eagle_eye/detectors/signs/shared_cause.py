"""Groups nodes that a shared cause hit together, such as a rack's power or an aisle's heat: no node is to blame."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from eagle_eye.detectors.types import Window

TOGETHER_S = 60.0  # onsets on two nodes within this share a cause: by chance, at 6.5 faults of all kinds per 1,000
# node-days (Kokolis et al. 2025), it happens to a job of 1,000 nodes once in seven months
TOGETHER_ROWS = 3.0
ALIKE_FACTOR = 2.0  # larger ratios of severity are not the same trouble
SWITCH_SHARE = 0.5  # of a switch's nodes
SWITCH_NODES_MIN = 3


@dataclass(frozen=True, slots=True)
class Struck:
    """A node, as its index, that shows a sign; ``onset_s`` is its start, None if the window does not show it.

    ``depth`` is the severity, in any unit, None if it does not indicate the cause: a shared cause hits nodes about
    equally hard.
    """

    node: int
    onset_s: float | None
    depth: float | None = None


def cohort_of(window: Window, struck: Struck, others: Collection[Struck]) -> tuple[int, ...]:
    """Return the nodes that share the trouble of one, itself included; () if it is its own.

    Nodes share it if their onsets coincide, or if most nodes of the switch show the sign. ``others`` may show weaker
    signs: in an aisle that grows hot some node is first.
    """
    mates = {other.node for other in others if other.node != struck.node and _together(window, struck, other)}
    switch = window.switches[struck.node] if window.switches else ""
    if switch:
        members = {node for node, name in enumerate(window.switches) if name == switch}
        ill = members & {struck.node, *(other.node for other in others)}
        if len(ill) >= SWITCH_NODES_MIN and len(ill) >= SWITCH_SHARE * len(members):
            return tuple(sorted(ill | mates))
    return tuple(sorted({struck.node, *mates})) if mates else ()


def partition(
    window: Window, accused: Mapping[int, Struck], others: Sequence[Struck]
) -> tuple[list[int], list[tuple[int, ...]]]:
    """Return the nodes with their own trouble, and the groups of nodes that share one."""
    company = [*accused.values(), *others]
    alone: list[int] = []
    cohorts: list[set[int]] = []
    for node, struck in accused.items():
        cohort = set(cohort_of(window, struck, company))
        if not cohort:
            alone.append(node)
            continue
        for known in [known for known in cohorts if known & cohort]:
            cohort |= known
            cohorts.remove(known)
        cohorts.append(cohort)
    return alone, [tuple(sorted(cohort)) for cohort in cohorts]


def _together(window: Window, one: Struck, other: Struck) -> bool:
    if one.onset_s is None or other.onset_s is None:
        return False
    if one.depth is not None and other.depth is not None:
        low, high = sorted((one.depth, other.depth))
        if high > ALIKE_FACTOR * low:
            return False
    return abs(one.onset_s - other.onset_s) <= max(TOGETHER_S, TOGETHER_ROWS * window.interval_s)
