"""Probation: each further exclusion of a node delays its return longer. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Action


@dataclass(frozen=True, slots=True)
class Probation:
    """How often a node was recently excluded, and until when to keep it out; None: it may return at once.

    ``relapses`` counts the exclusions that came while it was still watched after an earlier return.
    """

    exclusions: int
    until_s: float | None
    relapses: int = 0


def probation(
    node: str, actions: Iterable[Action], settings: PolicySettings, now_s: float, relapsed: Iterable[float] = ()
) -> Probation:
    """Return what a node that is out needs to come back.

    ``actions`` are any; those count that took the node out within ``flapping_window_s``. The first exclusion needs
    nothing, the second ``probation_s`` from when it was done, each further one twice as much, up to
    ``probation_s_max``. A relapse (``relapsed`` are their times) counts as one more exclusion, since the repair did not
    hold. A person's exclusions do not count: they are deliberate.
    """
    done_s = [
        action.updated_s
        for action in actions
        if action.kind == "exclude_node"
        and action.state == "done"
        and node in action.exclude
        and now_s - action.updated_s <= settings.flapping_window_s
    ]
    relapses = sum(now_s - time_s <= settings.flapping_window_s for time_s in relapsed)
    times = len(done_s) + relapses
    if not done_s or times < 2 or settings.probation_s <= 0:
        return Probation(len(done_s), None, relapses)
    doublings = min(times - 2, 32)  # beyond this the limit applies anyway
    until_s = max(done_s) + min(settings.probation_s * 2.0**doublings, settings.probation_s_max)
    return Probation(len(done_s), until_s if until_s > now_s else None, relapses)
