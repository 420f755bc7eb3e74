"""How far the history has been sent, in a file that only the sender writes.

Killing the process loses nothing. After a power cut it may be a few requests behind; these are sent again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from eagle_eye.server.history.remote_store.sender_messages import Order
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store import database

FILE = "remote-store.db"
_MIGRATIONS = (
    """
    CREATE TABLE position (one INTEGER PRIMARY KEY CHECK (one = 1), record TEXT NOT NULL);
    CREATE TABLE sent (name TEXT PRIMARY KEY) WITHOUT ROWID;
    """,
)


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """All segments up to number ``segment`` are sent, and the first ``moments`` moments of the one named ``partial``.

    Valid for the store at ``url``, the history of ``journal`` and requests split as in ``cut``.
    """

    url: str
    journal: str
    segment: int = 0
    partial: str = ""
    moments: int = 0
    cut: str = ""


class HistoryMark(NamedTuple):
    """Identifies a history: its journal's id, and the highest segment number it ever had."""

    journal: str
    newest: int


def mark_of(reader: sqlite3.Connection) -> HistoryMark:
    """Return which history the file of a connection holds."""
    row = reader.execute(
        "SELECT id, coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'segments'), 0) FROM journal"
    ).fetchone()
    return HistoryMark(*row)


def begin(kept: Position | None, order: Order, history: HistoryMark) -> Position:
    """Return where to continue: at the oldest segment for another store, or another or an earlier history."""
    if kept is None or (kept.url, kept.journal) != (order.url, history.journal) or kept.segment > history.newest:
        return Position(url=order.url, journal=history.journal, cut=order.cut())
    if kept.cut != order.cut():
        return msgspec.structs.replace(kept, partial="", moments=0)
    return kept


class PositionFile:
    """The position file. Raises StoreUnavailable from every method when it cannot be read or written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._connection = database.connect(self._path)
        database.migrate(self._connection, _MIGRATIONS, self._path)
        self._connection.execute(
            "PRAGMA synchronous = NORMAL"
        )  # repeating a request is cheaper than waiting for a disk

    def read(self) -> Position | None:
        """Return the last position kept; None if nothing was ever sent."""
        try:
            row = self._connection.execute("SELECT record FROM position").fetchone()
            return msgspec.json.decode(row[0], type=Position) if row else None
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise StoreUnavailable(f"{self._path} cannot be read: {error}") from error

    def keep(self, position: Position, sent: str = "") -> None:
        """Keep a position; ``sent`` is the name of a segment now sent completely."""
        self._change(
            (
                "INSERT OR REPLACE INTO position (one, record) VALUES (1, ?)",
                (msgspec.json.encode(position).decode(),),
            ),
            *([("INSERT OR IGNORE INTO sent (name) VALUES (?)", (sent,))] if sent else []),
        )

    def unsent(self, names: Sequence[str]) -> int:
        """Return how many of the segments were never sent completely."""
        try:
            known = sum(
                bool(self._connection.execute("SELECT 1 FROM sent WHERE name = ?", (name,)).fetchone())
                for name in names
            )
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._path} cannot be read: {error}") from error
        return len(names) - known

    def forget(self, but: Sequence[str]) -> None:
        """Forget the names of segments that are not in ``but``."""
        text = msgspec.json.encode(list(but)).decode()
        self._change(("DELETE FROM sent WHERE name NOT IN (SELECT value FROM json_each(?))", (text,)))

    def _change(self, *statements: tuple[str, tuple[str, ...]]) -> None:
        try:
            with database.transaction(self._connection):
                for statement, values in statements:
                    self._connection.execute(statement, values)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._path} cannot be written: {error}") from error

    def close(self) -> None:
        """Release the file."""
        self._connection.close()
