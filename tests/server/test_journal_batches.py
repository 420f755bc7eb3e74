"""Rows of one size are kept as frames of many sizes are, whatever comes twice, with gaps, or while the disk fails."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.server.history import journal as journal_module
from eagle_eye.server.history.history import Appended
from eagle_eye.server.history.journal import RANGES_MAX, Journal, JournalStream, Sequences, Touched
from eagle_eye.server.history.journal_reader import Line, directory_lines
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.batch import Batch, StreamRef
from eagle_eye.server.model.errors import HistoryUnavailable
from tests.server.builders import NOW, FakeClock

WITHIN_S = 10.0
ROW_BYTES = 70  # a row's, of some template; the journal looks into none

refs = {node: StreamRef(f"n{node}", "s") for node in range(600)}
said = st.dictionaries(st.integers(0, 5), st.integers(1, 12), max_size=6)  # by node: a sequence


def row(node: int, sequence: int) -> bytes:
    return bytes([2, node % 256, sequence % 256]) + bytes(ROW_BYTES - 3)


def rows_of(sequences: dict[int, int], received_s: float) -> Batch:
    count = len(sequences)
    return Batch(
        [refs[node] for node in sequences],
        np.array(list(sequences.values()), dtype=np.int64),
        np.array([NOW + sequence for sequence in sequences.values()], dtype=np.float64),
        np.full(count, received_s),
        np.full(count, 0.5),
        np.frombuffer(b"".join(row(*item) for item in sequences.items()), np.uint8).reshape(count, ROW_BYTES),
    )


def frames_of(sequences: dict[int, int], received_s: float) -> Batch:
    return Batch.of(
        (StreamRef(f"n{node}", "s"), sequence, NOW + sequence, received_s, 0.5, row(node, sequence))
        for node, sequence in sequences.items()
    )


def opened(folder: Path, pending_bytes_max: int = 1 << 24) -> Journal:
    for ref in refs.values():
        ref.held = None
    return Journal(folder / "history.db", HistorySettings(), pending_bytes_max, FakeClock())


def kept(journal: Journal) -> list[tuple[int, list[Line], bytes]]:
    found = journal.reader.read("SELECT shard, directory, raw FROM chunks ORDER BY id", ())
    return sorted((shard, list(directory_lines(directory)), raw) for shard, directory, raw in found)


def told(journal: Journal) -> list[tuple[str, int, float]]:
    return sorted((one.node, one.watermark, one.heard_s) for one in journal.streams())


@given(st.lists(said, max_size=8))
@settings(max_examples=10)
def test_a_matrix_is_kept_and_answered_as_a_list_is(groups: list[dict[int, int]]) -> None:
    with TemporaryDirectory() as first, TemporaryDirectory() as second:
        by_rows, by_frames = opened(Path(first)), opened(Path(second))
        for number, group in enumerate(one for one in groups if one):
            appended = by_rows.submit(rows_of(group, NOW + number)).result(WITHIN_S)
            assert appended == by_frames.submit(frames_of(group, NOW + number)).result(WITHIN_S)
        assert kept(by_rows) == kept(by_frames)
        assert told(by_rows) == told(by_frames)
        by_rows.close()
        by_frames.close()


def test_watermarks_are_known_after_a_restart(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for sequence in (1, 2, 3):
        journal.submit(rows_of({0: sequence, 1: sequence + 5}, NOW)).result(WITHIN_S)
    journal.close()
    again = opened(tmp_path)
    assert [(one.node, one.watermark) for one in again.streams()] == [("n0", 3), ("n1", 8)]
    assert again.submit(rows_of({0: 3, 1: 9}, NOW)).result(WITHIN_S) == Appended([False, True], [3, 9])
    again.close()


def test_shards_have_chunks_of_their_own_no_larger_than_one_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "CHUNK_BYTES_MAX", 100 * ROW_BYTES)
    journal = opened(tmp_path)
    journal.submit(rows_of(dict.fromkeys(range(600), 1), NOW)).result(WITHIN_S)
    sizes = sorted((shard, len(inside)) for shard, inside, _ in kept(journal))
    assert sizes == [(0, 56), (0, 100), (0, 100), (1, 56), (1, 100), (1, 100), (2, 88)]
    journal.close()


def test_what_could_not_be_written_is_new_when_it_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened(tmp_path)
    journal.submit(rows_of({0: 1, 1: 4}, NOW)).result(WITHIN_S)

    def fails(_writer: sqlite3.Connection, _rows: Sequence[tuple[object, ...]]) -> int:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as broken:
        broken.setattr(journal_module, "insert_chunks", fails)
        for group in ({0: 2, 1: 3, 2: 1}, {0: 9}):
            with pytest.raises(HistoryUnavailable, match="disk I/O error"):
                journal.submit(rows_of(group, NOW + 5)).result(WITHIN_S)
    again = journal.submit(rows_of({0: 2, 1: 3, 2: 1}, NOW + 6)).result(WITHIN_S)
    assert again == Appended([True, True, True], [2, 4, 1])
    assert told(journal) == [("n0", 2, NOW + 6), ("n1", 4, NOW + 6), ("n2", 1, NOW + 6)]
    journal.close()


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=5), min_size=1, max_size=4))
@settings(max_examples=25)
def test_what_is_undone_was_never_there(groups: list[list[int]]) -> None:
    """One stream may have several lines in a batch, in any order."""
    stream = JournalStream(1, 0, Sequences([(2, 3)]), NOW)
    before = stream.sequences.snapshot()
    touched = Touched()
    for group in groups:
        touched.add([stream] * len(group), group, [NOW + 1] * len(group))
    touched.undo()
    assert (stream.sequences.snapshot(), stream.heard_s) == (before, NOW)


@given(st.lists(st.integers(1, 40), max_size=60))
def test_a_set_of_sequences_is_a_set(sequences: list[int]) -> None:
    known, plain = Sequences(), set[int]()
    for sequence in sequences:
        before = known.snapshot()
        assert known.add(sequence) == (sequence not in plain)
        known.restore(before)
        assert Sequences.decode(known.encode()).snapshot() == before
        known.add(sequence)
        plain.add(sequence)
        assert known.highest == max(plain)
    assert {n for first, last in known.snapshot() for n in range(first, last + 1)} == plain


def test_gaps_beyond_the_limit_are_closed_from_below() -> None:
    known = Sequences()
    for sequence in range(1, 2 * RANGES_MAX + 4, 2):
        known.add(sequence)
    assert len(known.snapshot()) == RANGES_MAX
    assert (known.add(2), known.add(2 * RANGES_MAX)) == (False, True)
