"""Slowly reads all of the server's databases and segments beside it, to find damage before the data is needed.

``python -m eagle_eye.server.admin.integrity DATA`` reads in a low-priority process of its own, and reports damage as
JSON lines on standard output. It reads in short transactions, so that the write-ahead logs stay short. The server
starts it a while after its own start, and then daily.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.server.admin import damage
from eagle_eye.server.history.embedded_history import HISTORY_FILE, HISTORY_FOLDER, EmbeddedHistory
from eagle_eye.server.history.processes import end_with_parent, environment
from eagle_eye.server.history.segment_tables import RAW_FOLDER
from eagle_eye.server.model.errors import HistoryUnavailable
from eagle_eye.server.store.database import tells_damage
from eagle_eye.server.store.factory import RECORDS_FILE
from eagle_eye.server.store.sql_store import SqlStore
from eagle_eye.server.telemetry.endings import how_it_ended, in_words

AFTER_S, EVERY_S = 60.0, 86_400.0
NICENESS = 19
SHARE = 0.1  # of a core and of the disk's throughput: it sleeps the rest of the time
ROWS_AT_ONCE = 8  # rows of frames have some MiB each
STRUCTURE_BYTES_MAX = 1 << 30  # of a file whose structure is checked in one transaction, which takes seconds

_log = logging.getLogger(__name__)


class IntegrityProblem(msgspec.Struct, frozen=True):
    """Damage of a database, or of a segment in a folder of the history."""

    problem: str
    database: str = ""
    folder: str = ""
    segment: str = ""


Rest = Callable[[], None]


def findings(data: Path, rest: Rest) -> Iterator[IntegrityProblem]:
    """Yield the damage; ``rest`` is called between pieces of work. Raises sqlite3.Error, OSError."""
    for name in damage.DATABASES:
        if (data / name).exists():
            problem = _of_database(data / name, rest)
            if problem is not None:
                yield IntegrityProblem(problem, database=name)
    yield from _of_segments(data, rest)


def _of_database(path: Path, rest: Rest) -> str | None:
    try:
        with closing(_reader(path)) as reader:
            tables = [name for (name,) in reader.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
            for table in sorted(tables):
                at: int | None = -(1 << 62)
                while at is not None:
                    at = _read_some(reader, table, at)
                    rest()
            if path.stat().st_size <= STRUCTURE_BYTES_MAX:
                return damage.whole(reader, path.name)
    except sqlite3.Error as error:
        if not tells_damage(error):
            raise
        return str(error)
    return None


def _read_some(reader: sqlite3.Connection, table: str, after: int) -> int | None:
    """Read some rows completely; return the last one's id, None if there are no more."""
    statement = f'SELECT rowid, * FROM "{table}" WHERE rowid > ? ORDER BY rowid LIMIT ?'  # noqa: S608 - of the schema
    last = None
    for row in reader.execute(statement, (after, ROWS_AT_ONCE if table == "chunks" else 100 * ROWS_AT_ONCE)):
        last = int(row[0])
    return last


def _of_segments(data: Path, rest: Rest) -> Iterator[IntegrityProblem]:
    import pyarrow.parquet as pq

    from eagle_eye.server.history.segment_files import BrokenSegment, Segment, reading

    for folder, name in _named(data / HISTORY_FILE):
        path = data / HISTORY_FOLDER / folder / name
        try:
            Segment(path).check_tables()
            with reading(name):
                for table in sorted(path.glob("*.parquet")):
                    with pq.ParquetFile(table, page_checksum_verification=True) as file:
                        for group in range(file.num_row_groups):
                            file.read_row_group(group, use_threads=False)
                            rest()
        except BrokenSegment as error:
            yield IntegrityProblem(str(error)[:500], folder=folder, segment=name)
        except HistoryUnavailable:
            continue  # not the segment's fault; checked again tomorrow


def _named(path: Path) -> list[tuple[str, str]]:
    """Return folder and name of each segment that the history knows; [] and a report if that cannot be read."""
    try:
        with closing(_reader(path)) as reader:
            raw = reader.execute("SELECT ?, name FROM segments WHERE problem IS NULL", (RAW_FOLDER,)).fetchall()
            return raw + reader.execute("SELECT level, name FROM levels WHERE problem IS NULL").fetchall()
    except sqlite3.Error as error:
        if not tells_damage(error):
            raise
        return []


def _reader(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0, isolation_level=None)


class Integrity:
    """Runs the check beside a server, and reports its findings to the affected components."""

    def __init__(self, data: Path, store: SqlStore, history: EmbeddedHistory) -> None:
        self._data = data
        self._store = store
        self._history = history

    async def run(self, after_s: float = AFTER_S) -> None:
        """Check after ``after_s``, and then daily, until cancelled."""
        while True:
            await asyncio.sleep(after_s)
            after_s = EVERY_S
            await self.check()

    async def check(self) -> None:
        """Check once; findings are noted immediately."""
        command = [sys.executable, "-m", __name__, str(self._data)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment())
        assert process.stdout is not None  # noqa: S101 - for the type checker
        assert process.stderr is not None  # noqa: S101
        try:
            async for line in process.stdout:
                await asyncio.to_thread(self.note, msgspec.json.decode(line, type=IntegrityProblem))
            said = (await process.stderr.read(2_000)).decode(errors="replace").strip()
            if (code := await process.wait()) != 0:
                _log.warning("the check of the files failed and is repeated tomorrow: it %s", how_it_ended(code, said))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def note(self, found: IntegrityProblem) -> None:
        """Apply a finding: a damaged database makes the server unready, a damaged segment is set aside."""
        if found.database == RECORDS_FILE:
            if self._store.where == str(self._data / RECORDS_FILE):  # else they have moved, and this file was left
                self._store.note_damage(found.problem)
        elif found.database == HISTORY_FILE:
            self._history.journal.note_damage(found.problem)
        else:
            try:
                self._history.set_aside(found.folder, found.segment, found.problem)
            except HistoryUnavailable as error:
                _log.warning("segment %s is damaged and cannot be set aside: %s", found.segment, error)


def main(arguments: Sequence[str]) -> int:
    """Read everything; return 1 when that was not possible, with the reason on standard error."""
    end_with_parent()
    os.nice(NICENESS)
    data = Path(arguments[0])
    woke_s = time.monotonic()

    def rest() -> None:
        nonlocal woke_s
        time.sleep((time.monotonic() - woke_s) * (1 - SHARE) / SHARE)
        woke_s = time.monotonic()

    try:
        for found in findings(data, rest):
            sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
            sys.stdout.buffer.flush()
    except (sqlite3.Error, OSError) as error:
        sys.stderr.write(f"{in_words(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    prepare_record_types()
    sys.exit(main(sys.argv[1:]))
