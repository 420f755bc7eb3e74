"""Chooses which whole steps to keep: the newest, and some older ones. Pure.

Most faults are detected at once, so the newest step is good to resume from. A diverging loss or silent corruption is
detected after minutes: by then every step since the onset may be damaged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from statistics import median_low

from eagle_eye.checkpoint.memory_plan import SPACED
from eagle_eye.checkpoint.messages import CopyInfo, KeptStep
from eagle_eye.schema.memory_steps import has_all_ranks


def kept_of(whole: Iterable[int], captured_s: Mapping[int, float], keep: int, reach_s: float) -> set[int]:
    """Return those of the whole steps that are kept: the ``keep`` newest, and with a ``reach_s`` at most two more.

    These are the newest step that is ``reach_s`` older than the newest of all, and the one after it, which will take
    its place. That was among the newest when the other one had just become old enough: so what reaches back is less
    than twice ``reach_s`` old, where two newest are kept and training did not pause for longer.
    A step without a time in ``captured_s`` is none of the two.
    """
    steps = sorted(whole)
    dated = [step for step in steps if step in captured_s]
    newest = set(steps[-keep:])
    if reach_s <= 0 or not dated:
        return newest
    until_s = captured_s[dated[-1]] - reach_s
    reaching = max((place for place, step in enumerate(dated) if captured_s[step] <= until_s), default=0)
    return newest | set(dated[reaching : reaching + SPACED])


def kept_from_before(
    plan: str,
    copies: Iterable[CopyInfo],
    known: Collection[int],
    resumed: tuple[int, int],
    reach_s: float,
) -> tuple[KeptStep, ...]:
    """Return what an attempt of this plan keeps of earlier ones, oldest first: the resumed step and what reaches back.

    ``copies`` are those of all nodes, ``resumed`` is the step with the attempt that captured it. Of the steps before,
    those count that stores of the last attempt keep (``known``): a node that was away may hold some of a course of
    training that nobody went on with.
    """
    last, attempt = resumed
    attempt_of = {last: attempt}
    ranks_s: dict[tuple[int, int], dict[int, float]] = {}
    for copy in copies:
        if copy.plan != plan or copy.step > last or (copy.step < last and copy.step not in known):
            continue
        if copy.step < last:
            attempt_of[copy.step] = max(copy.attempt, attempt_of.get(copy.step, copy.attempt))
        ranks_s.setdefault((copy.step, copy.attempt), {})[copy.rank] = copy.captured_s
    captured_s = {
        step: median_low(ranks_s[step, attempt].values())
        for step, attempt in attempt_of.items()
        if has_all_ranks(plan, ranks_s.get((step, attempt), ()))
    }
    kept = sorted(kept_of(captured_s, captured_s, 1, reach_s))
    return tuple(KeptStep(step, attempt_of[step], captured_s[step]) for step in kept)
