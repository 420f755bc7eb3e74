"""The rows of a job's timeline, and its course."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.action import MemberRank
from eagle_eye.server.accounts.goodput import LossCause, TimelineSpan
from eagle_eye.server.charts import plots
from eagle_eye.server.charts.plots import lane_rows
from eagle_eye.server.history.history import SeriesSteps
from eagle_eye.server.model.records import Attempt
from tests.server.builders import NOW, incident


def attempt(number: int, **more: float | None) -> Attempt:
    begun_s = NOW + 100 * number
    fields = {"started_s": begun_s, "seen_s": begun_s + 50, **more}
    return Attempt(id=f"att_{number}", run="att_0", job="job", attempt=number, **fields)  # type: ignore[arg-type]


def test_a_node_has_a_row_with_its_attempts_ranks_and_incidents() -> None:
    attempts = [attempt(0, ended_s=NOW + 90), attempt(1)]
    members = {"att_0": ["n1", "n2"], "att_1": ["n2", "n10"]}
    ranks = [MemberRank(0, "n2", 0), MemberRank(1, "n2", 1), MemberRank(2, "n10", 0)]
    found = lane_rows(attempts, members, ranks, [incident(nodes=["n1"], node="n1")], NOW + 200)
    assert [row.label for row in found] == ["n1", "n2", "n10"]
    assert [(bar.attempt, bar.start_s, bar.end_s) for bar in found[0].bars] == [(0, NOW, NOW + 90)]
    assert [(bar.attempt, bar.end_s) for bar in found[1].bars] == [(0, NOW + 90), (1, NOW + 200)]
    assert [row.ranks for row in found] == [None, (0, 1), (2, 2)]
    assert [row.incidents for row in found] == [("inc_1",), (), ()]


def test_of_12500_nodes_neighbours_share_rows_and_the_accused_stands_alone() -> None:
    nodes = [f"n{n}" for n in range(12_500)]
    found = lane_rows([attempt(0)], {"att_0": nodes}, (), [incident(node="n777", nodes=["n777"])], NOW + 10)
    assert len(found) <= 256
    assert sum(row.size for row in found) == 12_500
    alone = next(row for row in found if row.label == "n777")
    assert (alone.size, alone.incidents) == (1, ("inc_1",))
    assert found[0].label.startswith("n0 to n")
    assert found[0].bars[0].nodes == found[0].size
    assert len(found[0].nodes) <= 8


@given(st.integers(0, 600), st.integers(8, 256), st.sets(st.integers(0, 599), max_size=200))
def test_however_many_are_accused_the_rows_are_few_and_every_node_is_in_one(
    count: int, most: int, accused: set[int]
) -> None:
    nodes = [f"n{n}" for n in range(count)]
    incidents = [incident(f"inc_{n}", node=f"n{n}", nodes=[f"n{n}"]) for n in sorted(accused)]
    found = lane_rows([attempt(0)], {"att_0": nodes}, (), incidents, NOW + 10, most)
    assert len(found) <= most
    assert sum(row.size for row in found) == count


def test_an_attempt_of_which_nobody_knows_the_members_has_no_bars() -> None:
    assert lane_rows([attempt(0)], {}, (), [], NOW + 10) == []


def series(*values: list[float]) -> dict[tuple[str, int | str], SeriesSteps]:
    return {(f"n{at}", 0): SeriesSteps(list(range(len(mine))), mine) for at, mine in enumerate(values)}


def test_a_jobs_throughput_is_that_of_all_ranks_whoever_was_late_or_not_read() -> None:
    late = {**series([10.0, 10.0], [20.0, 20.0]), ("n2", 0): SeriesSteps([0], [30.0])}
    assert plots.rank_total(late, 3, 3, 3).tolist()[:2] == [60.0, 45.0]
    assert math.isnan(plots.rank_total(late, 3, 3, 3)[2])
    assert plots.rank_total(late, 1, 3, 6).tolist() == [120.0]
    assert np.isnan(plots.rank_total({}, 2, 0, 6)).all()


def test_losses_that_were_not_finite_are_counted_and_not_drawn() -> None:
    found = plots.rank_spread(series([1.0, math.inf], [3.0, math.inf]), 2)
    assert found.median.tolist()[0] == 2.0
    assert math.isnan(found.median[1])
    assert found.infinite.tolist() == [0, 2]


def span(start_s: float, end_s: float, part: str) -> TimelineSpan:
    cause = None if part == "training" else LossCause("hang", "n1", "inc_1")
    return TimelineSpan(start_s, end_s, part, "att_0", 8, cause, "why" if part == "unknown" else "")  # type: ignore[arg-type]


def test_goodput_is_that_of_the_last_minutes_and_null_where_it_cannot_be_told() -> None:
    spans = [span(0, 100, "unknown"), span(100, 200, "training"), span(200, 300, "stopped")]
    found = plots.goodput_course(spans, [100.0, 200.0, 250.0, 300.0], 100.0)
    assert math.isnan(found[0])
    assert found.tolist()[1:] == pytest.approx([1.0, 0.5, 0.0])


def test_of_too_many_parts_the_shortest_go_into_those_before() -> None:
    spans = [span(at, at + (9 if at % 20 == 0 else 1), "training") for at in range(0, 200, 10)]
    found = plots.merged_spans(spans, 10)
    assert len(found) <= 11
    assert found[-1].end_s == spans[-1].end_s
    assert plots.merged_spans(spans, 20) == spans
