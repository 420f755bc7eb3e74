"""One rank's flight-recorder dump, reduced: what is sent of it, and that whoever reads dumps reads what is kept."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collectors import flight_recorder as limits
from eagle_eye.agent.collectors.flight_recorder import UNFINISHED_MAX, FlightDump, parse_dump
from eagle_eye.detectors.progress.flight_recorder import StuckRanks, analyse
from eagle_eye.detectors.types import Blind
from eagle_eye.schema.flight_recorder import BadDump
from eagle_eye.server.admin.flight_recorder_command import read_dump
from tests.agent.nccl_fakes import flight_dump, flight_entry
from tests.agent.spoiled import spoiled


def reported(dump: Any, rank: int = 0, form: str = "pickle") -> FlightDump:
    return parse_dump(json.dumps(dump).encode() if form == "json" else pickle.dumps(dump, protocol=2), rank)


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_the_groups_own_word_tells_how_far_the_rank_has_come(form: str) -> None:
    found = reported(
        flight_dump(flight_entry(6), flight_entry(7, "started"), ranks=16, enqueued=7, completed=6), form=form
    )
    assert (found.enqueued, found.completed, found.ranks) == (7, 6, 16)


def test_the_widest_group_counts_and_of_equal_ones_the_first() -> None:
    dump = flight_dump(flight_entry(6), enqueued=7, completed=6)
    dump["pg_config"] |= {
        "1": {"name": "1", "desc": "tp", "ranks": "[0]"},
        "2": {"name": "2", "desc": "dp", "ranks": "[0, 1]"},
    }
    dump["pg_status"] |= {
        1: {"last_enqueued_collective": 900, "last_completed_collective": 900},
        2: {"last_enqueued_collective": 90, "last_completed_collective": 90},
    }
    assert reported(dump).enqueued == 7
    dump["pg_config"]["2"]["ranks"] = "[0, 1, 2]"
    assert reported(dump).enqueued == 90


def test_without_the_groups_word_the_operations_tell() -> None:
    dump = flight_dump(flight_entry(5), flight_entry(6), flight_entry(7, "scheduled"))
    del dump["pg_status"]
    found = reported(dump)
    assert (found.enqueued, found.completed) == (7, 6)


def test_the_oldest_versions_are_bare_lists() -> None:
    entry = {"seq_id": 3, "pg_id": 0, "profiling_name": "nccl:all_reduce", "state": "completed"}
    found = reported([entry])
    assert (found.enqueued, found.completed, found.ranks) == (3, 3, None)


def test_a_group_without_a_name_is_not_taken_for_the_widest() -> None:
    dump = flight_dump(flight_entry(7, "scheduled", retired=True), enqueued=7, completed=7)
    dump["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[0, 1]"}}  # gloo: whichever group was made last
    found = reported(dump)
    assert (found.enqueued, found.completed, found.ranks) == (7, 7, None)


def test_where_states_are_not_kept_an_operation_is_finished_when_its_group_says_so() -> None:
    entries = [flight_entry(number, "scheduled", retired=True) for number in range(1, 8)]
    kept = json.loads(reported(flight_dump(*entries, enqueued=7, completed=6)).reduced)["entries"]
    assert [(entry["collective_seq_id"], entry["state"]) for entry in kept] == [(7, "scheduled")]


def test_a_hang_is_told_from_the_reduced_dumps_as_from_the_whole_ones(tmp_path: Path) -> None:
    late = flight_dump(*(flight_entry(number) for number in range(1, 7)), enqueued=6, completed=6)
    waiting = flight_dump(
        *(flight_entry(number) for number in range(1, 7)), flight_entry(7, "started"), enqueued=7, completed=6
    )
    recordings = []
    for rank, dump in enumerate((waiting, late)):
        path = tmp_path / f"reduced_{rank}.json"
        path.write_bytes(reported(dump, rank).reduced)
        recordings.append(read_dump(path))
    assert analyse(recordings).culprits == (1,)


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.booleans()), min_size=2, max_size=6), st.booleans())
def test_reduced_dumps_say_the_same_as_whole_ones(ranks: list[tuple[int, bool, bool]], states_kept: bool) -> None:
    """Each rank has completed some of seven collectives, and perhaps enqueued the next; gloo keeps no states."""
    folder = Path(tempfile.mkdtemp())
    try:
        answers: list[StuckRanks | str] = []
        for form in ("whole", "reduced"):
            recordings = []
            for rank, (done, waits, counted) in enumerate(ranks):
                state = "completed" if states_kept else "scheduled"
                entries = [flight_entry(number, state, retired=True) for number in range(done)]
                entries += [flight_entry(done, "scheduled", retired=False)] if waits else []
                dump = flight_dump(*entries, ranks=len(ranks), enqueued=done - 1 + waits, completed=done - 1)
                dump["pg_status"] = dump["pg_status"] if counted else {}
                path = folder / f"{form}_{rank}.json"
                path.write_bytes(json.dumps(dump).encode() if form == "whole" else reported(dump, rank).reduced)
                recordings.append(read_dump(path))
            try:
                answers.append(analyse(recordings))
            except Blind as reason:
                answers.append(str(reason))
        assert answers[0] == answers[1]
    finally:
        shutil.rmtree(folder)


def test_point_to_point_operations_keep_their_own_numbers(tmp_path: Path) -> None:
    exchange = flight_entry(0, "started", is_p2p=True, p2p_seq_id=4, profiling_name="nccl:send 0->1", retired=False)
    path = tmp_path / "reduced_0.json"
    path.write_bytes(reported(flight_dump(flight_entry(9), exchange)).reduced)
    recording = read_dump(path)
    assert [(item.sequence, item.point_to_point) for item in recording.unfinished] == [(4, True)]
    assert list(recording.collectives.values()) == [9]


def test_stacks_are_not_kept() -> None:
    assert b"train.py" not in reported(flight_dump(flight_entry(7, "started"))).reduced


def test_what_is_kept_is_bounded_and_begins_with_the_oldest() -> None:
    entries = [flight_entry(number, "started") for number in range(1000)]
    found = reported(flight_dump(*entries, enqueued=999, completed=-1))
    kept = [entry["collective_seq_id"] for entry in json.loads(found.reduced)["entries"]]
    assert kept == [*range(UNFINISHED_MAX), 999]
    assert found.left_out == 1000 - UNFINISHED_MAX


def test_a_dump_that_would_take_gigabytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadDump, match="lists and dictionaries"):
        parse_dump(b"\x80\x02" + b"]" * 1_000_000 + b".", 0)
    with pytest.raises(BadDump, match="lists and dictionaries"):
        parse_dump(b"[" + b"[]," * 1_000_000 + b"[]]", 0)
    monkeypatch.setattr(limits, "DUMP_BYTES_MAX", 100)
    with pytest.raises(BadDump, match="at most 100 are read"):
        parse_dump(b"[" + b" " * 100 + b"]", 0)


def test_an_entry_that_a_pickle_repeats_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENTRIES_MAX", 1_000)
    entries = [flight_entry(7)] * 1_000
    assert reported(flight_dump(*entries)).completed == 6
    with pytest.raises(BadDump, match="1001 entries; at most 1000 are read"):
        reported(flight_dump(*entries, entries[0]))


@pytest.mark.parametrize("ranks", ["0," * 400, [0] * 400, [0] * 1_001])
def test_ranks_that_a_pickle_repeats_for_each_group_are_refused(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RANKS_CHARS_MAX", 1_000)
    dump = flight_dump(flight_entry(7)) | {"pg_config": {str(number): {"ranks": ranks} for number in range(2)}}
    with pytest.raises(BadDump, match="the ranks of all groups have more than 1000 characters"):
        reported(dump)


def test_the_ranks_of_a_large_job_are_read() -> None:
    dump = flight_dump(flight_entry(7), ranks=100_000)
    dump["pg_config"] |= {str(number): {"name": str(number), "ranks": "[0, 1]"} for number in range(1, 100)}
    assert reported(dump).ranks == 100_000


@pytest.mark.parametrize("ranks", ["[0, \ud800]", "[\N{ARABIC-INDIC DIGIT THREE}]", [0, -1], [True], 5, None])
def test_a_group_whose_ranks_are_no_list_of_numbers_names_none(ranks: Any) -> None:
    dump = flight_dump(flight_entry(7))
    dump["pg_config"]["0"]["ranks"] = ranks
    found = reported(dump)
    assert (found.ranks, json.loads(found.reduced)["pg_config"]["0"]["ranks"]) == (None, "")


def test_sizes_that_a_pickle_repeats_for_each_operation_are_refused() -> None:
    sizes = [[1 << 60] * limits.SHAPES_MAX] * limits.SHAPES_MAX
    dump = flight_dump(*(flight_entry(number, "started", input_sizes=sizes) for number in range(100)))
    with pytest.raises(BadDump, match="operations to be kept have more than 4194304 bytes"):
        reported(dump)


def test_a_dump_that_is_nested_too_deep_is_refused() -> None:
    deep = 100_000
    for raw in (
        b'{"entries":' + b"[" * deep + b"]" * deep + b"}",
        b"\x80\x02}X\x07\x00\x00\x00entries" + b"]" * deep + b"a" * (deep - 1) + b"s.",
    ):
        with pytest.raises(BadDump, match=r"nested too deep|entries\[0\] is list"):
            parse_dump(raw, 0)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("ran",)


def test_a_dump_that_calls_something_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadDump, match="plain data only"):
        parse_dump(pickle.dumps({"entries": [Evil()]}), 0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "change",
    [
        {"pg_status": 5},
        {"pg_config": ["x"]},
        {"entries": {"a": 1}},
        {"entries": [7]},
        {"entries": [{"state": "started"}]},
        {"entries": [flight_entry(2**70)]},
        {"pg_status": {0: {"last_enqueued_collective": "many"}}},
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(BadDump, match=r"pg_|entries|collective|dictionary"):
        reported(flight_dump(flight_entry(7, "started")) | change)


@given(st.binary())
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    for hostile in (raw, b"\x80\x02" + raw, b"{" + raw):
        with contextlib.suppress(BadDump):
            parse_dump(hostile, 0)


def test_whatever_stands_in_a_field_a_dump_is_read_or_refused() -> None:
    believed = 0
    for plain in spoiled(json.loads(json.dumps(flight_dump(flight_entry(6), flight_entry(7, "started"))))):
        for form in ("pickle", "json"):
            with contextlib.suppress(BadDump):
                json.loads(reported(plain, form=form).reduced)
                believed += 1
    assert believed > 500


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(flight_entry(0))), values, values, values)
def test_any_values_are_read_or_refused(key: str, entry: Any, config: Any, status: Any) -> None:
    dump = flight_dump(flight_entry(7, "started") | {key: entry})
    for changed in (dump, dump | {"pg_config": {"0": config}}, dump | {"pg_status": {0: status}}):
        with contextlib.suppress(BadDump):
            json.loads(reported(changed, form="json").reduced)
