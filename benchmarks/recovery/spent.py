"""Where the time of a run went, by the job's own step log and the launcher's words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

STEP_S = 0.3  # of an undisturbed step: what the job fills each up to


class Spent(msgspec.Struct):
    """Seconds by what they went into; all of them together are the time between the first and the last step.

    ``steps_s``: steps that were new, at the undisturbed pace. ``rework_s``: steps that had been made before.
    ``detection_s``: from a fault until the launcher began to stop the job. ``restart_s``: from there to the next
    attempt's first step. ``capture_s``: what checkpoints made steps longer by. ``slower_s``: what else did.
    """

    steps_s: float = 0.0
    rework_s: float = 0.0
    detection_s: float = 0.0
    restart_s: float = 0.0
    capture_s: float = 0.0
    slower_s: float = 0.0

    def and_also(self, other: Spent) -> Spent:
        """Return the sum."""
        return Spent(*(mine + theirs for mine, theirs in zip(_values(self), _values(other), strict=True)))

    @property
    def shares(self) -> dict[str, float]:
        """Return what each is of all the time, empty where there is none."""
        whole_s = sum(_values(self))
        names = [name.removesuffix("_s") for name in self.__struct_fields__]
        return {name: round(value / whole_s, 3) for name, value in zip(names, _values(self), strict=True) if whole_s}


def spent(
    steps: Sequence[Mapping[str, Any]], reported: Iterable[Mapping[str, Any]], harmed_s: Sequence[float]
) -> Spent:
    """Return where the time between the steps went.

    ``reported`` is what the launcher has said, ``harmed_s`` are the moments of the faults (Unix seconds).
    """
    decided_s: dict[int, float] = {}
    for line in reported:
        decided_s.setdefault(line["attempt"], line["time"])
    found, reached = Spent(), max((step["step"] for step in steps[:1]), default=0)
    for before, step in pairwise(steps):
        took_s = step["time_s"] - before["time_s"]
        pace_s = min(took_s, STEP_S)
        if step["step"] > reached:
            found.steps_s += pace_s
            reached = step["step"]
        else:
            found.rework_s += pace_s
        if step["attempt"] != before["attempt"]:
            began_s = [at_s for attempt, at_s in decided_s.items() if before["attempt"] < attempt <= step["attempt"]]
            standstill_s = _found_out(before["time_s"], step["time_s"], sorted(began_s), harmed_s)
            found.detection_s += standstill_s
            found.restart_s += took_s - pace_s - standstill_s
            continue
        capture_s = min(took_s - pace_s, step["kept_s"])
        found.capture_s += capture_s
        if _is_disturbed(step["time_s"], harmed_s, decided_s.values()):
            found.detection_s += took_s - pace_s - capture_s
        else:
            found.slower_s += took_s - pace_s - capture_s
    return found


def _values(one: Spent) -> tuple[float, ...]:
    return msgspec.structs.astuple(one)


def _found_out(since_s: float, until_s: float, began_s: Sequence[float], harmed_s: Sequence[float]) -> float:
    """Return how much of a standstill went by until each of its faults was found out.

    The first fault is what the job stands still for; the others fall into the starts of attempts that made no step.
    """
    total_s, last_s = 0.0, since_s
    for moment_s in began_s:
        at_s = min(max(moment_s, last_s), until_s)
        faults_s = [fault_s for fault_s in harmed_s if last_s < fault_s <= at_s]
        if last_s == since_s:
            total_s += at_s - since_s
        elif faults_s:
            total_s += at_s - min(faults_s)
        last_s = at_s
    return total_s


def _is_disturbed(at_s: float, harmed_s: Sequence[float], decided_s: Iterable[float]) -> bool:
    """Whether a fault has not been found out by then."""
    last_s = max((moment for moment in harmed_s if moment <= at_s), default=None)
    return last_s is not None and not any(last_s < moment <= at_s for moment in decided_s)
