"""All cuts into stages and all mixtures of pipelines, each tried: what ``eagle-eye plan`` must not be slower than."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from eagle_eye.planning.files import Layer, Profile
from eagle_eye.planning.plan import Template
from eagle_eye.planning.step_time import simulate, step_time_s


class Together(NamedTuple):
    """What one micro-batch takes some layers together."""

    forward_s: float
    backward_s: float


def together(layers: Sequence[Layer]) -> Together:
    """Return the layers as one stage."""
    return Together(sum(layer.forward_s for layer in layers), sum(layer.backward_s for layer in layers))


def memory_bytes(layers: Sequence[Layer], in_flight: int) -> int:
    """Return what they hold with so many micro-batches under way."""
    return sum(
        2 * layer.parameter_bytes + layer.optimizer_bytes + in_flight * layer.activation_bytes for layer in layers
    )


def least_cut_s(job: Profile, stages_max: int, micro_batches: int, stage_memory_bytes: int) -> float:
    """Return the least step time of all cuts into so many stages or fewer; infinite where none keeps the memory.

    Each is run event by event.
    """
    best_s = math.inf
    for count in range(1, min(stages_max, len(job.layers)) + 1):
        for inner in itertools.combinations(range(1, len(job.layers)), count - 1):
            cuts = [0, *inner, len(job.layers)]
            parts = [job.layers[begin:end] for begin, end in itertools.pairwise(cuts)]
            if all(memory_bytes(part, count - place) <= stage_memory_bytes for place, part in enumerate(parts)):
                best_s = min(best_s, simulate([together(part) for part in parts], [micro_batches])[-1].end_s)
    return best_s


def least_mixture_s(templates: Sequence[Template], nodes: int, pipelines_min: int, micro_batches: int) -> float:
    """Return the least step time of all mixtures of the templates on so many nodes, with all their batches."""
    best_s = math.inf
    times_s = {
        template.nodes: [0.0, *(step_time_s(template.stages, batch) for batch in range(1, micro_batches + 1))]
        for template in templates
    }
    sizes = sorted(times_s)
    for count in range(pipelines_min, min(nodes // sizes[0], micro_batches) + 1):
        for mixture in itertools.combinations_with_replacement(sizes, count):
            if sum(mixture) <= nodes:
                for batches in _batches(count, micro_batches):
                    slowest_s = max(times_s[size][batch] for size, batch in zip(mixture, batches, strict=True))
                    best_s = min(best_s, slowest_s)
    return best_s


def _batches(pipelines: int, micro_batches: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to give each pipeline one micro-batch at least."""
    for cuts in itertools.combinations(range(1, micro_batches), pipelines - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *cuts, micro_batches)))
