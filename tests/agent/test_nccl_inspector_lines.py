from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collectors.nccl_inspector import (
    COMMUNICATORS_MAX,
    IDLE_INTERVALS_MAX,
    KINDS_MAX,
    CollectiveTotals,
    bus_bandwidth,
    parse_inspector,
)
from tests.agent.nccl_fakes import inspector_line


def tally(*lines: bytes) -> CollectiveTotals:
    found = CollectiveTotals()
    found.add(parse_inspector(b"".join(lines))[0])
    return found


def test_the_sequence_is_the_highest_on_the_widest_communicator() -> None:
    row = tally(
        inspector_line(41, "AllGather", n_ranks=16, id="0xa"),
        inspector_line(40, "ReduceScatter", n_ranks=16, id="0xa"),
        inspector_line(900, n_ranks=8, id="0xb"),
    ).row()
    assert row["nccl_completed_sequence"] == 41.0


def test_nothing_is_said_of_what_is_enqueued() -> None:
    assert "nccl_sequence" not in tally(inspector_line(5)).row()


def test_of_two_equally_wide_communicators_all_ranks_take_the_same() -> None:
    one, other = inspector_line(5, id="0xa"), inspector_line(9, id="0xb")
    assert tally(one, other).row()["nccl_completed_sequence"] == 9.0
    assert tally(other, one).row()["nccl_completed_sequence"] == 9.0


def test_a_reduce_scatter_lasts_as_long_as_the_kernels_do_on_the_mean() -> None:
    found = tally(
        inspector_line(1, "ReduceScatter", coll_exec_time_us=1000),
        inspector_line(2, "ReduceScatter", coll_exec_time_us=3000.0, coll_timing_source="kernel_cpu"),
        inspector_line(3, "ReduceScatter", coll_exec_time_us=9e6, coll_timing_source="collective_cpu"),
        inspector_line(9, "ReduceScatter", coll_exec_time_us=7000, n_ranks=2, id="0xtp"),
    )
    assert found.row()["nccl_reduce_scatter_seconds"] == pytest.approx(0.002)
    assert found.untimed == 1


def test_bus_bandwidth_is_the_mean_over_the_time_that_was_spent() -> None:
    row = tally(
        inspector_line(1, coll_exec_time_us=1000, coll_busbw_gbs=300.0),
        inspector_line(2, coll_exec_time_us=3000, coll_busbw_gbs=100.0),
    ).row()
    assert row["nccl_bus_bandwidth_bytes_per_second"] == pytest.approx(150e9)


def test_a_line_without_a_timing_source_counts_but_is_not_timed() -> None:
    old = json.loads(inspector_line(7, "ReduceScatter"))
    del old["coll_perf"]["coll_timing_source"], old["header"]["comm_name"]
    row = tally(json.dumps(old).encode() + b"\n").row()
    assert row == {"nccl_completed_sequence": 7.0}


def test_traces_other_records_and_blank_lines_are_passed_over() -> None:
    exchange = json.dumps(
        {"header": {"id": "0xabc", "rank": 0, "n_ranks": 8}, "p2p_perf": {"p2p": "Send", "p2p_sn": 3}}
    )
    stats = json.dumps({"metadata": {"inspector_output_format_version": "v4.1"}, "dump_stats": {"coll_dropped": 5}})
    traced = inspector_line(
        8, coll_algo="RING", event_trace_ts={"coll_start_ts": 1, "kernel_events": [{"channel_id": 0}]}
    )
    lines, malformed = parse_inspector(f"{exchange}\n\n{stats}\n".encode() + traced)
    assert malformed == 0
    found = CollectiveTotals()
    assert found.add(lines) == 1
    assert found.row()["nccl_completed_sequence"] == 8.0


def test_one_bad_line_costs_itself_only() -> None:
    lines, malformed = parse_inspector(inspector_line(1) + b'{"header": {"id"\n\xff\xfe\n[1]\n' + inspector_line(2))
    assert (len(lines), malformed) == (2, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"coll_sn": -1},
        {"coll_sn": 2**60},
        {"coll_sn": 2**80},
        {"n_ranks": 0},
        {"n_ranks": -5},
        {"id": "0x" + "a" * 100},
    ],
)
def test_numbers_out_of_range_are_not_taken(changes: dict[str, Any]) -> None:
    lines, malformed = parse_inspector(inspector_line(3, **changes))
    found = CollectiveTotals()
    assert (malformed, found.add(lines), found.beyond, found.row()) == (0, 0, 1, {})


@pytest.mark.parametrize("changes", [{"coll_sn": "7"}, {"n_ranks": 1.5}, {"coll": None}])
def test_values_of_another_type_make_a_line_malformed(changes: dict[str, Any]) -> None:
    assert parse_inspector(inspector_line(3, **changes)) == ([], 1)


def test_what_a_process_can_make_the_agent_remember_is_bounded() -> None:
    found = CollectiveTotals()
    for number in range(2 * COMMUNICATORS_MAX):
        found.add(
            parse_inspector(
                inspector_line(1, f"K{number % (2 * KINDS_MAX)}", id=f"0x{number % (2 * COMMUNICATORS_MAX)}")
            )[0]
        )
    assert found.beyond == COMMUNICATORS_MAX
    for number in range(2 * KINDS_MAX):
        found.add(parse_inspector(inspector_line(1, f"M{number}", id="0x0"))[0])
    assert found.beyond == COMMUNICATORS_MAX + KINDS_MAX + 1


def test_a_communicator_that_is_gone_is_forgotten() -> None:
    found = tally(inspector_line(900, n_ranks=64, id="0xold"))
    for _ in range(IDLE_INTERVALS_MAX + 1):
        found.begin()
        found.add(parse_inspector(inspector_line(5, n_ranks=8, id="0xnew"))[0])
    assert found.row()["nccl_completed_sequence"] == 5.0


def test_time_in_collectives_is_told_only_where_most_of_them_were_seen() -> None:
    found = tally(inspector_line(0))
    assert found.collective_s() is None  # how many ran before is not known
    found.begin()
    found.add(parse_inspector(inspector_line(1) + inspector_line(2) + inspector_line(3))[0])
    assert found.collective_s() == pytest.approx(3 * 0.0004)
    found.begin()
    found.add(parse_inspector(inspector_line(50))[0])
    assert found.collective_s() is None


def test_the_widest_communicators_bandwidth_is_read_from_a_metrics_file() -> None:
    text = (
        "# HELP nccl_bus_bandwidth_gbs x\n"
        'nccl_algorithm_bandwidth_gbs{comm_id="0x1",rank="4",nranks="8"} 999\n'
        'nccl_bus_bandwidth_gbs{comm_id="0x1",rank="4",nranks="8",message_size="2.00GB"} 400.5\n'
        'nccl_bus_bandwidth_gbs{version="v5.1",gpu="GPU0",nranks="8",collective="AllReduce"} 199.5\n'
        'nccl_bus_bandwidth_gbs{version="v5.1",gpu="GPU0",nranks="2",collective="AllReduce"} 7\n'
        'nccl_bus_bandwidth_gbs{nranks="8"} nan\n'
    )
    assert bus_bandwidth(text) == pytest.approx(300e9)
    assert bus_bandwidth("nccl_bus_bandwidth_gbs 5\n") is None


@given(st.binary())
def test_any_bytes_are_survived(raw: bytes) -> None:
    lines, malformed = parse_inspector(raw)
    assert len(lines) + malformed <= raw.count(b"\n") + 1
    found = CollectiveTotals()
    found.add(lines)
    assert all(math.isfinite(value) for value in found.row().values())
    bus_bandwidth(raw.decode("utf-8", errors="replace"))


numbers = st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.none(), st.lists(st.integers(), max_size=2))


@given(st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=5))
def test_any_values_give_a_finite_row(cases: list[tuple[object, ...]]) -> None:
    raw = b"".join(
        inspector_line(0, "ReduceScatter", coll_sn=a, n_ranks=b, coll_exec_time_us=c, coll_busbw_gbs=d)
        for a, b, c, d in cases
    )
    found = CollectiveTotals()
    found.add(parse_inspector(raw)[0])
    assert all(math.isfinite(value) and value >= 0 for value in found.row().values())


def test_json_nested_without_end_is_malformed() -> None:
    assert parse_inspector(b'{"x":' * 100_000 + b"\n") == ([], 1)
