"""Templates: which sizes, how the layers are cut, what memory they keep."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from benchmarks.planning.exhaustive import least_cut_s, together
from benchmarks.planning.exhaustive import memory_bytes as memory_bytes_of
from eagle_eye.planning.files import Profile, sums
from eagle_eye.planning.step_time import step_time_s
from eagle_eye.planning.templates import ModelDoesNotFit, plan_templates, split
from tests.planning.jobs import GIB, hardware, layer, profile, profiles


@settings(max_examples=150, deadline=None)
@given(profiles(), st.integers(1, 6), st.integers(1, 12), st.integers(20, 400))
def test_no_other_cuts_are_faster(job: Profile, stages_max: int, micro_batches: int, memory_bytes: int) -> None:
    expected_s = least_cut_s(job, stages_max, micro_batches, memory_bytes)
    cuts = split(sums(job), stages_max, micro_batches, memory_bytes)
    if cuts is None:
        assert expected_s == math.inf
    else:
        parts = [together(job.layers[begin:end]) for begin, end in itertools.pairwise(cuts)]
        assert step_time_s(parts, micro_batches) == pytest.approx(expected_s)


@settings(max_examples=60, deadline=None)
@given(profiles(12), st.integers(1, 14), st.integers(0, 2), st.integers(1, 3), st.integers(60, 400))
def test_every_template_has_all_layers_once_and_keeps_the_memory(
    job: Profile, nodes: int, tolerate: int, gpus: int, memory_bytes: int
) -> None:
    try:
        templates = plan_templates(job, hardware(nodes, memory_bytes, gpus), tolerate, 16)
    except ModelDoesNotFit:
        reject()
    for template in templates:
        stages = template.stages
        assert [number for stage in stages for number in range(stage.first, stage.last + 1)] == [
            *range(len(job.layers))
        ]
        assert all(stage.memory_bytes <= memory_bytes for stage in stages)
        for place, stage in enumerate(stages):
            assert stage.memory_bytes == memory_bytes_of(job.layers[stage.first : stage.last + 1], len(stages) - place)
            assert stage.node == place // gpus < template.nodes


@settings(max_examples=60, deadline=None)
@given(profiles(12), st.integers(1, 14), st.integers(0, 2), st.integers(30, 300))
def test_the_sizes_cover_every_number_of_nodes_as_oobleck_proves(
    job: Profile, nodes: int, tolerate: int, memory_bytes: int
) -> None:
    try:
        sizes = [template.nodes for template in plan_templates(job, hardware(nodes, memory_bytes), tolerate, 16)]
    except ModelDoesNotFit:
        reject()
    least = sizes[0]
    assert sizes == [*range(least, sizes[-1] + 1)]
    assert 2 * least - 1 <= sizes[-1] <= max(2 * least - 1, nodes - tolerate * least)
    covered = {0}
    for count in range(1, 4 * least):
        if any(count - size in covered for size in sizes):
            covered.add(count)
        assert (count in covered) == (count >= least)


def test_the_smallest_template_is_the_first_that_holds_the_model() -> None:
    job = profile(8)  # each layer 4 GiB, and 0.25 GiB for each micro-batch under way
    assert [template.nodes for template in plan_templates(job, hardware(6, 15 * GIB), 1, 24)] == [3, 4, 5]


def test_larger_templates_stop_where_a_node_would_have_no_stage() -> None:
    sizes = [template.nodes for template in plan_templates(profile(4), hardware(20), 1, 64)]
    assert sizes == [1, 2, 3, 4]


def test_gpus_that_hold_a_stage_together_have_their_memory_together() -> None:
    pair = plan_templates(profile(8), hardware(2, 8 * GIB, gpus_per_node=4, gpus_per_stage=2), 0, 8)[0]
    assert pair.nodes == 2
    assert [stage.node for stage in pair.stages] == [0, 0, 1, 1]


def test_a_layer_that_fits_nowhere_is_named() -> None:
    job = profile([layer(0), layer(1, parameter_bytes=50 * GIB), layer(2)])
    with pytest.raises(ModelDoesNotFit, match="layer 1 alone needs"):
        plan_templates(job, hardware(8, 40 * GIB), 1, 8)


def test_too_few_nodes_are_told_what_the_model_needs() -> None:
    with pytest.raises(ModelDoesNotFit, match=r"the model needs \d+ bytes .* but 2 nodes"):
        plan_templates(profile(8), hardware(2, 15 * GIB), 0, 8)
