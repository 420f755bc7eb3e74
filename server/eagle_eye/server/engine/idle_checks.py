"""Selects the idle nodes to check for silent corruption now, within the site's weekly budget. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

WEEK_S = 7 * 86_400.0


class IdleCheckSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How nodes without a job are checked for silent corruption, if their agents make checks. 0 s a week: never."""

    weekly_budget_s: Annotated[float, Meta(ge=0, le=WEEK_S)] = 0.0  # of each node, under load
    check_s: Annotated[float, Meta(ge=10, le=600)] = 60.0  # of one check; what it is asked for counts, not what it took
    every_s: Annotated[float, Meta(ge=300, le=WEEK_S)] = 3_600.0  # from one check of a node to its next at least
    idle_s: Annotated[float, Meta(ge=0, le=86_400)] = 600.0  # without a job, before a node is asked
    nodes_at_once: Annotated[int, Meta(ge=1)] = 4  # of the whole fleet: each takes the power of a job

    def __post_init__(self) -> None:
        """Refuse a budget that no check fits into. Raises ValueError, which the configuration reader reports."""
        if 0 < self.weekly_budget_s < self.check_s:
            raise ValueError(
                f"weekly_budget_s: expected 0 or at least check_s ({self.check_s:g}), got {self.weekly_budget_s:g}"
            )


class RequestedCheck(NamedTuple):
    """A requested check of a node; ``begun``: it has started, or still may."""

    node: str
    time_s: float
    begun: bool = True


def due(
    idle_since_s: Mapping[str, float],
    asked: Iterable[RequestedCheck],
    under_way: int,
    settings: IdleCheckSettings,
    now_s: float,
) -> list[str]:
    """Return the nodes to check now, those checked longest ago first.

    ``idle_since_s`` has the nodes that may be checked, ``asked`` their checks of at least the last week, ``under_way``
    is the number of open checks. Within any ``WEEK_S`` no node starts more checks than its budget allows; setting a
    clock back does not make a check come earlier.
    """
    spent_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    for one in asked:
        last_s[one.node] = max(one.time_s, last_s.get(one.node, one.time_s))
        if one.begun and now_s - one.time_s < WEEK_S:
            spent_s[one.node] = spent_s.get(one.node, 0.0) + settings.check_s
    may = [
        node
        for node, since_s in idle_since_s.items()
        if now_s - since_s >= settings.idle_s
        and spent_s.get(node, 0.0) + settings.check_s <= settings.weekly_budget_s
        and (node not in last_s or now_s - last_s[node] >= settings.every_s)
    ]
    may.sort(key=lambda node: (last_s.get(node, float("-inf")), node))
    return may[: max(0, settings.nodes_at_once - under_way)]
