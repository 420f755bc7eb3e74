"""The table of minutes, and of the hours of earlier versions, in the journal's file: a row for each folder.

A row stands for the raw segments of its group with ids ``from_id`` to ``through_id``, as far as they lie in its time:
the minutes that were written with a segment for that one, an hour of an earlier version for all that it was made of.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from eagle_eye.server.history.segments.facts import MINUTES_FOLDER, MinutesFacts, any_between, shard_of

# ``alone``: raw segments that it stands for are gone, so it answers whatever the step. ``adopted``: another history.db
# made it. ``problem``: why it is read no more, where it cannot be made anew.
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
# What an earlier version had. An hour or a day stood for all raw segments up to the newest that it was made of; of
# hours, which were made of minutes, it is not known which that was.
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


class Stored(NamedTuple):
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
        """Whether it is an hour or a day of an earlier version, made of all segments up to one."""
        return self.from_id == 0


def move(writer: sqlite3.Connection) -> None:
    """Have the table, with all that an earlier version had in its own."""
    for statement in (TABLE, *INDEXES):
        writer.execute(statement)
    if writer.execute("SELECT 1 FROM sqlite_schema WHERE name = 'downsampled'").fetchone():
        writer.execute("DELETE FROM levels WHERE from_id = 0")  # known from before that version was gone back to
        writer.execute(MOVE)
        writer.execute("DROP TABLE downsampled")


def holding(reader: sqlite3.Connection, nodes: Sequence[str], start_s: float, end_s: float) -> list[Stored]:
    """Return the rows, also of what is read no more, that overlap the range and may hold the nodes (any if empty)."""
    statement = f"SELECT {COLUMNS} FROM levels WHERE end_s > ? AND start_s <= ?"  # noqa: S608 - a constant
    values: tuple[object, ...] = (start_s, end_s)
    if nodes:
        # The groups of another history.db are not ours: of what was taken over from one, the names decide.
        own = "SELECT shard FROM nodes WHERE node IN (SELECT value FROM json_each(?))"
        statement += f" AND (adopted OR shard IN ({own}))"
        values = (*values, json.dumps(list(nodes)))
    wanted = sorted(nodes)
    rows = (Stored(*row) for row in reader.execute(statement, values))
    return [one for one in rows if not nodes or any_between(wanted, one.first_node, one.last_node)]


def named(reader: sqlite3.Connection, level: str, name: str) -> Stored | None:
    """Return the row of this name that may be read, if there is one."""
    row = reader.execute(
        f"SELECT {COLUMNS} FROM levels WHERE level = ? AND name = ? AND problem IS NULL",  # noqa: S608 - a constant
        (level, name),
    ).fetchone()
    return Stored(*row) if row else None


def insert(writer: sqlite3.Connection, facts: MinutesFacts, ids: tuple[int, int], alone: bool, adopted: bool) -> None:
    """Add a row that stands for the raw segments with these ids, first and last."""
    writer.execute(
        "INSERT OR REPLACE INTO levels (level, name, shard, first_node, last_node, start_s, end_s, from_id, through_id,"
        " alone, adopted, frames, bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            *(facts.level, facts.name, facts.shard, facts.first_node, facts.last_node, facts.start_s, facts.end_s),
            *(*ids, alone, adopted, facts.frames, facts.bytes),
        ),
    )


def add(writer: sqlite3.Connection, facts: Sequence[MinutesFacts]) -> list[str]:
    """Add the minutes of raw segments that the manifest has; return the names of those that it has not."""
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
    """Note that a raw segment goes; return whether what was in it is in a row, in part at least."""
    marked = writer.execute(
        "UPDATE levels SET alone = 1"
        " WHERE shard = ? AND from_id <= ? AND through_id >= ? AND start_s <= ? AND end_s > ?",
        (shard_of(name), id_, id_, last_s, first_s),
    )
    return marked.rowcount > 0


def without_minutes(reader: sqlite3.Connection, since_s: float) -> list[str]:
    """Return the names of the raw segments, those of ``since_s`` and later, of whose time no minutes have all."""
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
    """Delete the nodes of which the journal has no stream and no level anything, nor of the others of their group.

    Until then a node's row says in which group's segments its past is, and gives it that group again if it comes back.
    """
    writer.execute(
        "DELETE FROM nodes WHERE NOT EXISTS (SELECT 1 FROM streams WHERE node_id = nodes.id)"
        " AND shard NOT IN (SELECT shard FROM levels)"
    )
