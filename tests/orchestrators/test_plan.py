from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.orchestrators.launch.checkpoints import (
    Checkpoint,
    Span,
    beginning,
    choose_checkpoint,
    find_checkpoints,
    in_memory,
)
from eagle_eye.orchestrators.launch.state import LauncherNodes, choose_nodes
from eagle_eye.schema.checkpoint_files import MemoryStep

FLEET = LauncherNodes(("n1", "n2", "n3", "n4"), 3, 3)
NAMES = tuple(f"n{number}" for number in range(1, 9))


@st.composite
def fleets(draw: st.DrawFn) -> tuple[LauncherNodes, tuple[str, ...], frozenset[str], frozenset[str]]:
    nodes = NAMES[: draw(st.integers(1, 8))]
    wanted = draw(st.integers(1, len(nodes)))
    least = draw(st.integers(1, wanted))
    subset = st.frozensets(st.sampled_from(nodes))
    current = draw(st.permutations(nodes))[: draw(st.integers(least, wanted))] if draw(st.booleans()) else ()
    return LauncherNodes(nodes, least, wanted), tuple(current), draw(subset), draw(subset)


@given(fleets())
def test_a_plan_has_no_unusable_node_and_none_twice_and_enough_of_them(
    case: tuple[LauncherNodes, tuple[str, ...], frozenset[str], frozenset[str]],
) -> None:
    fleet, current, unusable, draining = case
    plan = choose_nodes(fleet, current, unusable, draining)
    usable = [node for node in fleet.nodes if node not in unusable]
    if plan is None:
        assert len(usable) < fleet.least
        return
    assert set(plan) <= set(usable)
    assert len(set(plan)) == len(plan)
    assert fleet.least <= len(plan) <= fleet.wanted
    # As many as wanted where there are as many, and a draining one only for want of another.
    rested = [node for node in usable if node not in draining]
    assert len(plan) == max(min(len(rested), fleet.wanted), fleet.least)
    if set(plan) & draining:
        assert set(rested) <= set(plan)


@given(fleets())
def test_nodes_that_stay_keep_their_order(
    case: tuple[LauncherNodes, tuple[str, ...], frozenset[str], frozenset[str]],
) -> None:
    fleet, current, unusable, draining = case
    plan = choose_nodes(fleet, current, unusable, draining) or ()
    stayed = [node for node in plan if node in current]
    assert stayed == [node for node in current if node in plan]


def test_the_first_nodes_start_and_a_spare_takes_the_place_of_the_excluded() -> None:
    assert choose_nodes(FLEET, (), frozenset()) == ("n1", "n2", "n3")
    assert choose_nodes(FLEET, ("n1", "n2", "n3"), {"n2"}) == ("n1", "n4", "n3")


def test_without_a_spare_the_job_shrinks_if_it_may() -> None:
    assert choose_nodes(FLEET, ("n1", "n4", "n3"), {"n2", "n3"}) is None
    assert choose_nodes(LauncherNodes(FLEET.nodes, 2, 3), ("n1", "n4", "n3"), {"n2", "n3"}) == ("n1", "n4")


def test_a_job_that_shrank_grows_again() -> None:
    assert choose_nodes(LauncherNodes(FLEET.nodes, 2, 3), ("n1", "n4"), {"n3"}) == ("n1", "n4", "n2")


def test_a_draining_node_stays_while_the_job_needs_it() -> None:
    assert choose_nodes(FLEET, ("n1", "n2", "n3"), frozenset(), {"n2"}) == ("n1", "n4", "n3")
    assert choose_nodes(FLEET, ("n1", "n2", "n3"), {"n4"}, {"n2"}) == ("n1", "n2", "n3")


checkpoints = st.builds(Checkpoint, st.just("p"), st.integers(0, 50), st.integers(0, 100).map(float))
spans = st.tuples(st.integers(0, 100), st.integers(0, 100)).map(lambda ends: Span(float(min(ends)), float(max(ends))))


@given(st.lists(checkpoints), st.lists(spans, max_size=3))
def test_no_distrusted_checkpoint_is_chosen_and_no_newer_trusted_one_exists(
    found: list[Checkpoint], distrusted: list[Span]
) -> None:
    chosen = choose_checkpoint(found, distrusted)
    trusted = [one for one in found if not any(span.covers(one.written_s) for span in distrusted)]
    if chosen is None:
        assert trusted == []
    else:
        assert chosen in trusted
        assert chosen.written_s == max(one.written_s for one in trusted)


@given(st.lists(checkpoints), st.integers(0, 100))
def test_never_a_checkpoint_after_the_onset(found: list[Checkpoint], onset_s: int) -> None:
    chosen = choose_checkpoint(found, (Span(float(onset_s), float("inf")),))
    assert chosen is None or chosen.written_s < onset_s


def test_after_a_return_the_spoiled_later_steps_stay_out() -> None:
    before, spoiled, after = Checkpoint("a", 60, 10.0), Checkpoint("b", 100, 20.0), Checkpoint("c", 70, 40.0)
    assert choose_checkpoint([before, spoiled, after], [Span(15.0, 30.0)]) == after
    assert choose_checkpoint([before, spoiled], [Span(15.0, 30.0)]) == before


def test_a_suspected_checkpoint_is_taken_only_where_the_alternative_is_the_beginning() -> None:
    old, late = Checkpoint("c/step_1", 1, 10.0), Checkpoint("c/step_2", 2, 20.0)
    assert choose_checkpoint([old, late], (), [20.0]) == old
    assert choose_checkpoint([late], (), [20.0]) == late
    assert choose_checkpoint([late], [Span(15.0, 30.0)], [20.0]) is None


def test_a_step_in_memory_counts_by_when_it_was_captured_and_goes_before_the_same_one_on_storage() -> None:
    copies = [MemoryStep("j", "2-a", rank, step, float(step)) for rank in (0, 1) for step in (18, 20)]
    found = in_memory(copies)
    assert choose_checkpoint([*found, Checkpoint("c/step_20", 20, 20.0)], ()) == Checkpoint("memory:20", 20, 20.0)
    assert choose_checkpoint([*found, Checkpoint("c/step_15", 15, 15.0)], [Span(19.0, 30.0)]) == found[0]
    on_storage = Checkpoint("c/step_15", 15, 15.0)
    assert choose_checkpoint([*found, on_storage], [Span(16.0, 30.0)]) == on_storage


def test_only_complete_checkpoints_are_found(tmp_path: Path) -> None:
    for name in ("step_5", "step_10", "step_15", "step_x", "other"):
        (tmp_path / name).mkdir()
    for name, written_s in (("step_5", 100), ("step_10", 200), ("step_x", 300)):
        (tmp_path / name / ".metadata").touch()
        os.utime(tmp_path / name / ".metadata", (written_s, written_s))
    (tmp_path / "step_20").write_text("a file")
    found = {one.step: one.written_s for one in find_checkpoints(tmp_path)}
    assert found == {5: 100.0, 10: 200.0}
    assert find_checkpoints(tmp_path / "nowhere") == find_checkpoints(None) == []


def test_a_folder_that_cannot_be_read_is_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        find_checkpoints(tmp_path / "file")


def test_ranks_that_would_find_a_spoilt_step_by_themselves_are_told_to_begin_anew() -> None:
    spoilt, before = Checkpoint("memory:9", 9, 109.0), Checkpoint("memory:5", 5, 105.0)
    spans = [Span(108.0, 120.0)]
    assert beginning([spoilt], spans, finds_newest=True) == "memory:0"
    assert beginning([spoilt], spans, finds_newest=False) == "", "their script begins anew where nothing is named"
    assert beginning([spoilt, before], spans, finds_newest=True) == "", "it was there, and is damaged: they say so"
    assert beginning([], spans, finds_newest=True) == "", "nothing is left: they must not begin anew for that"
