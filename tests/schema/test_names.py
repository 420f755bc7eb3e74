"""The rule for names, and frames and templates with names that are none: the numbers are kept, the names are not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import BadFrame, Frame, Rank, block, decode_frame, encode_frame, read_frame, values_of
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.names import NAME_CHARS_MAX, is_name
from eagle_eye.schema.rows import (
    RowTemplate,
    decode_template,
    encode_row,
    encode_template,
    read_row,
    template_id,
    template_of,
)

BAD = ["", "a\nb", "a\x00", "x" * 254, "\u202egnp.exe", "a\u200bb", "\x7f", "\x9b2J", "a\u2028b", "a\tb"]
NODE_ROWS = block(Scope.NODE, {-1: {"node_cpu_utilization_ratio": 0.5}})
bad_names = st.one_of(
    st.sampled_from(BAD),
    st.text(st.characters(categories=["Cc", "Cf", "Zl", "Zp"]), min_size=1, max_size=5),
    st.text("é ", min_size=NAME_CHARS_MAX + 1, max_size=NAME_CHARS_MAX + 9),
)


def frame(**more: Any) -> Frame:
    fields: dict[str, Any] = {"node": "n1", "boot_id": "b", "stream": "s", "agent_version": "1", "blocks": [NODE_ROWS]}
    return Frame(**{"version": 1, "sequence": 1, "time_s": 1.7e9, "interval_s": 1.0, **fields, **more})


@given(st.text(max_size=300))
def test_a_name_is_printable_not_empty_and_not_long(text: str) -> None:
    assert is_name(text) == (0 < len(text) <= 253 and all(char.isprintable() for char in text))


@pytest.mark.parametrize("name", [*BAD, "\ud800"])
def test_what_hides_turns_or_breaks_text_is_in_no_name(name: str) -> None:
    assert not is_name(name)


@pytest.mark.parametrize("name", ["llama-7b", "größe", "a/b", "job 7", "名前", "x" * 253])
def test_usual_names_are_names(name: str) -> None:
    assert is_name(name)


@given(name=bad_names)
def test_a_job_that_is_no_name_costs_itself_and_not_the_numbers(name: str) -> None:
    seen = read_frame(encode_frame(frame(job=name)))
    assert seen.frame.job is None
    assert values_of(seen.frame.blocks[0]).tolist() == [0.5]
    assert [reported.partition(" '")[0] for reported in seen.unknown] == ["name job"]
    assert all(reported.isascii() and reported.isprintable() for reported in seen.unknown)


@given(jobs=st.lists(st.one_of(st.just("job"), bad_names), max_size=6))
def test_of_ranks_those_with_a_name_are_left(jobs: list[str]) -> None:
    ranks = [Rank(job, at, 8, at) for at, job in enumerate(jobs)]
    seen = read_frame(encode_frame(frame(ranks=ranks)))
    assert [rank.rank for rank in seen.frame.ranks] == [at for at, job in enumerate(jobs) if job == "job"]
    assert len(seen.unknown) == len(jobs) - jobs.count("job")


@pytest.mark.parametrize(
    "wrong", [{"rank": -1}, {"world_size": -3}, {"attempt": -1}, {"device": -2}, {"rank": 1 << 40}, {"device": 1 << 20}]
)
def test_a_rank_with_a_number_that_can_be_none_is_left_out_and_named(wrong: dict[str, int]) -> None:
    bad = msgspec.structs.replace(Rank("job", 0, 2, 0), **wrong)
    seen = read_frame(encode_frame(frame(job="job", ranks=[bad, Rank("job", 1, 2, 1)])))
    assert [rank.rank for rank in seen.frame.ranks] == [1]
    ((field, value),) = wrong.items()
    assert seen.unknown == (f"number rank.{field} {value}",)


def test_a_bad_role_is_none_and_its_rank_stays() -> None:
    seen = read_frame(encode_frame(frame(ranks=[Rank("job", 0, 1, 0, role="a\nb")])))
    assert (seen.frame.ranks[0].role, seen.unknown) == ("", ("name rank.role 'a\\nb'",))


def test_a_link_without_a_name_is_a_row_less_and_the_others_stay() -> None:
    rows = {"mlx5_0": {"link_up": 1.0, "link_errors_total": 3.0}, "a\nb": {"link_up": 0.0, "link_errors_total": 9.0}}
    seen = read_frame(encode_frame(frame(blocks=[block(Scope.LINK, rows)])))
    (kept,) = seen.frame.blocks
    assert (kept.keys, kept.metrics, values_of(kept).tolist()) == (["mlx5_0"], ["link_up", "link_errors_total"], [1, 3])
    assert seen.unknown == ("name link 'a\\nb'",)


def test_names_elsewhere_are_left_out_and_texts_stay() -> None:
    events = [
        Event(1.7e9, "link_down", -1, {"link": "a\nb"}),
        Event(1.7e9, "training_error", 0, {"text": "line 1\nline 2", "job": "job"}),
        Event(1.7e9, "process_exit", 0, {"exit_code": 1, "job": "a\x00"}),
        Event(1.7e9, "no\nevent"),
    ]
    collectors = {"gpu": "failed: a\nb", "a\nb": "ok"}
    seen = read_frame(encode_frame(frame(boot_id="", agent_version="1\n", collectors=collectors, events=events)))
    assert [event.kind for event in seen.frame.events] == ["link_down", "training_error"]
    assert seen.frame.events[0].attributes == {}
    assert seen.frame.events[1].attributes["text"] == "line 1\nline 2"
    assert (seen.frame.boot_id, seen.frame.agent_version) == ("unknown", "unknown")
    assert seen.frame.collectors == {"gpu": "failed: a\nb"}
    assert sorted(reported.split(" '")[0] for reported in seen.unknown) == [
        "name agent_version", "name boot_id", "name collectors", "name event", "name event.attribute", "name event.job",
    ]  # fmt: skip


@pytest.mark.parametrize("field", ["node", "stream"])
def test_whose_frame_it_is_must_be_said(field: str) -> None:
    with pytest.raises(BadFrame) as refused:
        decode_frame(encode_frame(frame(**{field: "a\nb"})))
    assert refused.value.reason == "name"


def resolved(sent: Frame) -> tuple[RowTemplate, tuple[str, ...], bytes]:
    raw = encode_template(template_of(sent))
    template, unknown = decode_template(raw)
    return template, unknown, encode_row(sent, template_of(sent), template_id(raw))


@given(jobs=st.lists(st.one_of(st.just("job"), bad_names), min_size=1, max_size=6), silent=st.booleans(), job=bad_names)
def test_a_row_says_what_the_whole_frame_says_also_of_silences(jobs: list[str], silent: bool, job: str) -> None:
    ranks = [Rank(name, at, 8, at, silent_s=float(at) if silent else 0.0) for at, name in enumerate(jobs)]
    sent = frame(job=job, ranks=ranks)
    template, unknown, row = resolved(sent)
    assert unknown == read_frame(encode_frame(sent)).unknown
    assert (template.job, len(template.ranks)) == (None, jobs.count("job"))
    by_row, whole = read_row(template, row).frame, decode_frame(encode_frame(sent))
    assert (by_row.ranks, by_row.job, by_row.boot_id) == (whole.ranks, None, whole.boot_id)
    assert values_of(by_row.blocks[0]).tolist() == [0.5]
