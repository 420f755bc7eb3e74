"""Layouts: the best mixture of pipelines for each number of nodes, and its batch."""

from __future__ import annotations

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from benchmarks.planning.exhaustive import least_mixture_s
from eagle_eye.planning.files import Profile
from eagle_eye.planning.planner import plan_layouts
from eagle_eye.planning.step_time import step_time_s
from eagle_eye.planning.templates import ModelDoesNotFit, plan_templates
from tests.planning.jobs import hardware, profile, profiles


@settings(max_examples=60, deadline=None)
@given(profiles(), st.integers(1, 6), st.integers(0, 2), st.integers(3, 7), st.integers(50, 400))
def test_no_other_mixture_and_no_other_batch_is_faster(
    job: Profile, nodes: int, tolerate: int, micro_batches: int, memory_bytes: int
) -> None:
    try:
        templates = plan_templates(job, hardware(nodes, memory_bytes), tolerate, micro_batches)
    except ModelDoesNotFit:
        reject()
    for layout in plan_layouts(templates, nodes, tolerate, micro_batches):
        pipelines_min = min(tolerate + 1, layout.nodes // templates[0].nodes)
        assert layout.step_s == pytest.approx(least_mixture_s(templates, layout.nodes, pipelines_min, micro_batches))


@settings(max_examples=60, deadline=None)
@given(profiles(12), st.integers(1, 30), st.integers(0, 3), st.integers(4, 70), st.integers(40, 400))
def test_every_number_of_nodes_has_a_layout_with_the_same_batch_and_its_copies(
    job: Profile, nodes: int, tolerate: int, micro_batches: int, memory_bytes: int
) -> None:
    try:
        templates = plan_templates(job, hardware(nodes, memory_bytes), tolerate, micro_batches)
    except ModelDoesNotFit:
        reject()
    least = templates[0].nodes
    layouts = plan_layouts(templates, nodes, tolerate, micro_batches)
    assert [layout.nodes for layout in layouts] == [*range(least, nodes + 1)]
    by_nodes = {template.nodes: template for template in templates}
    for layout in layouts:
        assert sum(pipeline.micro_batches for pipeline in layout.pipelines) == micro_batches
        assert all(pipeline.micro_batches >= 1 for pipeline in layout.pipelines)
        assert sum(pipeline.template for pipeline in layout.pipelines) + layout.idle_nodes == layout.nodes
        assert layout.idle_nodes >= 0
        assert layout.step_s == max(pipeline.step_s for pipeline in layout.pipelines)
        if layout.nodes >= (tolerate + 1) * least:
            assert layout.tolerates >= min(tolerate, len(layout.pipelines) - 1, layout.nodes - least)
            assert len(layout.pipelines) >= tolerate + 1
        for pipeline in layout.pipelines:
            stages = by_nodes[pipeline.template].stages
            assert pipeline.step_s == pytest.approx(step_time_s(stages, pipeline.micro_batches))


def test_pipelines_of_several_sizes_share_the_batch_by_what_they_can() -> None:
    templates = plan_templates(profile(24), hardware(5, 60 << 30), 1, 50)
    assert [template.nodes for template in templates] == [2, 3]
    five = plan_layouts(templates, 5, 1, 50)[-1]
    assert [pipeline.template for pipeline in five.pipelines] == [2, 3]
    assert five.pipelines[0].micro_batches < five.pipelines[1].micro_batches


def test_fewer_micro_batches_than_pipelines_leave_nodes_idle() -> None:
    templates = plan_templates(profile(1), hardware(6), 1, 3)
    layout = plan_layouts(templates, 6, 1, 3)[-1]
    assert (len(layout.pipelines), layout.idle_nodes) == (3, 3)
