"""The table of downsampled segments, in the journal's file: a row for each window of a group of nodes.

Each row says which sources (raw segments, or windows of minutes) its segment holds: all of its window up to the id
``through_id``. What comes later is read beside it until it is downsampled anew.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from eagle_eye.server.history.segments.facts import any_between, shard_of
from eagle_eye.server.history.segments.levels import LEVEL_OF_NAME, LEVELS, MINUTES, Level, LevelFacts

# ``partial``: sources of it are gone, so that it cannot be made anew. ``adopted``: another history.db made it. A row
# without a name was retired while its sources may still be there: they are not downsampled again, unless it was
# ``lost`` (1), which is when it was found broken. Then -1: it was, and cannot be made again.
TABLE = """
    CREATE TABLE IF NOT EXISTS downsampled (
        id INTEGER PRIMARY KEY AUTOINCREMENT, level TEXT NOT NULL, shard INTEGER NOT NULL, start_s REAL NOT NULL,
        end_s REAL NOT NULL, through_id INTEGER NOT NULL, partial INTEGER NOT NULL, name TEXT, first_node TEXT NOT NULL,
        last_node TEXT NOT NULL, frames INTEGER NOT NULL, present INTEGER NOT NULL, bytes INTEGER NOT NULL,
        adopted INTEGER NOT NULL, lost INTEGER NOT NULL DEFAULT 0, UNIQUE (level, shard, start_s))
"""
INDEX = "CREATE INDEX IF NOT EXISTS downsampled_by_time ON downsampled (start_s)"
COLUMNS = (
    "id, level, shard, start_s, end_s, through_id, partial, name, first_node, last_node, frames, present, adopted, lost"
)


class Window(NamedTuple):
    """A row of the table; ``name`` None: there is no segment any more."""

    id: int
    level: str
    shard: int
    start_s: float
    end_s: float
    through_id: int
    partial: int
    name: str | None
    first_node: str
    last_node: str
    frames: int
    present: int
    adopted: int
    lost: int

    def has(self, begin_s: float) -> bool:
        """Return whether the segment has anything of the bucket that begins then."""
        return bool(self.present >> int((begin_s - self.start_s) // LEVEL_OF_NAME[self.level].bucket_s) & 1)


def holding(reader: sqlite3.Connection, nodes: Sequence[str], start_s: float, end_s: float) -> list[Window]:
    """Return the rows of all levels whose windows overlap the range and may hold the nodes (any if empty)."""
    statement = f"SELECT {COLUMNS} FROM downsampled WHERE start_s <= ? AND start_s > ? AND end_s > ?"  # noqa: S608
    values: tuple[object, ...] = (end_s, start_s - max(level.window_s for level in LEVELS), start_s)
    if nodes:
        # The groups of another history.db are not ours: of what was taken over from one, the names decide.
        own = "SELECT shard FROM nodes WHERE node IN (SELECT value FROM json_each(?))"
        statement += f" AND (adopted OR shard IN ({own}))"
        values = (*values, json.dumps(list(nodes)))
    wanted = sorted(nodes)
    rows = (Window(*row) for row in reader.execute(statement, values))
    return [one for one in rows if not nodes or any_between(wanted, one.first_node, one.last_node)]


def window(reader: sqlite3.Connection, level: Level, shard: int, start_s: float) -> Window | None:
    """Return the row of one window, if there is one."""
    row = reader.execute(
        f"SELECT {COLUMNS} FROM downsampled WHERE level = ? AND shard = ? AND start_s = ?",  # noqa: S608 - a constant
        (level.name, shard, start_s),
    ).fetchone()
    return Window(*row) if row else None


def lost(reader: sqlite3.Connection, level: Level) -> list[Window]:
    """Return the windows whose segments were found broken and are to be made anew."""
    rows = reader.execute(f"SELECT {COLUMNS} FROM downsampled WHERE lost = 1 AND level = ?", (level.name,))  # noqa: S608
    return [Window(*row) for row in rows]


def note_gone(writer: sqlite3.Connection, level: Level, shard: int, id_: int, first_s: float, last_s: float) -> bool:
    """Note that a source of the level's segments goes; return whether they hold what was in it, in part at least.

    What was made of it cannot be made anew.
    """
    marked = writer.execute(
        "UPDATE downsampled SET partial = 1 WHERE level = ? AND shard = ? AND start_s <= ? AND end_s > ?"
        " AND through_id >= ?",
        (level.name, shard, last_s, first_s, id_),
    )
    return marked.rowcount > 0


def forget_nodes(writer: sqlite3.Connection) -> None:
    """Delete the nodes of which the journal has no stream and no level anything, nor of the others of their group.

    Until then a node's row says in which group's segments its past is, and gives it that group again if it comes back.
    """
    levels = " AND ".join(
        f"NOT EXISTS (SELECT 1 FROM downsampled WHERE level = '{level.name}' AND shard = nodes.shard)"  # noqa: S608
        for level in LEVELS
    )
    writer.execute(
        f"DELETE FROM nodes WHERE NOT EXISTS (SELECT 1 FROM streams WHERE node_id = nodes.id) AND {levels}"  # noqa: S608
    )


def raw_sources(reader: sqlite3.Connection, shard: int, start_s: float, end_s: float) -> list[tuple[int, str]]:
    """Return id and name of the group's raw segments that may hold frames of the range, the oldest id first."""
    rows = reader.execute(
        "SELECT id, name FROM segments WHERE last_s >= ? AND first_s < ? AND problem IS NULL ORDER BY id",
        (start_s, end_s),
    )
    return [(id_, name) for id_, name in rows if shard_of(name) == shard]


def level_sources(reader: sqlite3.Connection, shard: int, start_s: float, end_s: float) -> list[Window]:
    """Return the group's windows of minutes in the range, the oldest id first."""
    rows = reader.execute(
        f"SELECT {COLUMNS} FROM downsampled WHERE level = ? AND shard = ? AND start_s >= ? AND start_s < ?"  # noqa: S608
        " ORDER BY id",
        (MINUTES.name, shard, start_s, end_s),
    )
    return [Window(*row) for row in rows]


def insert(
    writer: sqlite3.Connection,
    level: str,
    shard: int,
    start_s: float,
    through_id: int,
    partial: int,
    facts: LevelFacts | None,
    adopted: bool = False,
) -> None:
    """Add a row for the window; without facts there is no segment, since there was nothing for one."""
    told = (
        (facts.name, facts.first_node, facts.last_node, facts.frames, facts.present, facts.bytes)
        if facts is not None
        else (None, "", "", 0, 0, 0)
    )
    end_s = start_s + LEVEL_OF_NAME[level].window_s
    writer.execute(
        "INSERT INTO downsampled (level, shard, start_s, end_s, through_id, partial, name, first_node, last_node,"
        " frames, present, bytes, adopted) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (level, shard, start_s, end_s, through_id, partial, *told, adopted),
    )


def newest(writer: sqlite3.Connection, level: str) -> int:
    """Return the newest id of what the level is made of."""
    table = "segments" if level == MINUTES.name else "downsampled"
    row = writer.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
    return int(row[0]) if row else 0
