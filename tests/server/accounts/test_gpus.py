"""GPUs by UUID: where they sit and sat, and agents that are not believed."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_eye.server.accounts.node_records import (
    COMPARISONS_KEPT,
    MOVES_KEPT,
    MOVES_PLAUSIBLE,
    GpuReport,
    code_of,
    compared,
    is_one_gpu,
    reported_gpus,
    sat_at,
    seated,
)
from eagle_eye.server.model.records import Comparison, Gpu


def at(node: str, time_s: float, device: int = 0, known: Gpu | None = None) -> Gpu:
    return seated(known, GpuReport("GPU-1", node, device, "H100", time_s))


def test_a_gpu_that_moves_keeps_its_history() -> None:
    gpu = at("n2", 200, 3, at("n1", 100))
    assert (gpu.node, gpu.device, gpu.since_s, gpu.first_seen_s) == ("n2", 3, 200, 100)
    assert [sat_at(gpu, time_s) for time_s in (50, 150, 250)] == [None, ("n1", 0), ("n2", 3)]


def test_being_reported_again_is_no_move() -> None:
    gpu = at("n1", 200, known=at("n1", 100))
    assert (gpu.moves, gpu.since_s, gpu.seen_s) == ([], 100, 200)


def test_old_news_move_nothing() -> None:
    known = at("n1", 100)
    assert at("n2", 90, known=known) is known


def test_seats_have_a_limit_and_what_it_drops_is_counted() -> None:
    gpu = at("n0", 0)
    for number in range(1, MOVES_KEPT + 6):
        gpu = at(f"n{number}", number, known=gpu)
    assert (len(gpu.moves), gpu.moves_dropped, gpu.moves[-1].node) == (MOVES_KEPT, 5, f"n{MOVES_KEPT + 4}")


def test_a_uuid_that_several_gpus_share_is_none_of_them() -> None:
    gpu = at("n0", 0)
    for number in range(1, MOVES_PLAUSIBLE + 1):
        gpu = at(f"n{number}", number, known=gpu)
    assert is_one_gpu(gpu, 0)
    assert not is_one_gpu(at("n0", 99, known=gpu), 0)


@pytest.mark.parametrize(
    "attributes",
    [{}, {"uuid": ""}, {"uuid": 7}, {"uuid": "G" * 97}, {"uuid": "GPU\n1"}, {"uuid": None, "model": "H100"}],
)
def test_what_is_no_uuid_is_left_out(attributes: dict[str, Any]) -> None:
    assert reported_gpus("n1", 0, attributes, 1.0) is None
    assert reported_gpus("n1", -1, {"uuid": "GPU-1"}, 1.0) is None


def test_a_model_that_is_no_plain_text_is_not_kept() -> None:
    for model in ("\x1b[2J", 7, None):
        found = reported_gpus("n1", 0, {"uuid": "GPU-1", "model": model}, 1.0)
        assert found is not None
        assert found.model == ""


@pytest.mark.parametrize(
    ("code", "found"), [(79, 79), (10003, 10003), (0, None), (-1, None), (True, None), ("79", None)]
)
def test_a_code_is_a_small_number(code: Any, found: int | None) -> None:
    assert code_of({"code": code}) == found


def test_a_gpus_comparisons_are_added_up_and_those_with_wrong_numbers_kept_longest() -> None:
    known = None
    for number in range(100):
        wrong = 1.0 if number == 3 else 0.0
        known = compared(known, "GPU-1", Comparison(f"chk_{number}", "n1", float(number), 45.0, 10.0, wrong))
    assert known is not None
    assert (known.checks, known.seconds, known.operations, known.wrong_numbers) == (100, 4_500.0, 1_000.0, 1.0)
    assert (known.first_s, known.last_s) == (0.0, 99.0)
    assert [one.check_id for one in known.newest] == [
        "chk_3",
        *(f"chk_{n}" for n in range(100 - COMPARISONS_KEPT, 100)),
    ]
