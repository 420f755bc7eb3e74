from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.frame import encode_frame
from eagle_eye.server.history import journal as journal_module
from eagle_eye.server.history.embedded_history import EmbeddedHistory
from eagle_eye.server.history.journal import Journal, Retention
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.batch import Batch, StreamRef
from eagle_eye.server.model.errors import HistoryBusy, HistoryUnavailable
from tests.server.builders import NOW, FakeClock, batch_of, frame, replayed

WITHIN_S = 10.0
WINDOW_S = 900.0


def batch(*sequences: int, node: str = "n1", received_s: float = NOW, offset_s: float = 0.0) -> Batch:
    entries = tuple(
        (sequence, NOW + sequence, encode_frame(frame(sequence, node, NOW + sequence))) for sequence in sequences
    )
    return batch_of(node, f"stream-{node}", received_s, offset_s, entries)


@contextmanager
def opened(
    folder: Path, clock: FakeClock | None = None, pending_bytes_max: int = 1 << 20, **settings: Any
) -> Iterator[EmbeddedHistory]:
    journal = EmbeddedHistory(folder, HistorySettings(**settings), pending_bytes_max, clock or FakeClock(), WINDOW_S)
    try:
        yield journal
    finally:
        journal.close()


def eventually(claim: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not claim():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_frames_are_there_after_their_future_is_done(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        appended = journal.submit(batch(1, 2, 3)).result(WITHIN_S)
        assert (appended.new, appended.watermarks[-1]) == ([True, True, True], 3)
    with opened(tmp_path) as again:
        assert [recorded.frame.sequence for recorded in replayed(again, 0.0, 100)] == [1, 2, 3]


def test_a_duplicate_changes_nothing_and_is_counted(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.submit(batch(1, 2)).result(WITHIN_S)
        appended = journal.submit(batch(2, 3)).result(WITHIN_S)
        assert (appended.new, appended.watermarks[-1]) == ([False, True], 3)
        assert [recorded.frame.sequence for recorded in replayed(journal, 0.0, 100)] == [1, 2, 3]


def test_duplicates_are_known_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.submit(batch(5)).result(WITHIN_S)
    with opened(tmp_path) as journal:
        appended = journal.submit(batch(5)).result(WITHIN_S)
        assert (appended.new, appended.watermarks) == ([False], [5])


def test_the_watermark_is_each_streams_own_and_never_falls(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        assert journal.submit(batch(7)).result(WITHIN_S).watermarks[-1] == 7
        assert journal.submit(batch(3)).result(WITHIN_S).watermarks[-1] == 7
        assert journal.submit(batch(2, node="n2")).result(WITHIN_S).watermarks[-1] == 2


def test_replay_is_in_order_of_time_from_a_moment_on_and_of_too_many_the_newest(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        for sequence, node in ((1, "n1"), (1, "n2"), (2, "n1"), (2, "n2")):
            journal.submit(batch(sequence, node=node, received_s=NOW + sequence, offset_s=4.0)).result(WITHIN_S)
        told = [(r.frame.sequence, r.frame.node, r.offset_s) for r in replayed(journal, NOW + 2, 100)]
        assert told == [(2, "n1", 4.0), (2, "n2", 4.0)]
        assert [(r.frame.sequence, r.frame.node) for r in replayed(journal, 0.0, 1)] == [(2, "n2")]
        assert replayed(journal, NOW + 9, 100) == []


def test_a_chunk_that_is_shorter_than_its_directory_says_is_damage(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.submit(batch(1, 2)).result(WITHIN_S)
        with sqlite3.connect(tmp_path / "history.db") as other:
            other.execute("UPDATE chunks SET raw = x''")
        other.close()
        with pytest.raises(HistoryUnavailable, match=r"history\.db is damaged"):
            replayed(journal, 0.0, 100)


def test_a_query_reads_the_nodes_and_times_asked_for(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.submit(batch(*range(1, 11))).result(WITHIN_S)
        journal.submit(batch(*range(1, 11), node="n2")).result(WITHIN_S)
        found = [(r.frame.node, r.frame.sequence) for r in journal.query(["n2"], NOW + 3, NOW + 5)]
        assert found == [("n2", 3), ("n2", 4), ("n2", 5)]
        assert journal.count([], NOW + 3, NOW + 5, 100) == 6
        assert journal.count([], NOW, NOW + 100, 7) > 7


def test_what_came_late_is_replayed_in_its_turn(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.submit(batch(100, 101, received_s=NOW + 101)).result(WITHIN_S)
        journal.submit(batch(50, 51, received_s=NOW + 102)).result(WITHIN_S)
        journal.submit(batch(50, node="n2", received_s=NOW + 103)).result(WITHIN_S)
        told = [(recorded.frame.node, recorded.frame.sequence) for recorded in replayed(journal, 0.0, 100)]
        assert told == [("n1", 50), ("n2", 50), ("n1", 51), ("n1", 100), ("n1", 101)]
        assert [recorded.frame.sequence for recorded in replayed(journal, NOW + 51, 100)] == [51, 100, 101]


def test_of_too_many_the_newest_are_replayed_whenever_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_eye.server.history.journal_reader.CHUNKS_AT_ONCE", 1)
    with opened(tmp_path) as journal:
        journal.submit(batch(90, 91, 92, received_s=NOW + 99)).result(WITHIN_S)
        journal.submit(batch(1, 2, 99, node="n2", received_s=NOW + 100)).result(WITHIN_S)  # one late, one not
        journal.submit(batch(93, received_s=NOW + 100)).result(WITHIN_S)
        found = [recorded.frame.sequence for recorded in replayed(journal, 0.0, 4)]
        assert found == [91, 92, 93, 99]


def test_a_query_reads_a_nodes_streams_in_the_order_of_their_times(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        for stream, sequences in (("live", (9, 10)), ("older", (5, 6)), ("oldest", (1, 2))):
            journal.submit(batch(*sequences)._replace(refs=[StreamRef("n1", stream)] * len(sequences))).result(WITHIN_S)
        found = [recorded.frame.sequence for recorded in journal.query([], NOW, NOW + 100)]
        assert found == [1, 2, 5, 6, 9, 10]


def test_a_stream_that_was_not_heard_of_for_long_is_still_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_eye.server.history.journal.STREAMS_CACHED_MAX", 2)
    with opened(tmp_path) as journal:
        for _ in range(2):
            for node in ("n1", "n2", "n3", "n4"):
                watermark = journal.submit(batch(1, 2, node=node)).result(WITHIN_S).watermarks[-1]
                assert watermark == 2
        eventually(lambda: len(journal.journal._streams) == 2)
        assert len(replayed(journal, 0.0, 100)) == 8
        assert len(journal.streams()) == 4


def test_more_than_may_wait_is_refused_and_nothing_of_it_kept(tmp_path: Path) -> None:
    with opened(tmp_path, pending_bytes_max=2_000) as journal:
        blocker = sqlite3.connect(tmp_path / "history.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        first = journal.submit(batch(1))
        eventually(lambda: journal.journal.waiting_bytes == 0)
        second = journal.submit(batch(2))
        with pytest.raises(HistoryBusy, match="pending_bytes_max"):
            journal.submit(batch(3, 4, 5))
        blocker.execute("ROLLBACK")
        blocker.close()
        assert first.result(WITHIN_S).new == [True]
        assert second.result(WITHIN_S).new == [True]
        assert [recorded.frame.sequence for recorded in replayed(journal, 0.0, 100)] == [1, 2]


def fill_the_disk(journal: Journal) -> None:
    pages = journal._writer.execute("PRAGMA page_count").fetchone()[0]
    journal._writer.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_is_reported_and_recovered_from_without_a_hand(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        journal.submit(batch(1)).result(WITHIN_S)
        fill_the_disk(journal.journal)
        with pytest.raises(HistoryUnavailable, match="full"):
            journal.submit(batch(*range(2, 200))).result(WITHIN_S)
        assert "full" in (journal.problem() or "")
        journal.journal._writer.execute("PRAGMA max_page_count = 1000000")
        # Nobody sends anything: the journal finds out by itself.
        eventually(lambda: journal.problem() is None)
        appended = journal.submit(batch(*range(2, 200))).result(WITHIN_S)
        assert (sum(appended.new), appended.watermarks[-1]) == (198, 199)


def test_the_log_says_once_that_frames_are_refused_and_once_that_it_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    with opened(tmp_path, clock) as journal:
        journal.submit(batch(1)).result(WITHIN_S)
        for _ in range(2):  # one that is over for a moment only is the same
            fill_the_disk(journal.journal)
            for _ in range(3):
                with pytest.raises(HistoryUnavailable, match="full"):
                    journal.submit(batch(*range(2, 1200))).result(WITHIN_S)
                clock.advance(2.0)
            journal.journal._writer.execute("PRAGMA max_page_count = 1000000")
            eventually(lambda: journal.problem() is None)
        assert _said(caplog) == [f"frames are refused, and agents keep them: {tmp_path}"]
        clock.advance(journal_module.REFUSALS_OVER_S)
        eventually(lambda: len(_said(caplog)) == 2)
        journal.submit(batch(*range(2, 1200))).result(WITHIN_S)
    assert "frames are taken again: 7188 were refused within 10.0 s" in _said(caplog)[1]


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.name == journal_module.__name__]
    return [line.replace("frames cannot be written to ", "").partition("/history.db")[0] for line in lines]


def test_a_failed_commit_raises_no_watermark(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill_the_disk(journal.journal)
        with pytest.raises(HistoryUnavailable):
            journal.submit(batch(*range(1, 300))).result(WITHIN_S)
        journal.journal._writer.execute("PRAGMA max_page_count = 1000000")
        assert journal.submit(batch(1)).result(WITHIN_S).watermarks[-1] == 1


def test_old_frames_go_and_their_watermark_stays(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(tmp_path, clock, retention_s=100.0) as journal:
        journal.submit(batch(*range(1, 1200))).result(WITHIN_S)
        clock.advance(90)
        journal.submit(batch(1200, received_s=clock.now_s())).result(WITHIN_S)
        clock.advance(90)
        eventually(lambda: journal.dropped_by_retention == 1199)
        assert [recorded.frame.sequence for recorded in replayed(journal, 0.0, 10_000)] == [1200]
        assert journal.submit(batch(1201, received_s=clock.now_s())).result(WITHIN_S).watermarks[-1] == 1201


def test_what_went_in_many_parts_is_known_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unnoted: list[int] = []
    delete_some = Retention._delete_some

    def look_after(self: Retention, now_s: float, oldest_s: float, replay_id: int) -> int:
        deleted = delete_some(self, now_s, oldest_s, replay_id)
        ((noted_id, first_id),) = self._reader.read("SELECT noted_id, (SELECT min(id) FROM chunks) FROM journal", ())
        unnoted.append(max((first_id or 1) - 1 - noted_id, 0))
        return deleted

    monkeypatch.setattr(Retention, "_delete_some", look_after)
    monkeypatch.setattr(journal_module, "DELETE_BATCH", 2)
    clock = FakeClock()
    with opened(tmp_path, clock, retention_s=100.0) as journal:
        for number in range(1, 8):
            journal.submit(batch(number, node=f"n{number % 3}", received_s=clock.now_s())).result(WITHIN_S)
        clock.advance(180)
        for number in range(10, 13):  # streams that are heard are not forgotten
            journal.submit(batch(number, node=f"n{number % 3}", received_s=clock.now_s())).result(WITHIN_S)
        eventually(lambda: journal.dropped_by_retention == 7)
    assert len(unnoted) == 4
    assert not any(unnoted)
    with opened(tmp_path, clock, retention_s=100.0) as again:
        known = [again.submit(batch(number, node=f"n{number % 3}")).result(WITHIN_S).new for number in range(1, 9)]
        assert known == [[False]] * 7 + [[True]]  # the last is one that this node never sent


def test_too_big_a_file_loses_its_oldest_frames(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(tmp_path, clock, retention_bytes=1 << 20, pending_bytes_max=64 << 20) as journal:
        for first in range(1, 6_000, 500):
            journal.submit(batch(*range(first, min(first + 500, 6_000)))).result(WITHIN_S)
        clock.advance(60)
        eventually(lambda: journal.dropped_by_retention >= 500)
        kept = [recorded.frame.sequence for recorded in replayed(journal, 0.0, 10_000)]
        assert kept == list(range(kept[0], 6_000))


def test_a_request_that_was_given_up_does_not_stop_the_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        blocker = sqlite3.connect(tmp_path / "history.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        journal.submit(batch(1))
        eventually(lambda: journal.journal.waiting_bytes == 0)
        assert journal.submit(batch(2)).cancel()
        blocker.execute("ROLLBACK")
        blocker.close()
        assert journal.submit(batch(3)).result(WITHIN_S).new == [True]


def test_closing_makes_durable_what_was_submitted(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        futures = [journal.submit(batch(sequence)) for sequence in range(1, 20)]
    assert all(future.result(0).new == [True] for future in futures)
    with pytest.raises(HistoryUnavailable):
        journal.submit(batch(1))


WRITER = """
import sys
from concurrent.futures import wait
from pathlib import Path
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.history.embedded_history import EmbeddedHistory
from eagle_eye.server.history.journal import Journal
from eagle_eye.server.history.journal import Retention
from tests.server.builders import FakeClock
from tests.server.test_journal import batch

journal = Journal(Path(sys.argv[1]) / "history.db", HistorySettings(), 1 << 24, FakeClock())
sequence = 0
while True:
    futures = [journal.submit(batch(sequence + n)) for n in range(1, 21)]
    for future in futures:
        print(future.result().watermarks[-1], flush=True)
    sequence += 20
"""


def test_a_killed_server_has_everything_that_it_acknowledged(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert writer.stdout is not None
    acknowledged = [int(writer.stdout.readline()) for _ in range(200)]
    writer.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
    writer.stdout.close()
    writer.wait(WITHIN_S)
    with opened(tmp_path) as journal:
        kept = {recorded.frame.sequence for recorded in replayed(journal, 0.0, 1_000_000)}
        assert set(acknowledged) <= kept
        # What was in flight may be there or not; what the agent sends again is recognised either way.
        again = journal.submit(batch(*range(1, max(acknowledged) + 100))).result(WITHIN_S)
        assert again.new.count(False) == len(kept)
