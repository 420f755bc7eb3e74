from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.training_logs.last_words import WATCHDOG_LINE_CHARS_MAX, WatchdogLine, parse_watchdog

TIMED_OUT = (
    "[rank9]:[E810 03:04:11.06 ProcessGroupNCCL.cpp:683] [Rank 1] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=78, OpType=_ALLGATHER_BASE, NumelIn=80, NumelOut=160, Timeout(ms)=600000)"
    " ran for 600096 milliseconds before timing out."
)


def test_a_timeout_names_the_collective_and_how_long_it_was_allowed() -> None:
    assert parse_watchdog(TIMED_OUT) == WatchdogLine(
        rank=9,
        group_rank=1,
        timed_out=True,
        sequence=78,
        operation="_ALLGATHER_BASE",
        timeout_s=600.0,
    )


@pytest.mark.parametrize(
    ("text", "sequence", "enqueued", "completed"),
    [
        ("Timeout at NCCL work: 5, last enqueued NCCL work: 8, last completed NCCL work: 4.", 5, 8, 4),
        (
            (
                "Exception (either an error or timeout) detected by watchdog at work: 3,"
                " last enqueued NCCL work: 3, last completed NCCL work: 2."
            ),
            3,
            3,
            2,
        ),
        (
            (
                " failure detected by watchdog at work sequence id: 57"
                " PG status: last enqueued work: 59, last completed work: 56"
            ),
            57,
            59,
            56,
        ),
        (
            (
                "Received a dump signal due to a collective timeout from this local rank and we will try our best to"
                " dump the debug info. Last enqueued NCCL work: 1, last completed NCCL work: -1.This is most likely"
            ),
            None,
            1,
            -1,
        ),
    ],
)
def test_how_far_the_group_has_come_is_read_in_the_words_of_every_version(
    text: str, sequence: int | None, enqueued: int, completed: int
) -> None:
    group = "PG ID 2 PG GUID 37(TENSOR_MODEL_PARALLEL_GROUP)"
    found = parse_watchdog(f"12: [rank3]:[E1 P.cpp:1] [{group} Rank 1] {text}")
    assert found is not None
    assert (found.sequence, found.enqueued, found.completed) == (sequence, enqueued, completed)
    assert (found.rank, found.group_rank) == (3, 1)
    assert found.group == "37 TENSOR_MODEL_PARALLEL_GROUP"
    assert not found.timed_out


def test_a_rank_in_a_group_of_some_is_not_taken_for_a_rank_of_the_job() -> None:
    line = TIMED_OUT.replace("[rank9]:", "")
    found = parse_watchdog(line)
    assert found is not None
    assert (found.rank, found.group_rank) == (None, 1)
    default = parse_watchdog("[PG 0 (default_pg) Rank 4] Timeout at NCCL work: 1, last enqueued NCCL work: 1, x")
    assert default is not None
    assert (default.rank, default.group_rank, default.group) == (4, 4, "0 default_pg")


def test_a_number_that_was_never_written_is_not_believed() -> None:
    found = parse_watchdog(
        "[rank7]:[E P.cpp:1537] [PG 0 Rank 7] Timeout at NCCL work: 1,"
        " last enqueued NCCL work: 1, last completed NCCL work: 76280750235782912."
    )
    assert found is not None
    assert (found.enqueued, found.completed) == (1, None)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "iteration 7: watchdog fed",
        "if 'Watchdog caught collective operation timeout' in line:",
        "last enqueued NCCL work: many",
        f"Watchdog caught collective operation timeout: WorkNCCL(SeqNum={'9' * 40}, OpType=X",
    ],
)
def test_other_lines_are_none(line: str) -> None:
    assert parse_watchdog(line) is None


def test_only_the_beginning_of_a_huge_line_is_looked_at() -> None:
    assert parse_watchdog("x" * WATCHDOG_LINE_CHARS_MAX + TIMED_OUT) is None
    assert parse_watchdog(TIMED_OUT + "x" * 10_000_000) is not None


@given(st.text(), st.text())
def test_any_text_around_is_survived(before: str, after: str) -> None:
    for line in (
        before + TIMED_OUT + after,
        f"{before}[PG {after} Rank 1] Watchdog caught collective operation timeout: WorkNCCL({after}",
        f"{after} last enqueued NCCL work: {before}",
    ):
        found = parse_watchdog(line)
        assert found is None or found.group.isprintable()
