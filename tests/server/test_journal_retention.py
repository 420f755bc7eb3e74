"""Keeping the journal small in short steps: what comes between them is not forgotten, what is in use stays."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from eagle_eye.server.history import journal
from eagle_eye.server.history.journal import JournalTemplates, Streams, Touched
from eagle_eye.server.history.journal_reader import MIGRATIONS, chunks_of, insert_chunks
from eagle_eye.server.model.batch import StreamRef
from eagle_eye.server.store import database
from tests.server.builders import batch_of

NOW_S = 1_000_000.0
ROUND_S = 30.0


@pytest.fixture
def writer(tmp_path: Path) -> database.DurableConnection:
    connection = database.connect(tmp_path / "history.db")
    database.migrate(connection, MIGRATIONS, tmp_path / "history.db")
    return connection


def write(
    writer: database.DurableConnection, streams: Streams, node: str, sequence: int, received_s: float = NOW_S
) -> None:
    """Have one frame of the node in a chunk, as the journal does."""
    batch, touched = batch_of(node, "s", received_s, 0.0, [(sequence, received_s, b"frame")]), Touched()
    with database.transaction(writer):
        (stream,) = streams.referred(batch.refs, batch.received_s, touched)
        new = touched.add([stream], [sequence], [received_s]).new
        insert_chunks(writer, list(chunks_of(batch, [stream.id], [stream.shard], new, 1 << 20)))
    streams.keep(touched)


def highest(writer: database.DurableConnection, node: str) -> int:
    """Return the stream's highest sequence as a new process learns it."""
    streams, touched = Streams(writer), Touched()
    streams.recover()
    (stream,) = streams.referred([StreamRef(node, "s")], np.array([NOW_S]), touched)
    return stream.sequences.highest


def test_what_comes_while_streams_are_noted_is_known_after_a_restart(
    writer: database.DurableConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "NOTED_AT_ONCE", 1)
    streams = Streams(writer)
    for node in ("n1", "n2", "n3"):
        write(writer, streams, node, 1)
    steps = streams.noting()
    next(steps)
    for node in ("n1", "n2", "n3"):  # the first is noted already, the others are not
        write(writer, streams, node, 2)
    assert len(list(steps)) == 3
    with database.transaction(writer):
        writer.execute("DELETE FROM chunks WHERE id <= ?", (streams.noted_id,))
    assert [highest(writer, node) for node in ("n1", "n2", "n3")] == [2, 2, 2]


def test_a_stream_that_came_back_is_not_forgotten_for_what_its_row_says(writer: database.DurableConnection) -> None:
    streams = Streams(writer)
    write(writer, streams, "gone", 1, received_s=NOW_S - 1_000.0)
    write(writer, streams, "back", 1, received_s=NOW_S - 1_000.0)
    list(streams.noting())
    write(writer, streams, "back", 2, received_s=NOW_S)
    with database.transaction(writer):
        streams.forget(NOW_S - 100.0)
    kept = writer.execute("SELECT n.node FROM streams s JOIN nodes n ON n.id = s.node_id").fetchall()
    assert kept == [("back",)]


def templates_of(writer: database.DurableConnection, ids: list[bytes]) -> tuple[JournalTemplates, list[bytes]]:
    """Return the templates, all written now and in use, and a list of those of which it is said that they are lost."""
    templates, lost = JournalTemplates(writer), list[bytes]()
    templates.listen(lambda: list(ids), lost.extend)
    with database.transaction(writer):
        templates.write(dict.fromkeys(ids, (b"outline", NOW_S)))
    return templates, lost


def test_a_template_in_use_stays_however_long(writer: database.DurableConnection) -> None:
    used = [b"used"]
    templates, lost = templates_of(writer, used)
    for at in range(200):
        list(templates.keeping(NOW_S + ROUND_S * at))
    assert lost == []
    assert writer.execute("SELECT id FROM outlines").fetchall() == [(b"used",)]


def test_a_template_outlives_the_last_chunk_that_may_need_it_and_no_more(writer: database.DurableConnection) -> None:
    used = [b"used"]
    templates, lost = templates_of(writer, used)
    last_s = NOW_S + 3_600.0
    for at in range(121):
        list(templates.keeping(NOW_S + ROUND_S * at))
    used.clear()
    write(writer, Streams(writer), "n1", 1, received_s=last_s)  # a row of it, the last one
    list(templates.keeping(last_s + 86_400.0))
    assert lost == []
    with database.transaction(writer):
        writer.execute("DELETE FROM chunks")
    list(templates.keeping(last_s + 86_400.0 + ROUND_S))
    assert lost == [b"used"]


def test_each_step_writes_few_templates_and_none_that_was_written_lately(
    writer: database.DurableConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "KEPT_AT_ONCE", 2)
    templates, _ = templates_of(writer, [b"%d" % number for number in range(6)])
    written = []
    for at in range(10):
        before = writer.total_changes
        for _ in templates.keeping(NOW_S + ROUND_S * at):
            written.append(writer.total_changes - before)
            before = writer.total_changes
    assert max(written) == 2
    assert sum(written) == 12  # at the beginning and after four minutes


def test_what_could_not_be_written_is_written_in_the_next_round(writer: database.DurableConnection) -> None:
    used = [b"used"]
    templates, _ = templates_of(writer, used)
    writer.execute("PRAGMA query_only = 1")
    with pytest.raises(sqlite3.OperationalError):
        list(templates.keeping(NOW_S + 300.0))
    writer.execute("PRAGMA query_only = 0")
    used.clear()
    list(templates.keeping(NOW_S + 330.0))
    assert writer.execute("SELECT used_s FROM outlines").fetchall() == [(NOW_S + 330.0,)]
