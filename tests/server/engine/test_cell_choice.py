"""Which cell a job is given to, and which job leaves a cell that has too much."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.monitor.cells import MUCH_NODES, MUCH_RATIO, choose, next_move

CELLS = ("a", "b", "c")
JOBS = st.dictionaries(st.integers(0, 40).map("job{}".format), st.tuples(st.integers(0, 500), st.sampled_from(CELLS)))


def test_a_new_job_goes_to_the_cell_with_the_fewest_nodes() -> None:
    assert choose({"a": 10, "b": 3}, "a") == "b"


def test_of_cells_with_as_many_nodes_it_goes_to_the_one_that_hears_it() -> None:
    assert choose({"a": 3, "b": 3}, "b") == "b"


def test_a_job_that_shares_nodes_with_others_goes_where_most_of_them_are() -> None:
    assert choose({"a": 0, "b": 900}, "a", ["b", "b", "a"]) == "b"


def test_a_cell_without_a_leader_gets_no_job_for_the_nodes_that_it_shares() -> None:
    assert choose({"a": 5}, "a", ["gone", "gone"]) == "a"


def load(jobs: dict[str, tuple[int, str]]) -> dict[str, int]:
    return {cell: sum(nodes for nodes, of in jobs.values() if of == cell) for cell in CELLS}


@given(JOBS)
def test_a_move_never_makes_the_fullest_cell_fuller_and_ends_after_finitely_many(
    jobs: dict[str, tuple[int, str]],
) -> None:
    most = max(load(jobs).values())
    for _ in range(len(jobs) + 1):
        nodes, cell_of = {job: n for job, (n, _) in jobs.items()}, {job: cell for job, (_, cell) in jobs.items()}
        move = next_move(nodes, cell_of, CELLS, ())
        if move is None:
            return
        assert jobs[move.job][1] == move.source
        jobs[move.job] = jobs[move.job][0], move.target
        assert max(load(jobs).values()) <= most
        most = max(load(jobs).values())
    raise AssertionError("jobs go round")


@given(JOBS)
def test_nothing_moves_while_no_cell_has_far_more_than_its_share(jobs: dict[str, tuple[int, str]]) -> None:
    has = load(jobs)
    mean = sum(has.values()) / len(has)
    far = any(one > MUCH_RATIO * mean and one - mean >= MUCH_NODES for one in has.values())
    move = next_move({job: n for job, (n, _) in jobs.items()}, {job: c for job, (_, c) in jobs.items()}, CELLS, ())
    assert far or move is None


def test_a_job_of_which_something_is_open_is_not_moved() -> None:
    nodes, cell_of = {"big": 200, "small": 100}, {"big": "a", "small": "a"}
    assert next_move(nodes, cell_of, ("a", "b"), ("small",)) is None


def test_a_job_that_is_all_that_a_cell_has_stays() -> None:
    assert next_move({"big": 500}, {"big": "a"}, ("a", "b"), ()) is None
