from __future__ import annotations

import logging
import math
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from eagle_eye.schema.frame import Block, Frame, block, decode_frame, encode_frame
from eagle_eye.schema.metrics import BY_NAME, Scope
from eagle_eye.server.history.embedded_history import HISTORY_FILE, Compaction, EmbeddedHistory
from eagle_eye.server.history.history import runs_of
from eagle_eye.server.history.journal_reader import MIGRATIONS
from eagle_eye.server.history.segment_files import Segment
from tests.server.builders import NOW, FakeClock, frame
from tests.server.segments.kept import FOREVER_S, WITHIN_S, batch, compact, opened, retain, rich, told

POWER = BY_NAME["gpu_power_watts"]


def with_key(raw: bytes, **more: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(raw), **more})


def folders(history: EmbeddedHistory) -> list[Path]:
    return sorted(history.segment_store.folder.iterdir())


def points(
    history: EmbeddedHistory, metric: str, node: str = "n1", job: str | None = None
) -> dict[object, list[float]]:
    found: dict[object, list[float]] = {}
    for run in history.runs(BY_NAME[metric], [node], 0.0, FOREVER_S, job):
        found.setdefault(run.key, []).extend(run.values.tolist())
    return found


def test_segments_tell_what_the_journal_told(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        for node in ("n1", "n2"):
            history.submit(batch([rich(n, node) for n in range(1, 6)], NOW + 6, 0.25)).result(WITHIN_S)
        before = told(history)
        read = [points(history, name) for name in ("gpu_power_watts", "node_cpu_utilization_ratio", "link_up")]
        compact(history)
        assert history.segment_store.size()[0] == 1
        assert told(history) == before
        assert [points(history, n) for n in ("gpu_power_watts", "node_cpu_utilization_ratio", "link_up")] == read
        assert read[2] == {"mlx5_1": [1.0] * 5}
        assert history.count(["n2"], NOW + 2.25, NOW + 4.25, 100) == 3
        assert [one.offset_s for one in history.query(["n1"], NOW + 3.25, NOW + 3.25)] == [0.25]


@pytest.mark.parametrize(
    "raw",
    [
        encode_frame(frame(blocks=[])),
        encode_frame(frame(blocks=[Block(Scope.DEVICE, [3, 1], [], b"")], job=None, ranks=[])),
        encode_frame(frame(blocks=[Block(Scope.LINK, [5, "a"], ["link_up"], b"\0" * 16)])),
        encode_frame(frame(blocks=[Block(Scope.LINK, [5, "5"], ["link_up"], b"\0" * 16)])),
        encode_frame(frame(blocks=[block(Scope.DEVICE, {2: {"train_loss": math.inf}, 0: {"gpu_power_watts": 1.5}})])),
        encode_frame(frame(blocks=[block(Scope.NODE, {-1: {"node_blocked_tasks": 1.0}})] * 2)),
        with_key(encode_frame(frame()), events=[{"time_s": NOW, "kind": "xid", "attributes": {"code": math.nan}}]),
    ],
    ids=["no blocks", "no metrics", "number as link", "links alike", "turned", "scope twice", "not in JSON"],
)
def test_a_strange_frame_comes_back_as_it_was(tmp_path: Path, raw: bytes) -> None:
    with opened(tmp_path) as history:
        history.submit(batch([raw])).result(WITHIN_S)
        compact(history)
        (recorded,) = history.query([], 0.0, FOREVER_S)
        assert encode_frame(recorded.frame) == encode_frame(decode_frame(raw))


def test_what_a_newer_agent_sends_is_kept_and_told_once_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = block(Scope.DEVICE, {0: {"gpu_power_watts": 5.0}}).values * 2
    mood = [{"scope": "device", "keys": [0], "metrics": ["gpu_mood", "gpu_power_watts"], "values": values}]
    event = {"time_s": NOW, "kind": "party", "device": 0, "attributes": {}}
    with opened(tmp_path) as history:
        raw = with_key(encode_frame(frame()), blocks=mood, events=[event], weather="fine")
        history.submit(batch([raw])).result(WITHIN_S)
        compact(history)
        (recorded,) = history.query([], 0.0, FOREVER_S)
        assert recorded.frame == decode_frame(raw)
        assert points(history, "gpu_power_watts") == {0: [5.0]}
        known = {**BY_NAME, "gpu_mood": POWER._replace(name="gpu_mood")}
        monkeypatch.setattr("eagle_eye.server.history.segment_files.BY_NAME", known)
        (recorded,) = history.query([], 0.0, FOREVER_S)
        assert recorded.frame.blocks == [Block(Scope.DEVICE, [0], ["gpu_mood", "gpu_power_watts"], values)]


def test_journal_and_segments_are_read_as_one(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        history.submit(batch([rich(1), rich(2)])).result(WITHIN_S)
        compact(history)
        history.submit(batch([rich(3)])).result(WITHIN_S)
        assert [sequence for *_, sequence, _ in told(history)] == [1, 2, 3]
        assert points(history, "gpu_power_watts")[0] == [301.0, 302.0, 303.0]
        assert points(history, "gpu_power_watts", job="another") == {}
        assert len(points(history, "gpu_power_watts", job="job")[1]) == 3
        compact(history)
        assert [one.frame.sequence for one in history.query([], 0.0, FOREVER_S)] == [1, 2, 3]


def test_ranks_are_reported_without_reading_frames_and_are_theirs(tmp_path: Path) -> None:
    kept_whole = with_key(encode_frame(frame(5, time_s=NOW + 5)), mood="fine")
    with opened(tmp_path) as history:
        history.submit(batch([rich(1), rich(2), rich(3)], NOW, 0.25)).result(WITHIN_S)
        history.submit(batch([rich(1, "n2")])).result(WITHIN_S)
        history.submit(batch([kept_whole])).result(WITHIN_S)
        for _ in ("journal", "segments", "both"):
            expected = [
                (one.frame.node, one.frame.time_s + one.offset_s, one.frame.ranks)
                for one in history.query(["n1"], NOW + 2, NOW + 9)
            ]
            assert [tuple(told) for told in history.ranks(["n1"], NOW + 2, NOW + 9)] == expected
            compact(history)
            history.submit(batch([rich(4)])).result(WITHIN_S)
        assert len(expected) == 4


def test_a_duplicate_is_known_after_its_first_has_moved_and_the_server_restarted(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(tmp_path, clock) as history:
        history.submit(batch([rich(n) for n in (1, 2, 5)])).result(WITHIN_S)
        compact(history)
        clock.advance(1_000)
        retain(history)
        assert list(history.replay(0.0, 100)) == []
    with opened(tmp_path, clock) as history:
        appended = history.submit(batch([rich(n) for n in (1, 3, 5, 6)], clock.now_s())).result(WITHIN_S)
        assert (appended.new, appended.watermarks[-1]) == ([False, True, False, True], 6)
        assert [sequence for *_, sequence, _ in told(history)] == [1, 2, 3, 5, 6]


def test_late_frames_have_segments_of_their_own(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        history.submit(batch([rich(n) for n in (1, 2)], NOW + 3_000)).result(WITHIN_S)
        history.submit(batch([rich(2_999, "n2")], NOW + 3_000)).result(WITHIN_S)
        compact(history)
        known = history.segment_store.holding(history.journal._writer, [], 0.0, FOREVER_S)
        assert sorted((one.first_node, one.frames) for one in known) == [("n1", 2), ("n2", 1)]
        assert [one.frame.sequence for one in history.query([], 0.0, FOREVER_S)] == [1, 2, 2_999]


def test_a_query_of_one_node_reads_only_the_row_groups_and_columns_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_eye.server.history.compactor.GROUP_FRAMES", 4)
    with opened(tmp_path) as history:
        for node in "abcdefgh":
            history.submit(batch([rich(n, node) for n in range(1, 5)])).result(WITHIN_S)
        compact(history)
        read: list[tuple[list[int], list[str] | None]] = []
        import pyarrow.parquet as pq

        whole = pq.ParquetFile.read_row_groups

        def noted(self: pq.ParquetFile, groups: list[int], columns: list[str] | None = None, **more: object) -> object:
            read.append((list(groups), columns))
            return whole(self, groups, columns=columns, **more)

        monkeypatch.setattr(pq.ParquetFile, "read_row_groups", noted)
        (segment,) = folders(history)
        runs = list(Segment(segment).runs(POWER, ["c"], NOW + 2, NOW + 3, None))
        assert [(run.node, run.key, run.values.tolist()) for run in runs] == [
            ("c", 0, [302.0, 303.0]),
            ("c", 1, [303.0, 304.0]),
        ]
        assert read == [([2], ["frame", "time", "node", "device", "gpu_power_watts"])]


@pytest.mark.parametrize("damage", ["bits", "short", "gone", "no table"])
def test_a_broken_segment_is_set_aside_named_counted_and_the_rest_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    with opened(tmp_path) as history:
        history.submit(batch([rich(n) for n in range(1, 40)])).result(WITHIN_S)
        compact(history)
        (segment,) = folders(history)
        history.submit(batch([rich(40)])).result(WITHIN_S)
        compact(history)
        history.submit(batch([rich(41)])).result(WITHIN_S)
        table = segment / "frames.parquet"
        content = bytearray(table.read_bytes())
        if damage == "bits":
            content[40:60] = b"?" * 20
            table.write_bytes(content)
        elif damage == "short":
            table.write_bytes(content[: len(content) // 2])
        elif damage == "gone":
            table.unlink()
        else:
            table.write_bytes(b"")
        with caplog.at_level(logging.ERROR):
            assert [one.frame.sequence for one in history.query([], 0.0, FOREVER_S)][-2:] == [40, 41]
        assert history.segment_store.set_aside_total == 1
        assert (tmp_path / "history" / "set-aside" / segment.name).is_dir()
        assert segment.name in caplog.text
        assert [sequence for *_, sequence, _ in told(history)] == [40, 41]


def test_old_segments_go_by_age_and_by_size(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(tmp_path, clock, retention_s=1_000.0) as history:
        for n in range(1, 4):
            history.submit(batch([rich(n)], clock.now_s())).result(WITHIN_S)
            compact(history)
            clock.advance(450)
        history.segment_store.retain(clock.now_s())
        assert [sequence for *_, sequence, _ in told(history)] == [2, 3]
        assert history.segment_store.dropped_by_retention == 1
        assert len(folders(history)) == 2
    with opened(tmp_path, clock, retention_bytes=1 << 20) as history:
        history.journal.change(lambda writer: writer.execute("UPDATE segments SET bytes = 600000")).result(WITHIN_S)
        history.segment_store.retain(clock.now_s())
        assert [sequence for *_, sequence, _ in told(history)] == [3]


def test_segments_outlive_a_lost_journal_and_leftovers_of_a_crash_do_not(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        history.submit(batch([rich(1)])).result(WITHIN_S)
        compact(history)
        (history.segment_store.folder / ".partial-1").mkdir()
    for file in tmp_path.glob(f"{HISTORY_FILE}*"):
        file.unlink()
    with opened(tmp_path) as history:
        assert [sequence for *_, sequence, _ in told(history)] == [1]
        assert len(folders(history)) == 1


def test_an_older_history_db_that_was_put_back_costs_no_segment_that_it_does_not_know(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        history.submit(batch([rich(1)])).result(WITHIN_S)
    older = (tmp_path / HISTORY_FILE).read_bytes()
    with opened(tmp_path) as history:
        compact(history)
        history.submit(batch([rich(2)])).result(WITHIN_S)
        compact(history)
    (tmp_path / HISTORY_FILE).write_bytes(older)
    with opened(tmp_path) as history:
        assert [sequence for *_, sequence, _ in told(history)] == [1, 2]


def test_the_first_versions_file_is_taken_over(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / HISTORY_FILE)) as earlier, earlier:
        earlier.executescript(MIGRATIONS[0] + "PRAGMA user_version = 1;")
        earlier.execute("INSERT INTO streams VALUES (1, 'n1', 'stream-n1', 7, ?)", (NOW,))
        rows = [(n, 1, n, NOW + 8, NOW + n + 0.5, 0.5, rich(n)) for n in (6, 7)]
        earlier.executemany("INSERT INTO frames VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    with opened(tmp_path) as history:
        assert [(one.frame.sequence, one.offset_s) for one in history.query([], 0.0, FOREVER_S)] == [(6, 0.5), (7, 0.5)]
        assert history.submit(batch([rich(7), rich(8)])).result(WITHIN_S).new == [False, True]


def test_a_compactor_that_fails_is_counted_and_costs_no_frame(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as history:
        history.submit(batch([rich(1)])).result(WITHIN_S)
        command = (sys.executable, "-S", "-c", "import sys; sys.exit('no room')")
        failing = Compaction(history.journal, history.segment_store, history.compaction._settings, FakeClock(), command)
        with caplog.at_level(logging.ERROR):
            failing.compact()
        assert failing.failures == 1
        assert "no room" in caplog.text
        assert [sequence for *_, sequence, _ in told(history)] == [1]


def test_the_compactor_runs_beside_the_server_once_a_stretch_is_due(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(tmp_path, clock, segment_s=60.0) as history:
        history.submit(batch([rich(1)])).result(WITHIN_S)
        history.compaction.compact_if_due()
        assert history.segment_store.size()[0] == 0
        clock.advance(61)
        history.compaction.compact_if_due()
        assert (history.segment_store.size()[0], history.compaction.failures) == (1, 0)
        assert [sequence for *_, sequence, _ in told(history)] == [1]


def test_what_is_too_much_for_the_journal_is_due_however_young(tmp_path: Path) -> None:
    with opened(tmp_path, FakeClock(), retention_bytes=1 << 20) as history:
        history.submit(batch([rich(1)])).result(WITHIN_S)
        history.compaction.compact_if_due()
        assert history.segment_store.size()[0] == 0
        history.submit(batch([rich(number) for number in range(2, 600)])).result(WITHIN_S)
        history.compaction.compact_if_due()
        assert history.segment_store.size()[0] == 1


def test_a_group_is_due_by_its_size_and_others_that_nearly_are_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_eye.server.history.journal.NODES_PER_SHARD", 1)
    monkeypatch.setattr("eagle_eye.server.history.embedded_history.SEGMENT_BYTES", 60 * len(rich(1)))
    with opened(tmp_path, FakeClock()) as history:
        for node, frames in (("n1", 59), ("n2", 40), ("n3", 20)):
            history.submit(batch([rich(n, node) for n in range(1, frames + 1)])).result(WITHIN_S)
        history.compaction.compact_if_due()
        assert history.segment_store.size()[0] == 0
        history.submit(batch([rich(n) for n in range(60, 71)])).result(WITHIN_S)
        history.compaction.compact_if_due()
        segments = history.segment_store.holding(history.journal._writer, [], 0.0, FOREVER_S)
        assert sorted((one.first_node, one.frames) for one in segments) == [("n1", 70), ("n2", 40)]
        assert len(told(history)) == 130


def test_a_node_that_speaks_again_has_a_stretch_of_its_own(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(tmp_path, clock, segment_s=60.0) as history:
        stretches = []
        for number in range(1, 5):
            history.submit(batch([rich(number)], received_s=clock.now_s())).result(WITHIN_S)
            clock.advance(40)
            history.compaction.compact_if_due()
            stretches.append(history.segment_store.size()[0])
        assert stretches == [0, 1, 1, 2]


def test_what_frames_of_a_node_say_is_one_run_for_each_series_in_the_order_of_corrected_times() -> None:
    def watts(node: str, values: dict[int, float]) -> Frame:
        return frame(node=node, blocks=[block(Scope.DEVICE, {k: {"gpu_power_watts": v} for k, v in values.items()})])

    frames = [
        (watts("n1", {0: 300.0, 1: 310.0}), 20.0),
        (watts("n1", {0: 301.0, 1: math.nan}), 10.0),  # the correction of its clock has changed
        (watts("n1", {1: 312.0}), 30.0),
        (watts("n2", {0: 100.0}), 10.0),
    ]
    found = [(run.node, run.key, run.times_s.tolist(), run.values.tolist()) for run in runs_of(frames, POWER)]
    assert found == [
        ("n1", 0, [10.0, 20.0], [301.0, 300.0]),
        ("n1", 1, [20.0], [310.0]),
        ("n1", 1, [30.0], [312.0]),
        ("n2", 0, [10.0], [100.0]),
    ]
