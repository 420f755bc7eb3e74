"""The tables of history.db: the journal's chunks, and the manifest of the segments made from them."""

from __future__ import annotations

import sqlite3

# ``streams.sequences`` covers the chunks up to ``noted_id``. ``sealed_id`` of a shard is the last chunk that is in
# segments: chunks and the segments that hold their frames change places in one transaction, so that readers find each
# frame in exactly one of them. ``outlines`` has the templates of the rows in chunks; ``used_s``, some minutes stale, is
# when a row of one last arrived.
MIGRATIONS = (
    """
    CREATE TABLE streams (
        id INTEGER PRIMARY KEY, node TEXT NOT NULL, stream TEXT NOT NULL,
        watermark INTEGER NOT NULL, heard_s REAL NOT NULL, UNIQUE (node, stream));
    CREATE TABLE frames (
        id INTEGER PRIMARY KEY AUTOINCREMENT, stream_id INTEGER NOT NULL, sequence INTEGER NOT NULL,
        received_s REAL NOT NULL, time_s REAL NOT NULL, offset_s REAL NOT NULL, raw BLOB NOT NULL);
    """,
    """
    ALTER TABLE streams RENAME TO earlier_streams;
    ALTER TABLE frames RENAME TO earlier_frames;
    CREATE TABLE journal (id TEXT NOT NULL, noted_id INTEGER NOT NULL);
    INSERT INTO journal (id, noted_id) VALUES (lower(hex(randomblob(8))), 0);
    CREATE TABLE nodes (id INTEGER PRIMARY KEY, node TEXT NOT NULL UNIQUE, shard INTEGER NOT NULL);
    CREATE INDEX nodes_of_shard ON nodes (shard);
    CREATE TABLE streams (
        id INTEGER PRIMARY KEY, node_id INTEGER NOT NULL, stream TEXT NOT NULL,
        sequences BLOB NOT NULL, heard_s REAL NOT NULL, UNIQUE (node_id, stream));
    CREATE TABLE chunks (
        id INTEGER PRIMARY KEY AUTOINCREMENT, shard INTEGER NOT NULL, frames INTEGER NOT NULL, size INTEGER NOT NULL,
        received_s REAL NOT NULL, first_s REAL NOT NULL, last_s REAL NOT NULL,
        directory BLOB NOT NULL, raw BLOB NOT NULL);
    CREATE INDEX chunks_of_shard ON chunks (shard, id, frames, size, received_s, first_s, last_s);
    CREATE TABLE shards (shard INTEGER PRIMARY KEY, sealed_id INTEGER NOT NULL);
    CREATE TABLE segments (
        id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, first_node TEXT NOT NULL,
        last_node TEXT NOT NULL, first_s REAL NOT NULL, last_s REAL NOT NULL, received_s REAL NOT NULL,
        frames INTEGER NOT NULL, bytes INTEGER NOT NULL, problem TEXT);
    CREATE INDEX segments_by_time ON segments (last_s, first_s);
    """,
    """
    CREATE TABLE outlines (id BLOB PRIMARY KEY, raw BLOB NOT NULL, used_s REAL NOT NULL);
    """,
)

# Chunks that are in no segment yet; answered by the index alone, without reading frames.
UNSEALED = (
    "SELECT c.id, c.shard, c.frames, c.size, c.received_s, c.first_s, c.last_s FROM chunks c"
    " LEFT JOIN shards s ON s.shard = c.shard WHERE c.id > coalesce(s.sealed_id, 0)"
)

# When the oldest of them was received, looking only at each shard's first, as ids ascend with receipt. ``UNSEALED``
# would look at each of a large fleet's hundred thousand chunks.
OLDEST_UNSEALED = (
    "SELECT min(received_s) FROM (SELECT (SELECT c.received_s FROM chunks c WHERE c.shard = n.shard"
    " AND c.id > coalesce(s.sealed_id, 0) ORDER BY c.id LIMIT 1) AS received_s"
    " FROM (SELECT DISTINCT shard FROM nodes) n LEFT JOIN shards s ON s.shard = n.shard)"
)

# How much of the file is in use: an upper bound for the frames in no segment.
BYTES_IN_USE = (
    "SELECT (p.page_count - f.freelist_count) * s.page_size"
    " FROM pragma_page_count p, pragma_freelist_count f, pragma_page_size s"
)


def live_bytes(connection: sqlite3.Connection) -> int:
    """Return how many bytes of the file are in use, without free pages, which are reused."""
    return int(connection.execute(BYTES_IN_USE).fetchone()[0])
