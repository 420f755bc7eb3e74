"""The compactor: writes sealed stretches of the journal as segments, in a process of its own.

``python -m eagle_eye.server.history.segments.compactor JOURNAL FOLDER THROUGH [SHARD...]`` compacts the chunks of these
node groups (default: all) that are in no segment yet, up to chunk THROUGH, group by group, and reports what is on disk
as JSON lines on standard output. It does not change the journal: the server does, line by line. As a separate process
it takes no CPU core from clients waiting for the server.
"""

from __future__ import annotations

import shutil
import sqlite3
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import msgspec
import pyarrow as pa

from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.server.history.journal_schema import UNSEALED
from eagle_eye.server.history.segments.facts import (
    MINUTES_FOLDER,
    STRETCH_BYTES_MAX,
    Facts,
    MinutesFacts,
    Sealed,
    Step,
    no_step,
)
from eagle_eye.server.history.segments.gathering import Gathered, Gatherer
from eagle_eye.server.history.segments.group_tables import GroupTables
from eagle_eye.server.history.segments.minutes import MinutesWriter
from eagle_eye.server.history.segments.processes import settle
from eagle_eye.server.history.segments.row_tables import Tables
from eagle_eye.server.history.segments.writer import SegmentWriter
from eagle_eye.server.telemetry.endings import in_words

NICENESS = 10  # yields to the server and all other processes
BUSY_S = 5.0


class _Stretch(NamedTuple):
    shard: int
    chunks: list[int]
    size: int  # of their frames, in bytes


def compact(
    journal: Path,
    folder: Path,
    through: int,
    done: Callable[[Sealed], None],
    step: Step = no_step,
    shards: Sequence[int] = (),
) -> None:
    """Write the segments of the groups' stretches (all if empty) up to chunk ``through``.

    ``done`` is called with each stretch once it is on disk.
    """
    connection = sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        (journal_id,) = connection.execute("SELECT id FROM journal").fetchone()
        tables_of = GroupTables(connection).of
        gatherer = Gatherer(connection)
        for stretch in _stretches(connection, through):
            if shards and stretch.shard not in shards:
                continue
            late, timely = gatherer.gather(*stretch)
            written = [
                _write(folder, journal_id, stretch, frames, frames is late, tables_of, step)
                for frames in (timely, late)
                if frames.frames
            ]
            done(Sealed(stretch.shard, stretch.chunks[-1], [raw for raw, _ in written], [own for _, own in written]))
            step("announced")
    finally:
        connection.close()


def _stretches(connection: sqlite3.Connection, through: int) -> list[_Stretch]:
    found: list[_Stretch] = []
    rows = connection.execute(
        f"SELECT shard, id, size FROM ({UNSEALED}) WHERE id <= ? ORDER BY shard, id",  # noqa: S608 - a constant
        (through,),
    )
    for shard, chunk, bytes_ in rows:
        if not found or found[-1].shard != shard or found[-1].size + bytes_ > STRETCH_BYTES_MAX:
            found.append(_Stretch(shard, [], 0))
        found[-1] = found[-1]._replace(size=found[-1].size + bytes_)
        found[-1].chunks.append(chunk)
    return found


def _write(
    folder: Path,
    journal_id: str,
    stretch: _Stretch,
    frames: Gathered,
    late: bool,
    tables_of: Callable[[Gathered, int], Tables],
    step: Step,
) -> tuple[Facts, MinutesFacts]:
    first_s = float(frames.time_s.min())
    facts = Facts(
        name=f"{int(first_s)}-{stretch.shard}-{token_hex(4)}",
        journal=journal_id,
        shard=stretch.shard,
        first_chunk=stretch.chunks[0],
        last_chunk=stretch.chunks[-1],
        late=late,
        first_node=frames.names[int(frames.node[0])],
        last_node=frames.names[int(frames.node[-1])],
        first_s=first_s,
        last_s=float(frames.time_s.max()),
        received_s=float(frames.received_s.max()),
        frames=frames.frames,
        bytes=0,
    )
    writer = SegmentWriter(folder, facts.name, step, tables_of(frames.sample(), 0))
    minutes = MinutesWriter(folder.parent / MINUTES_FOLDER, facts.name, step)
    try:
        for first, group in frames.groups():
            tables = tables_of(group, first)
            writer.write(tables)
            minutes.add(tables, first)
        return writer.finish(facts), minutes.finish(facts)
    except BaseException:
        writer.discard()
        minutes.discard()
        shutil.rmtree(folder / facts.name, ignore_errors=True)  # written, but its minutes could not be
        raise


def main(arguments: Sequence[str]) -> int:
    """Compact; return 0 when nothing is left, 1 on failure, with the reason on standard error."""
    journal, folder, through, *shards = arguments
    settle(NICENESS)

    def tell(sealed: Sealed) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(sealed) + b"\n")
        sys.stdout.buffer.flush()

    try:
        compact(Path(journal), Path(folder), int(through), tell, shards=[int(shard) for shard in shards])
    except (OSError, sqlite3.Error, pa.ArrowException) as error:
        sys.stderr.write(f"{in_words(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    prepare_record_types()
    sys.exit(main(sys.argv[1:]))
