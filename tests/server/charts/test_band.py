"""Who is compared with whom, and the band that comes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.labels import number
from eagle_eye.server.charts import plots
from eagle_eye.server.charts.plots import Band, Cast, Stretch, band, begun, cast, drawing_of, picked, silences, without
from eagle_eye.server.history.history import SeriesSteps

COMPUTE = drawing_of("train_compute_seconds", 1.2, "seconds")
assert COMPUTE is not None
RANKS = [MemberRank(2 * n + d, f"n{n}", d, f"pp{d}") for n in range(6) for d in range(2)]
NODES = [f"n{n}" for n in range(6)]


def steps(**at: float) -> SeriesSteps:
    return SeriesSteps([int(name[1:]) for name in at], list(at.values()))


def drawn(series: Mapping[Any, SeriesSteps], who: Cast, length: int = 3, metric: str = "") -> Band:
    drawing = drawing_of(metric) if metric else COMPUTE
    assert drawing is not None
    return band(series, length, drawing, who)


def values(column: Any) -> list[float | None]:
    return [None if math.isnan(value) else value for value in column.tolist()]


def test_a_rank_is_compared_with_ranks_of_its_role_on_other_nodes() -> None:
    who = cast(["n0"], 1, RANKS, NODES)
    assert who.roles == {"pp1"}
    assert who.peers == ("n1", "n2", "n3", "n4", "n5")
    assert who.comparable("n3", 1)
    assert not who.comparable("n3", 0)


def test_without_roles_all_of_the_attempt_are_peers() -> None:
    who = cast(["n0"], None, (), NODES)
    assert who.peers_total == 5
    assert who.comparable("n3", 0)


def test_of_many_peers_the_same_few_are_drawn_each_time_and_it_is_said() -> None:
    nodes = [f"n{n}" for n in range(12_500)]
    who = cast(["n7"], None, (), nodes, 24)
    assert len(who.peers) == 24
    assert who == cast(["n7"], None, (), nodes, 24)
    assert who.said == "12499 other nodes of the same attempt, of which 24 are drawn"


@given(st.lists(st.text(max_size=5), unique=True, max_size=50), st.integers(1, 60))
def test_what_is_picked_is_of_the_names_in_order_and_no_more(names: list[str], most: int) -> None:
    found = picked(names, most)
    assert len(found) == min(most, len(names))
    assert list(found) == [name for name in names if name in found]


def test_the_accused_stands_beside_the_median_and_percentiles_of_its_peers() -> None:
    series = {("n0", 1): steps(s0=1.5, s1=1.6)}
    series |= {(f"n{n}", 1): steps(s0=float(n), s1=1.0) for n in range(1, 6)}
    series |= {(f"n{n}", 0): steps(s0=99.0) for n in range(1, 6)}  # another role
    found = drawn(series, cast(["n0"], 1, RANKS, NODES))
    assert values(found.accused) == [1.5, 1.6, None]
    assert values(found.median) == [3.0, 1.0, None]
    assert values(found.low)[0] == pytest.approx(1.2)
    assert found.seen.tolist() == [5, 5, 0]
    assert (found.accused_series, found.peer_series) == (1, 5)


def test_two_peers_have_a_median_and_no_band() -> None:
    series = {("n0", 0): steps(s0=2.0), ("n1", 0): steps(s0=1.0), ("n2", 0): steps(s0=3.0)}
    found = drawn(series, cast(["n0"], 0, (), ["n0", "n1", "n2"]), 1)
    assert (values(found.median), values(found.low)) == ([2.0], [None])


def test_alone_a_node_is_compared_with_its_own_other_devices() -> None:
    series = {("n0", d): steps(s0=float(d)) for d in range(4)}
    found = drawn(series, cast(["n0"], 0, (), ["n0"]), 1)
    assert (values(found.accused), values(found.median), found.peer_series) == ([0.0], [2.0], 3)


def test_unseen_is_not_zero_and_a_silence_is_reported() -> None:
    series = {("n0", 0): steps(s0=0.0, s5=0.0), ("n1", 0): SeriesSteps(list(range(6)), [1.0] * 6)}
    found = drawn(series, cast(["n0"], 0, (), ["n0", "n1"]), 6)
    assert values(found.accused) == [0.0, None, None, None, None, 0.0]
    assert silences(found) == [(1, 4)]


def test_where_nobody_was_seen_nobody_was_silent() -> None:
    series = {("n0", 0): steps(s0=1.0), ("n1", 0): steps(s0=1.0)}
    assert silences(drawn(series, cast(["n0"], 0, (), ["n0", "n1"]), 6)) == []


def test_what_is_not_finite_stays_so_for_the_accused_and_is_counted_of_peers() -> None:
    series = {("n0", 0): steps(s0=math.inf), ("n1", 0): steps(s0=math.inf), ("n2", 0): steps(s0=1.0)}
    found = drawn(series, cast(["n0"], 0, (), ["n0", "n1", "n2"]), 1, "train_loss")
    assert found.accused.tolist() == [math.inf]
    assert (values(found.median), found.not_finite) == ([1.0], 1)


def test_a_counter_is_drawn_as_its_growth() -> None:
    series = {("n0", 0): steps(s0=0.0, s1=3.0, s3=4.0)}
    found = drawn(series, cast(["n0"], 0, (), ["n0"]), 4, "gpu_pcie_replays_total")
    assert values(found.accused) == [0.0, 3.0, None, 7.0]


def test_a_position_in_collectives_is_drawn_as_what_it_is_behind() -> None:
    series = {("n0", 0): steps(s0=10.0, s1=10.0), ("n1", 0): steps(s0=10.0, s1=14.0)}
    found = drawn(series, cast(["n0"], 0, (), ["n0", "n1"]), 3, "nccl_sequence")
    assert (values(found.accused), values(found.median)) == ([0.0, 4.0, None], [0.0, 0.0, None])


def test_bits_that_matter_are_drawn_as_one() -> None:
    series = {("n0", 0): steps(s0=1.0, s1=65.0)}  # idle; idle and hot
    found = drawn(series, cast(["n0"], 0, (), ["n0"]), 3, "gpu_throttle_reasons")
    assert values(found.accused) == [0.0, 1.0, None]


def test_a_band_begins_where_anybody_was_seen() -> None:
    series = {("n0", 0): steps(s3=1.0), ("n1", 0): steps(s2=1.0)}
    found = drawn(series, cast(["n0"], 0, (), ["n0", "n1"]), 5)
    assert begun(found) == 2
    assert values(without(found, 2).accused) == [None, 1.0, None]
    nothing = drawn({}, cast(["n0"], 0, (), ["n0", "n1"]), 5)
    assert begun(nothing) == 0


def said(series: Mapping[Any, SeriesSteps], who: Cast) -> str:
    found = drawn(series, who)
    assert COMPUTE is not None
    return " ".join(plots.described(found, Stretch(0.0, 1.0, 3), COMPUTE, who, "n0 device 0", 2.5))


def test_a_chart_is_described_in_sentences_with_its_missing_data() -> None:
    series = {("n0", 0): steps(s0=1.0, s2=1.8)}
    series |= {(f"n{n}", 0): SeriesSteps([0, 1, 2], [1.0, 1.0, 1.0]) for n in range(1, 6)}
    assert said(series, cast(["n0"], 0, (), NODES)) == (
        "At the verdict n0 device 0 was at 1.8 s, its peers' median at 1 s (5% to 95%: 1 s to 1 s). The threshold is"
        " 1.2 s. No data from n0 device 0 in 1 of 3 intervals of 1 s in which its peers reported. Compared with 5 other"
        " nodes of the same attempt."
    )


def test_a_history_that_has_nothing_says_so() -> None:
    assert said({}, cast(["n0"], 0, (), NODES)).startswith("The history has no 'Compute time in a step' for this time.")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.97e9, "hertz", "1.97 GHz"), (0.25, "seconds", "0.25 s"), (3.0, "collectives", "3 collectives")],
)
def test_numbers_are_written_as_people_do(value: float, unit: str, text: str) -> None:
    assert number(value, unit) == text
    assert np.isfinite(value)
