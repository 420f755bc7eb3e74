"""Flight-recorder dumps as files: what is read, and that nothing in them is ever run or believed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_eye.detectors.progress.flight_recorder import analyse
from eagle_eye.detectors.types import Blind
from eagle_eye.schema import flight_recorder as dump_format
from eagle_eye.schema.flight_recorder import BadDump, decode
from eagle_eye.server.admin import flight_recorder_command
from eagle_eye.server.admin.flight_recorder_command import rank_in_name, read_dump, read_folder


def entry(sequence: int, state: str = "scheduled", **more: Any) -> dict[str, Any]:
    """Return an entry as PyTorch 2.10 writes it."""
    fields: dict[str, Any] = {
        "frames": [{"name": "step", "filename": "train.py", "line": 7}],
        "record_id": sequence,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "thread_name": "pt_nccl",
        "thread_id": "1",
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_700_000_000_000_000_000,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 600_000,
        "is_p2p": False,
    }
    return {**fields, **more}


def dump(*entries: dict[str, Any], ranks: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}},
        "pg_status": {},
        "entries": list(entries),
        **more,
    }


def write(folder: Path, *dumps: dict[str, Any], form: str = "pickle") -> Path:
    folder.mkdir(exist_ok=True)
    for rank, one in enumerate(dumps):
        raw = json.dumps(one).encode() if form == "json" else pickle.dumps(one, protocol=2)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(raw)
    return folder


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_folder_of_dumps_names_the_rank_that_is_behind(tmp_path: Path, form: str) -> None:
    late, others = dump(entry(6, "completed")), dump(entry(6, "completed"), entry(7))
    found = read_folder(write(tmp_path / "d", others, others, late, others, form=form))
    assert analyse(found.recordings).culprits == (2,)
    assert (found.unreadable, found.skipped) == ([], [])


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_binary_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "_dump_3"
    path.write_bytes(pickle.dumps(dump(entry(7), big=2**40, negative=-1, number=1.5, truth=True), protocol=protocol))
    recording = read_dump(path)
    assert (recording.rank, recording.unfinished[0].sequence) == (3, 7)
    assert recording.unfinished[0].input_sizes == ((4, 2),)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("nccl_trace_rank_12", 12),
        ("comm_lib_trace_rank_0", 0),
        ("_dump_7", 7),
        ("rank3.json", 3),
        ("r2_rank_5.pkl", 5),
        ("fault_injection.log", None),
        ("README.md", None),
    ],
)
def test_the_rank_is_the_number_that_the_name_ends_with(name: str, rank: int | None) -> None:
    assert rank_in_name(Path(name)) == rank


def test_the_content_may_tell_the_rank(tmp_path: Path) -> None:
    (tmp_path / "here.json").write_text(json.dumps(dump(entry(7), rank=9)))
    assert read_folder(tmp_path).recordings[0].rank == 9


def test_old_dumps_have_one_number_and_may_be_a_bare_list(tmp_path: Path) -> None:
    old = [{"pg_id": 0, "seq_id": 5, "profiling_name": "nccl:all_reduce", "state": "started", "input_sizes": [[1]]}]
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps(old, protocol=2))
    (operation,) = read_dump(path).unfinished
    assert (operation.sequence, operation.group.name) == (5, "0")


def test_what_a_group_claims_is_found_by_the_order_in_which_groups_were_made(tmp_path: Path) -> None:
    config = {name: {"name": name, "desc": "", "ranks": "[0, 1]"} for name in ("0", "108", "37")}
    status = {"0": {"last_enqueued_collective": 7}, "16": {"last_enqueued_collective": "90"}}
    path = tmp_path / "rank_1.json"

    def claimed() -> dict[str, int]:
        one = {"entries": [entry(50, pg_id=5, process_group=["37", ""])], "pg_config": config, "pg_status": status}
        path.write_text(json.dumps(one))
        return {group.name: number for group, number in read_dump(path).enqueued.items()}

    assert claimed() == {}, "two numbers, three groups: only an operation could say which is which"
    status["5"] = {"last_enqueued_collective": 50}
    assert claimed() == {"0": 7, "37": 50, "108": 90}


class Evil:
    """Whoever unpickles it runs a command."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("protocol", range(6))
def test_a_dump_that_calls_something_is_refused_and_does_nothing(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "ran"
    with pytest.raises(BadDump, match="plain data only"):
        decode(pickle.dumps({"entries": [Evil(mark)]}, protocol=protocol))
    assert not mark.exists()


def test_the_unpickler_alone_refuses_classes_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dump_format, "_check_opcodes", lambda raw, objects_max: None)
    with pytest.raises(BadDump, match="it asks for"):
        decode(pickle.dumps({"entries": [Evil(tmp_path / "ran")]}, protocol=2))


def test_a_memo_number_that_would_reserve_gigabytes_is_refused() -> None:
    with pytest.raises(BadDump, match="far beyond"):
        decode(b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b".")


@pytest.mark.parametrize("cut", [0, 1, 5, 40, -1])
def test_a_truncated_dump_is_named(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rank_4"
    path.write_bytes(pickle.dumps(dump(entry(7)), protocol=2)[:cut])
    with pytest.raises(BadDump, match="rank_4: "):
        read_dump(path)


def test_a_dump_over_the_limit_is_named_with_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder_command, "DUMP_BYTES_MAX", 100)
    path = tmp_path / "rank_4"
    path.write_bytes(pickle.dumps(dump(entry(7)), protocol=2))
    with pytest.raises(BadDump, match=r"rank_4: .* at most 100"):
        read_dump(path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({}, "no flight-recorder dump"),
        (7, "no flight-recorder dump"),
        ({"entries": 7}, "entries is 7"),
        ({"entries": [7]}, r"entries\[0\] is 7"),
        ({"entries": [{"state": "started"}]}, r"entries\[0\].collective_seq_id is missing"),
        ({"entries": [entry("x")]}, r"entries\[0\].collective_seq_id is 'x'"),  # type: ignore[arg-type]
        ({"entries": [entry(2**70)]}, "64 bits"),
        ({"entries": [], "pg_config": {"0": 1}}, "pg_config"),
    ],
)
def test_what_is_wrong_with_the_content_is_said(tmp_path: Path, content: Any, complaint: str) -> None:
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(BadDump, match=complaint):
        read_dump(path)


def test_a_bad_file_costs_its_rank_only(tmp_path: Path) -> None:
    folder = write(tmp_path / "d", dump(entry(7)), dump(entry(7)), dump(entry(7)))
    (folder / "nccl_trace_rank_3").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (folder / "notes.txt").write_text("hello")
    (folder / "again_rank_0").write_bytes(pickle.dumps(dump(entry(7)), protocol=2))
    found = read_folder(folder)
    assert sorted(recording.rank for recording in found.recordings) == [0, 1, 2]
    assert found.skipped == ["notes.txt"]
    assert len(found.unreadable) == 2
    assert found.unread == {3}


def test_the_ranks_of_discarded_duplicates_are_not_missing(tmp_path: Path) -> None:
    dumps = [dump(entry(7), rank=number % 2) for number in range(4)]
    found = read_folder(write(tmp_path / "d", *dumps))
    assert sorted(recording.rank for recording in found.recordings) == [0, 1]
    assert found.unread == {2, 3}
    with pytest.raises(Blind, match="leads to ranks 2, 3, whose dump cannot be used"):
        analyse(found.recordings, found.unread)


def test_retired_operations_that_their_group_counts_as_completed_are_not_open(tmp_path: Path) -> None:
    """As gloo records them: states stay as they were scheduled."""
    done = [entry(number, retired=True) for number in (1, 2)]
    came = dump(*done, entry(3), pg_status={"0": {"last_enqueued_collective": 3, "last_completed_collective": 2}})
    late = dump(*done, pg_status={"0": {"last_enqueued_collective": 2, "last_completed_collective": 2}})
    found = read_folder(write(tmp_path / "d", came, came, late, came))
    assert analyse(found.recordings).culprits == (2,)


def test_a_folder_without_a_dump_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadDump, match="no readable dump"):
        read_folder(tmp_path)
    with pytest.raises(BadDump, match="expected a folder"):
        read_folder(tmp_path / "nowhere")


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_decode_or_be_refused(raw: bytes) -> None:
    for content in (raw, b"\x80\x02" + raw, pickle.dumps(dump(entry(7)), protocol=2)[: len(raw) * 3] + raw):
        try:
            decode(content)
        except BadDump:
            continue


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=30,
    ),
    st.integers(2, 5),
)
def test_plain_data_survives_every_protocol(value: Any, protocol: int) -> None:
    assert decode(pickle.dumps({"value": value}, protocol)) == {"value": value}


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.builds(lambda: 10**5000),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=6,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_content_does_anything_but_be_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    one = data.draw(st.sampled_from([*entry(7)]))
    content = dump({**entry(7), one: data.draw(ANYTHING)}, pg_status={"0": {"last_enqueued_collective": 7}})
    spoilt = data.draw(st.sampled_from([*content, "entries"]))
    if data.draw(st.booleans()):
        content[spoilt] = data.draw(ANYTHING | st.dictionaries(st.text() | st.integers(), ANYTHING))
    path = tmp_path_factory.getbasetemp() / "rank_0"
    path.write_bytes(pickle.dumps(content, protocol=2))
    with contextlib.suppress(BadDump):
        read_dump(path)


def incident(name: str) -> Path:
    data = os.environ.get("EAGLE_EYE_TEST_DATA")
    folder = Path(data or "") / "real" / "nvrx_fr" / "fr_traces" / name
    if not data or not folder.is_dir():
        pytest.skip("EAGLE_EYE_DATA does not name the folder with the recorded flight-recorder dumps")
    return folder


@pytest.mark.parametrize("name", ["gpu_error_2nd", "lock_gil_1st"])
def test_the_injected_ranks_of_a_real_incident_are_named(name: str) -> None:
    folder = incident(name)
    injected = json.loads((folder / "fault_injection.log").read_text().partition("Fault ranks: ")[2].splitlines()[0])
    assert list(analyse(read_folder(folder).recordings).culprits) == injected
