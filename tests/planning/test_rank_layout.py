from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.planning.plan import NoLayout, RankLayout, nodes_used, rank_layout, variable
from tests.planning.jobs import plan


def stages(layout: RankLayout) -> list[list[tuple[int, int, tuple[int, ...]]]]:
    return [[(stage.first, stage.last, stage.ranks) for stage in pipeline.stages] for pipeline in layout.pipelines]


def test_a_nodes_rank_has_the_stage_of_its_place() -> None:
    layout = rank_layout(plan(5), 5)
    assert stages(layout) == [[(0, 3, (0,)), (4, 7, (1,))], [(0, 2, (2,)), (3, 5, (3,)), (6, 7, (4,))]]
    assert (layout.ranks, layout.layers, layout.global_batch) == (5, 8, 16)


def test_a_nodes_gpus_are_given_to_its_stages_in_their_order() -> None:
    layout = rank_layout(plan(2, gpus=4, together=2, gib=6), 2)
    assert [stage.ranks for stage in layout.pipelines[0].stages] == [(0, 1), (2, 3), (4, 5), (6, 7)]


@given(st.integers(2, 7), st.integers(2, 24), st.sampled_from([(1, 1), (2, 1), (4, 2)]))
def test_every_pipeline_has_all_layers_once_and_every_rank_one_stage_at_most(
    nodes: int, batch: int, gpus: tuple[int, int]
) -> None:
    made = plan(7, batch=batch, gpus=gpus[0], together=gpus[1])
    if nodes < made.nodes_min:
        return
    layout = rank_layout(made, nodes)
    for pipeline in layout.pipelines:
        held = [layer for stage in pipeline.stages for layer in range(stage.first, stage.last + 1)]
        assert held == [*range(made.layers)]
    ranks = [rank for pipeline in layout.pipelines for stage in pipeline.stages for rank in stage.ranks]
    assert len(set(ranks)) == len(ranks)
    assert {*ranks} <= {*range(layout.ranks)}
    assert sum(pipeline.micro_batches for pipeline in layout.pipelines) * layout.micro_batch == layout.global_batch


def test_nodes_that_make_nothing_faster_are_not_used() -> None:
    made = plan(7, layers=4, batch=2)  # two pipelines at most, of four stages at most
    assert made.layout(7).idle_nodes
    used = nodes_used(made, 7)
    assert made.layout(used).idle_nodes == 0
    assert made.layout(used).step_s == pytest.approx(made.layout(7).step_s)


def test_it_is_said_as_json_and_not_for_fewer_nodes_than_hold_the_model() -> None:
    made = plan(4)
    assert msgspec.json.decode(variable(made, 3), type=RankLayout) == rank_layout(made, 3)
    with pytest.raises(NoLayout, match="the model needs 2"):
        variable(made, 1)


def test_the_manual_shows_what_three_nodes_are_told() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "planning.md").read_text(encoding="utf-8")
    block = page.partition("## Following it")[2].partition("```json\n")[2].partition("```")[0]
    assert msgspec.json.decode(block, type=RankLayout) == rank_layout(plan(3), 3)
