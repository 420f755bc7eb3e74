from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collectors import nccl_ras
from eagle_eye.agent.collectors.nccl_ras import TEXT_CHARS_MAX, TROUBLES_MAX, BadReply, RasProblem, Reply, parse_reply
from tests.agent.spoiled import spoiled

DATA = Path(__file__).parent / "data/nccl"


def document(*ranks: dict[str, Any], missing: list[dict[str, Any]] | None = None, **changes: Any) -> bytes:
    communicator = {"hash": "0xa", "size": len(ranks), "ranks": list(ranks), "missing_ranks": missing or []}
    return json.dumps({"nccl_version": "2.29.1", "communicators": [communicator | changes], "ras": {}}).encode()


def rank(number: int = 0, counts: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    return {
        "rank": number,
        "host": "10.0.0.1",
        "pid": 1000 + number,
        "status": status,
        "collective_counts": {"AllReduce": 5} if counts is None else counts,
    }


def test_json_is_read_although_2_28_9_forgets_a_comma() -> None:
    reply = parse_reply((DATA / "ras_2.28.9.json").read_bytes())
    assert reply.nccl_version == "2.28.9"
    assert [(item.id, item.size) for item in reply.communicators] == [("0xa1 0xb1:0xc1", 4), ("0xa2 0xb2:0xc2", 2)]
    assert [member.enqueued for member in reply.communicators[0].members] == [70, 69]


def test_each_thing_that_stands_out_is_told_with_its_place() -> None:
    reply = parse_reply((DATA / "ras_2.28.9.json").read_bytes())
    kinds = {(trouble.kind, trouble.rank, trouble.host, trouble.pid) for trouble in reply.troubles}
    assert kinds == {
        ("INCOMPLETE", 2, "10.0.0.2", 1000),
        ("DEAD", 3, "10.0.0.2", 1001),
        ("ERROR", 1, "10.0.0.1", 1001),
        ("MISMATCH", 1, "10.0.0.1", 1001),
        ("TIMEOUT", None, "", None),
    }


def test_a_rank_that_left_its_communicator_is_no_trouble() -> None:
    gone = rank(1, unresponsive=False, considered_dead=False)
    assert parse_reply(document(rank(), missing=[gone])).troubles == ()


def test_the_problem_names_ranks_that_are_gone_and_no_mismatch() -> None:
    reply = parse_reply((DATA / "ras_2.28.9.json").read_bytes())
    assert reply.problem() == (
        "NCCL RAS: INCOMPLETE: rank 2 on 10.0.0.2, process 1000; DEAD: rank 3 on 10.0.0.2, process 1001;"
        " ERROR: rank 1 on 10.0.0.1, process 1001"
    )
    healthy = parse_reply(document(rank(0), rank(1, {"AllReduce": 6})))
    assert (healthy.problem(), [trouble.kind for trouble in healthy.troubles]) == ("", ["MISMATCH"])


def test_a_long_list_is_cut_in_the_problem() -> None:
    reply = Reply("x", troubles=tuple(RasProblem("DEAD", "x", rank=n, host="h", pid=n) for n in range(50)))
    assert reply.problem().endswith("and 46 more")


def test_a_rank_that_does_not_run_has_no_count() -> None:
    reply = parse_reply(
        document(rank(0), rank(1, finalize_called=True), rank(2, init_state=7), rank(3, abort_flag=True))
    )
    assert [member.rank for member in reply.communicators[0].members] == [0]
    assert [trouble.kind for trouble in reply.troubles] == ["ABORT"]


def test_text_is_read_where_there_is_no_json() -> None:
    reply = parse_reply((DATA / "ras_verbose.txt").read_bytes())
    assert (reply.nccl_version, reply.communicators) == ("2.27.3", ())
    assert (
        RasProblem("DEAD", "Process 1000 on node 10.0.0.2 managing GPU 0", "", None, "10.0.0.2", 1000) in reply.troubles
    )
    assert ("00000000000000a1", 3, "10.0.0.2", 1001) in [
        (trouble.communicator, trouble.rank, trouble.host, trouble.pid)
        for trouble in reply.troubles
        if trouble.kind == "INCOMPLETE"
    ]
    late = next(trouble for trouble in reply.troubles if trouble.kind == "MISMATCH" and trouble.rank == 1)
    assert late.detail.startswith("Rank 1 has launched up to operation 8")
    assert "DEAD: Process 1000 on node 10.0.0.2" in reply.problem()


def test_a_banner_before_the_document_is_passed_over() -> None:
    assert parse_reply(b"RCCL version 2.28.7 compiled with ROCm\n\n" + document(rank())).communicators


def test_a_reply_that_breaks_off_is_refused() -> None:
    text = (DATA / "ras_verbose.txt").read_bytes()
    with pytest.raises(BadReply, match="breaks off"):
        parse_reply(text[: len(text) // 2])
    with pytest.raises(BadReply, match="no status in JSON"):
        parse_reply((DATA / "ras_2.28.9.json").read_bytes()[:1500])
    with pytest.raises(BadReply, match="no status: ''"):
        parse_reply(b"")


def test_grave_troubles_are_kept_before_mismatches_and_both_are_bounded() -> None:
    ranks = [rank(number, {"AllReduce": number}) for number in range(2 * TROUBLES_MAX)]
    reply = parse_reply(document(*ranks, missing=[rank(999, considered_dead=True)]))
    assert len(reply.troubles) == TROUBLES_MAX
    assert reply.troubles[0].kind == "DEAD"
    assert reply.left_out == TROUBLES_MAX


@pytest.mark.parametrize(
    "counts", [{"AllReduce": -1}, {"AllReduce": 2**60, "AllGather": 2**60}, {"AllReduce": 2**64 - 1}]
)
def test_counts_out_of_range_are_not_taken(counts: dict[str, Any]) -> None:
    assert parse_reply(document(rank(0, counts))).communicators[0].members == ()


def test_a_document_that_would_take_gigabytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "OBJECTS_MAX", 10)
    with pytest.raises(BadReply, match="more than 10 objects"):
        parse_reply(document(*[rank(number) for number in range(5)]))


def test_what_is_reported_a_trouble_is_cut() -> None:
    text = f"NCCL version 2.27.3\n#0-0 (a1) ERROR\n  Rank 0: {'x' * 1_000}\n\nWarnings\n"
    assert len(parse_reply(text.encode()).troubles[0].detail) == TEXT_CHARS_MAX


def test_whatever_stands_in_a_field_a_reply_is_refused_or_can_be_sent_on() -> None:
    plain = json.loads(document(rank(0, init_state=1, async_error=0), missing=[rank(1, considered_dead=True)]))
    plain["ras"] = {"timeouts_count": 1}
    believed = 0
    for wrong in spoiled(plain):
        try:
            reply = parse_reply(json.dumps(wrong).encode())
        except BadReply:
            continue
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=Reply) == reply
        assert all(len(trouble.detail) <= TEXT_CHARS_MAX for trouble in reply.troubles)
        believed += 1
    assert believed > 50


@given(st.binary())
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    for hostile in (raw, b'{"communicators":' + raw, b"NCCL version 2.27.3\nDEAD\n" + raw + b"\nWarnings\n"):
        try:
            reply = parse_reply(hostile)
        except BadReply:
            continue
        assert len(reply.problem()) < 2_000


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rank", "status", "ranks"]), inner),
    max_leaves=10,
)


@given(values, values, values)
def test_any_json_is_read_or_refused(one: Any, two: Any, three: Any) -> None:
    raw = json.dumps({"communicators": [{"ranks": one, "size": two}], "ras": three}).encode()
    with contextlib.suppress(BadReply):
        assert len(parse_reply(raw).troubles) <= TROUBLES_MAX
