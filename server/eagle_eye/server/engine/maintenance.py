"""Maintenance windows: times without actions, for everything, for jobs or for nodes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from eagle_eye.server.engine.job_names import Names, matches

# Unix seconds, up to the end of the year 9999, so that they can be shown as a date.
Moment = Annotated[float, Meta(ge=0, le=253_402_300_799)]


class Maintenance(
    Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    rename={"from_s": "from", "until_s": "until"},
):
    """No action on what it covers from ``from_s`` until before ``until_s`` (Unix seconds).

    It covers everything, or, if ``jobs`` or ``nodes`` (glob patterns) are given, those. ``reason`` is for display.
    """

    from_s: Moment
    until_s: Moment
    jobs: Names = []
    nodes: Names = []
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuse an empty window. Raises ValueError, which the configuration reader reports with its key."""
        if not self.from_s < self.until_s:
            raise ValueError(f"until ({moment(self.until_s)}) is not after from ({moment(self.from_s)})")


class InForce(NamedTuple):
    """A window that is open now; ``node`` is one that it covers, "" if it covers the job or everything."""

    where: str
    window: Maintenance
    node: str


def in_force(windows: Iterable[Maintenance], job: str, nodes: Collection[str], now_s: float) -> InForce | None:
    """Return the open window that covers the job or one of the nodes and ends last, or None.

    ``nodes`` are those that would be affected; a window that names nodes covers them if it names any of them.
    """
    found = [
        InForce(f"policy.maintenance[{place}]", window, _concerned(window, nodes))
        for place, window in enumerate(windows)
        if window.from_s <= now_s < window.until_s and _concerns(window, job, nodes)
    ]
    return max(found, key=lambda one: (one.window.until_s, one.where), default=None)


def _concerns(window: Maintenance, job: str, nodes: Collection[str]) -> bool:
    if not (window.jobs or window.nodes):
        return True
    return (bool(window.jobs) and matches(window.jobs, job)) or bool(_concerned(window, nodes))


def _concerned(window: Maintenance, nodes: Collection[str]) -> str:
    return min((node for node in nodes if matches(window.nodes, node)), default="") if window.nodes else ""


def moment(time_s: float) -> str:
    """Return a Unix time as RFC 3339 in UTC, to the second."""
    return f"{np.datetime64(int(time_s), 's')}Z"
