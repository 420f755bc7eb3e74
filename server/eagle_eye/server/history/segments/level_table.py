"""The table of minutes, and of hours of earlier versions, in the journal's file: a row for each folder.

A row summarizes the raw segments of its group with ids ``from_id`` to ``through_id`` within its time range: minutes
summarize the segment they were written with; an hour of an earlier version, all segments it was made from.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from eagle_eye.server.history.segments.facts import MINUTES_FOLDER, MinutesFacts, any_between, shard_of

# ``alone``: raw segments that it summarizes are gone, so it answers any step. ``adopted``: made by another history.db.
# ``problem``: why it is no longer read, if it cannot be rebuilt.
TABLE = """
    CREATE TABLE IF NOT EXISTS levels (
        id INTEGER PRIMARY KEY AUTOINCREMENT, level TEXT NOT NULL, name TEXT NOT NULL, shard INTEGER NOT NULL,
        first_node TEXT NOT NULL, last_node TEXT NOT NULL, start_s REAL NOT NULL, end_s REAL NOT NULL,
        from_id INTEGER NOT NULL, through_id INTEGER NOT NULL, alone INTEGER NOT NULL, adopted INTEGER NOT NULL,
        frames INTEGER NOT NULL, bytes INTEGER NOT NULL, problem TEXT, UNIQUE (level, name))
"""
INDEXES = (
    "CREATE INDEX IF NOT EXISTS levels_by_time ON levels (end_s, start_s)",
    "CREATE INDEX IF NOT EXISTS levels_of_shard ON levels (shard, end_s)",
)
# Rows of an earlier version. An hour or a day summarized all raw segments up to the newest it was made from; for hours,
# which were made from minutes, that one is unknown.
MOVE = """
    INSERT OR REPLACE INTO levels (level, name, shard, first_node, last_node, start_s, end_s, from_id, through_id,
        alone, adopted, frames, bytes, problem)
    SELECT level, name, shard, first_node, last_node, start_s, end_s, 0,
        iif(level = '1m', through_id, (SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'segments')),
        level = '1h' OR partial, adopted, frames, bytes, NULL
    FROM downsampled WHERE name IS NOT NULL
"""
COLUMNS = (
    "id, level, name, shard, first_node, last_node, start_s, end_s, from_id, through_id, alone, adopted, frames,"
    " problem"
)


class LevelRow(NamedTuple):
    """A row of the table."""

    id: int
    level: str
    name: str
    shard: int
    first_node: str
    last_node: str
    start_s: float
    end_s: float
    from_id: int
    through_id: int
    alone: int
    adopted: int
    frames: int
    problem: str | None

    @property
    def of_window(self) -> bool:
        """Whether it is an hour or a day of an earlier version, made from all segments up to one."""
        return self.from_id == 0


def move(writer: sqlite3.Connection) -> None:
    """Create the table, with all rows of an earlier version's table."""
    for statement in (TABLE, *INDEXES):
        writer.execute(statement)
    if writer.execute("SELECT 1 FROM sqlite_schema WHERE name = 'downsampled'").fetchone():
        writer.execute("DELETE FROM levels WHERE from_id = 0")  # from before a downgrade to that version
        writer.execute(MOVE)
        writer.execute("DROP TABLE downsampled")


def holding(reader: sqlite3.Connection, nodes: Sequence[str], start_s: float, end_s: float) -> list[LevelRow]:
    """Return the rows, including unreadable ones, that overlap the range and may hold the nodes (any if empty)."""
    statement = f"SELECT {COLUMNS} FROM levels WHERE end_s > ? AND start_s <= ?"  # noqa: S608 - a constant
    values: tuple[object, ...] = (start_s, end_s)
    if nodes:
        # Another history.db has different groups: segments adopted from it are selected by node names.
        own = "SELECT shard FROM nodes WHERE node IN (SELECT value FROM json_each(?))"
        statement += f" AND (adopted OR shard IN ({own}))"
        values = (*values, json.dumps(list(nodes)))
    wanted = sorted(nodes)
    rows = (LevelRow(*row) for row in reader.execute(statement, values))
    return [one for one in rows if not nodes or any_between(wanted, one.first_node, one.last_node)]


def named(reader: sqlite3.Connection, level: str, name: str) -> LevelRow | None:
    """Return the readable row of this name, if there is one."""
    row = reader.execute(
        f"SELECT {COLUMNS} FROM levels WHERE level = ? AND name = ? AND problem IS NULL",  # noqa: S608 - a constant
        (level, name),
    ).fetchone()
    return LevelRow(*row) if row else None


def insert(writer: sqlite3.Connection, facts: MinutesFacts, ids: tuple[int, int], alone: bool, adopted: bool) -> None:
    """Add a row that summarizes the raw segments with these ids, first and last."""
    writer.execute(
        "INSERT OR REPLACE INTO levels (level, name, shard, first_node, last_node, start_s, end_s, from_id, through_id,"
        " alone, adopted, frames, bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(facts.level, facts.name, facts.shard, facts.first_node, facts.last_node, facts.start_s, facts.end_s),
            *(*ids, alone, adopted, facts.frames, facts.bytes),
        ),
    )


def add(writer: sqlite3.Connection, facts: Sequence[MinutesFacts]) -> list[str]:
    """Add the minutes of raw segments that are in the manifest; return the names of those that are not."""
    (journal,) = writer.execute("SELECT id FROM journal").fetchone()
    left = []
    for one in facts:
        row = writer.execute("SELECT id FROM segments WHERE name = ? AND problem IS NULL", (one.name,)).fetchone()
        if row is None:
            left.append(one.name)
        else:
            insert(writer, one, (row[0], row[0]), alone=False, adopted=one.journal != journal)
    return left


def note_gone(writer: sqlite3.Connection, name: str, id_: int, first_s: float, last_s: float) -> bool:
    """Record that a raw segment is retired; return whether a row summarizes at least part of it."""
    marked = writer.execute(
        "UPDATE levels SET alone = 1"
        " WHERE shard = ? AND from_id <= ? AND through_id >= ? AND start_s <= ? AND end_s > ?",
        (shard_of(name), id_, id_, last_s, first_s),
    )
    return marked.rowcount > 0


def without_minutes(reader: sqlite3.Connection, since_s: float) -> list[str]:
    """Return the names of the raw segments since ``since_s`` whose time is not fully covered by minutes."""
    rows = reader.execute(
        "SELECT s.id, s.name, s.first_s, s.last_s FROM segments s LEFT JOIN levels l ON l.level = ? AND l.name = s.name"
        " WHERE s.problem IS NULL AND s.last_s >= ? AND l.id IS NULL ORDER BY s.id",
        (MINUTES_FOLDER, since_s),
    ).fetchall()
    found = []
    for id_, name, first_s, last_s in rows:
        at_s = first_s
        for start_s, end_s in reader.execute(
            "SELECT start_s, end_s FROM levels WHERE level = ? AND shard = ? AND from_id = 0 AND through_id >= ?"
            " AND start_s <= ? AND end_s > ? AND problem IS NULL ORDER BY start_s",
            (MINUTES_FOLDER, shard_of(name), id_, last_s, first_s),
        ):
            at_s = end_s if start_s <= at_s else at_s
        if at_s <= last_s:
            found.append(name)
    return found


def forget_nodes(writer: sqlite3.Connection) -> None:
    """Delete nodes without streams in the journal, and without segments of their group at any level.

    Until then a node's row tells which group's segments hold its past, and puts it back into that group if it returns.
    """
    writer.execute(
        "DELETE FROM nodes WHERE NOT EXISTS (SELECT 1 FROM streams WHERE node_id = nodes.id)"
        " AND shard NOT IN (SELECT shard FROM levels)"
    )
