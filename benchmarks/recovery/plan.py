"""What happens to the job and when: drawn from a seed before the run, so that nothing that is seen changes it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

PROCESS_KINDS = ("hang", "slow", "unreachable", "crash", "kill", "nan")
GPU_KINDS = ("gpu_lost", "gpu_memory")

Shape = Literal[
    "single", "pair", "during_recovery", "flapping", "subscriber_killed", "server_killed", "false_alarm", "stale_alarm"
]
# Of a hundred items; at least one of each as soon as there are enough items for all.
SHARES: dict[Shape, int] = {
    "single": 58,
    "pair": 9,
    "during_recovery": 9,
    "flapping": 6,
    "subscriber_killed": 7,
    "server_killed": 7,
    "false_alarm": 2,
    "stale_alarm": 2,
}
TWO_FAULTS = ("pair", "during_recovery")
GAP_S_MAX = 6.0


class Item(msgspec.Struct, frozen=True):
    """One thing that happens; ``picks`` (0..1) choose victims among whoever then takes part.

    ``gap_s``: how long the job has trained again before it; ``pause_s``: how long whoever is killed stays away.
    """

    number: int
    shape: Shape
    kinds: tuple[str, ...]
    picks: tuple[float, ...]
    gap_s: float
    pause_s: float


def draw(
    faults: int, seed: int, *, gpus: bool, only: Sequence[Shape] = (), kinds_only: Sequence[str] = ()
) -> list[Item]:
    """Return items with so many faults in all (one more where the last item has two); an alarm by hand counts as one.

    Kinds come about equally often. ``gpus``: whether the nodes have GPUs, simulated ones, that can fail; ``only``: the
    shapes that there are to be, in turns; ``kinds_only``: the kinds.
    """
    source = random.Random(seed)
    shapes = list(only) or _shuffled(source, list(SHARES), list(SHARES.values()))
    kinds = _endless(source, list(kinds_only) or [*PROCESS_KINDS, *(GPU_KINDS if gpus else ())])
    items: list[Item] = []
    count = 0
    while count < faults:
        shape = shapes[len(items) % len(shapes)]
        size = 2 if shape in TWO_FAULTS else 1
        items.append(
            Item(
                number=len(items) + 1,
                shape=shape,
                kinds=tuple(next(kinds) for _ in range(size)) if "alarm" not in shape and shape != "flapping" else (),
                picks=(source.random(), source.random()),
                gap_s=source.uniform(0.0, GAP_S_MAX),
                pause_s=source.uniform(1.0, 4.0),
            )
        )
        count += size
    return items


def faults_in(items: Sequence[Item]) -> int:
    """Return how many faults they are."""
    return sum(2 if item.shape in TWO_FAULTS else 1 for item in items)


def _shuffled(source: random.Random, shapes: list[Shape], shares: list[int]) -> list[Shape]:
    """Return a hundred shapes in a drawn order, one of each and as many singles among the first sixteen."""
    singles: list[Shape] = ["single"] * len(shapes)
    first = [*shapes, *singles]
    rest = [shape for shape, share in zip(shapes, shares, strict=True) for _ in range(share)]
    for shape in first:
        rest.remove(shape)
    source.shuffle(first)
    source.shuffle(rest)
    return [*first, *rest]


def _endless(source: random.Random, kinds: list[str]) -> Iterator[str]:
    while True:
        source.shuffle(kinds)
        yield from kinds
