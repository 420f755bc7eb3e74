"""What follows a loss: everybody has what the next layout needs, from who lives; peers only where they are faster."""

from __future__ import annotations

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from eagle_eye.planning.files import Profile
from eagle_eye.planning.plan import Layout, NoLayout, Plan
from eagle_eye.planning.planner import make_plan
from eagle_eye.planning.step_time import simulate
from tests.planning.jobs import GIB, hardware, layer, profile, profiles


def names(count: int) -> list[str]:
    return [f"n{number}" for number in range(1, count + 1)]


def planned(job: Profile, nodes: int, tolerate: int, batch: int, memory_bytes: int, gpus: int = 1) -> Plan:
    return make_plan(job, names(nodes), hardware(nodes, memory_bytes, gpus), tolerate, batch)


def held(plan: Plan, layout: Layout, nodes: tuple[str, ...]) -> dict[str, set[int]]:
    """The layers of each node."""
    stages = {template.nodes: template.stages for template in plan.templates}
    found: dict[str, set[int]] = {node: set() for node in nodes}
    places = iter(nodes)
    for pipeline in layout.pipelines:
        for number in range(pipeline.template):
            own = [stage for stage in stages[pipeline.template] if stage.node == number]
            found[next(places)] = {at for stage in own for at in range(stage.first, stage.last + 1)}
    return found


@settings(max_examples=60, deadline=None)
@given(profiles(10), st.integers(2, 12), st.integers(0, 2), st.integers(1, 2), st.integers(40, 300))
def test_whichever_nodes_go_one_after_the_other_every_layer_is_where_it_is_needed(
    job: Profile, nodes: int, tolerate: int, gpus: int, memory_bytes: int
) -> None:
    try:
        plan = planned(job, nodes, tolerate, 24, memory_bytes, gpus)
    except ValueError:
        reject()
    order = plan.nodes
    while len(order) > plan.nodes_min:
        layout = plan.layout(len(order))
        before = held(plan, layout, order)
        for lost in order:
            following = plan.lost(order, lost)
            assert sorted(following.nodes) == sorted({*order} - {lost})
            alive = set().union(*(layers for node, layers in before.items() if node != lost))
            has = {node: {*layers} for node, layers in before.items()}
            for copy in following.loss.copies:
                copied = {*range(copy.first, copy.last + 1)}
                assert copied.isdisjoint(has[following.nodes[copy.to]])
                if copy.source is None:
                    assert copied.isdisjoint(alive)
                else:
                    source = following.before[copy.source]
                    assert source != lost
                    assert copied <= before[source]
                has[following.nodes[copy.to]] |= copied
            assert all(layers <= has[node] for node, layers in held(plan, following.layout, following.nodes).items())
            if layout.tolerates:
                assert all(copy.source is not None for copy in following.loss.copies)
        order = plan.lost(order, order[len(order) // 2]).nodes


def test_pipelines_that_stay_copy_nothing() -> None:
    plan = planned(profile(24), 8, 1, 64, 60 * GIB)
    assert {pipeline.template for pipeline in plan.layout(8).pipelines} == {2}
    following = plan.lost(plan.nodes, "n3")
    copied_to = {following.nodes[copy.to] for copy in following.loss.copies}
    stay = {"n1", "n2", "n5", "n6", "n7", "n8"} - copied_to
    assert len(stay) >= 4


def test_with_one_pipeline_what_the_lost_node_held_comes_from_its_checkpoint() -> None:
    plan = planned(profile(24), 3, 1, 64, 60 * GIB)
    following = plan.lost(plan.nodes, "n1")
    assert any(copy.source is None for copy in following.loss.copies)


def test_below_the_fewest_nodes_there_is_no_layout_and_the_job_waits() -> None:
    plan = planned(profile(24), 2, 1, 64, 60 * GIB)
    with pytest.raises(NoLayout, match=r"no layout for 1 node: the model needs 2; the job waits for a spare"):
        plan.lost(plan.nodes, "n1")


COARSE = profile([layer(number, 0.1, 0.2, GIB, 2 * GIB, GIB // 8) for number in range(4)])


def test_where_the_next_layout_is_much_slower_peers_take_the_micro_batches_and_it_is_said_why() -> None:
    # Four layers on four nodes cannot be spread over three: one would have two layers.
    plan = planned(COARSE, 16, 1, 16, 5 * GIB)
    assert {pipeline.template for pipeline in plan.layout(16).pipelines} == {4}
    loss = plan.lost(plan.nodes, "n1").loss
    assert loss.reroute is not None
    assert loss.rerouted
    assert loss.reroute.step_s is not None
    assert loss.reroute.step_s < plan.layout(15).step_s
    assert "fill their bubbles" in loss.why


def test_where_both_are_equally_fast_the_next_layout_is_taken() -> None:
    plan = planned(COARSE, 16, 1, 16, 5 * GIB)
    loss = plan.lost(plan.nodes, "n4").loss
    assert loss.reroute is not None
    assert loss.reroute.step_s == pytest.approx(plan.layout(15).step_s)
    assert not loss.rerouted


def test_where_the_next_layout_is_about_as_fast_it_is_taken_and_it_is_said_why() -> None:
    plan = planned(profile(24), 9, 1, 64, 30 * GIB)
    losses = plan.layout(9).losses
    assert [(loss.rerouted, bool(loss.why)) for loss in losses] == [(False, True)] * 9


def test_peers_without_memory_for_it_take_nothing() -> None:
    tight = profile([layer(number, 0.1, 0.2, GIB, 2 * GIB, GIB // 4) for number in range(4)])
    plan = planned(tight, 8, 1, 8, 5 * GIB)
    loss = next(loss for loss in plan.layout(8).losses if loss.node == 0)
    assert loss.reroute is not None
    assert not loss.reroute.fits
    assert not loss.rerouted
    assert "do not fit" in loss.why


@settings(max_examples=40, deadline=None)
@given(profiles(6), st.integers(2, 4), st.integers(1, 4))
def test_what_peers_take_is_what_the_event_simulation_says_and_never_less_than_the_least(
    job: Profile, pipelines: int, more: int
) -> None:
    # Memory for one layer each: as many nodes as layers in every pipeline.
    count = len(job.layers)
    alike = profile([layer(one.layer, one.forward_s, one.backward_s, GIB, 0, 0) for one in job.layers])
    plan = planned(alike, pipelines * count, 0, pipelines * count * more, 2 * GIB)
    layout = plan.layouts[-1]
    assert [pipeline.template for pipeline in layout.pipelines] == [count] * pipelines
    batches = [pipeline.micro_batches for pipeline in layout.pipelines]
    for loss in layout.losses:
        assert loss.reroute is not None
        passes = simulate(plan.templates[0].stages, batches, failed=0, lost={loss.node})
        assert len(passes) == 2 * count * sum(batches)
        assert all((each.by != each.pipeline) == (each[:2] == (0, loss.node)) for each in passes)
        assert loss.reroute.step_s_min <= passes[-1].end_s * (1 + 1e-9)
        if loss.reroute.step_s is not None:
            assert loss.reroute.step_s == pytest.approx(passes[-1].end_s)
            assert loss.rerouted == (loss.reroute.step_s < plan.layout(layout.nodes - 1).step_s * (1 - 1e-9))
