"""The compactor: sealed stretches of the journal into segments, in a process of its own.

``python -m eagle_eye.server.segments.compactor JOURNAL FOLDER THROUGH`` writes what no segment holds yet, up to chunk
THROUGH, shard by shard, and says on standard output, a JSON line each, what is on the disk. It changes nothing in the
journal: the server does, line by line. Beside the server it shares a core with nobody who waits for it.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import msgspec
import pyarrow as pa

from eagle_eye.server.history import LATE_S
from eagle_eye.server.journal_chunks import lines
from eagle_eye.server.journal_schema import UNSEALED
from eagle_eye.server.segments.columns import Columns, Kept
from eagle_eye.server.segments.facts import Facts, Sealed, Step, no_step
from eagle_eye.server.segments.writer import SegmentWriter

STRETCH_BYTES_MAX = 128 << 20  # of encoded frames that are sorted in memory at once; more become several segments
GROUP_FRAMES = 2_048  # frames of a row group: what a query of one node reads at least
NICENESS = 10  # yields to the server and to everybody else
BUSY_S = 5.0


class _Stretch(NamedTuple):
    shard: int
    chunks: list[int]


def compact(journal: Path, folder: Path, through: int, done: Callable[[Sealed], None], step: Step = no_step) -> None:
    """Write the segments of all stretches up to chunk ``through``; ``done`` is told of each stretch on the disk."""
    connection = sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=BUSY_S, isolation_level=None)
    try:
        (journal_id,) = connection.execute("SELECT id FROM journal").fetchone()
        for stretch in _stretches(connection, through):
            late, timely = _read(connection, stretch)
            facts = [
                _write(folder, journal_id, stretch, frames, frames is late, step) for frames in (timely, late) if frames
            ]
            done(Sealed(stretch.shard, stretch.chunks[-1], facts))
            step("told")
    finally:
        connection.close()


def _stretches(connection: sqlite3.Connection, through: int) -> list[_Stretch]:
    found: list[_Stretch] = []
    size = 0
    rows = connection.execute(
        f"SELECT shard, id, size FROM ({UNSEALED}) WHERE id <= ? ORDER BY shard, id",  # noqa: S608 - a constant
        (through,),
    )
    for shard, chunk, bytes_ in rows:
        if not found or found[-1].shard != shard or size + bytes_ > STRETCH_BYTES_MAX:
            found.append(_Stretch(shard, []))
            size = 0
        found[-1].chunks.append(chunk)
        size += bytes_
    return found


def _read(connection: sqlite3.Connection, stretch: _Stretch) -> tuple[list[Kept], list[Kept]]:
    """Return the stretch's frames, the late apart from the others, each by node and then by time.

    Late ones are an outage's; among the others they would make every segment look as long as the outage.
    """
    names = {
        id_: (node, stream)
        for id_, node, stream in connection.execute(
            "SELECT s.id, n.node, s.stream FROM streams s JOIN nodes n ON n.id = s.node_id WHERE n.shard = ?",
            (stretch.shard,),
        )
    }
    late: list[Kept] = []
    timely: list[Kept] = []
    begin_s: float | None = None
    for chunk in stretch.chunks:
        row = connection.execute("SELECT directory, raw FROM chunks WHERE id = ?", (chunk,)).fetchone()
        directory, raw = row or (b"", b"")  # None: retention was faster
        view = memoryview(raw)
        for line in lines(directory):
            begin_s = line.received_s if begin_s is None else begin_s
            if line.stream_id not in names:  # not heard of for so long that it was forgotten
                continue
            node, stream = names[line.stream_id]
            kept = Kept(
                node,
                line.time_s,
                stream,
                line.sequence,
                line.received_s,
                line.offset_s,
                view[line.at : line.at + line.size],
            )
            (late if line.time_s < begin_s - LATE_S else timely).append(kept)
    return sorted(late), sorted(timely)


def _write(folder: Path, journal_id: str, stretch: _Stretch, frames: Sequence[Kept], late: bool, step: Step) -> Facts:
    first_s = min(frame.time_s for frame in frames)
    facts = Facts(
        name=f"{int(first_s)}-{stretch.shard}-{token_hex(4)}",
        journal=journal_id,
        shard=stretch.shard,
        first_chunk=stretch.chunks[0],
        last_chunk=stretch.chunks[-1],
        late=late,
        first_node=frames[0].node,
        last_node=frames[-1].node,
        first_s=first_s,
        last_s=max(frame.time_s for frame in frames),
        received_s=max(frame.received_s for frame in frames),
        frames=len(frames),
        bytes=0,
    )
    writer = SegmentWriter(folder, facts.name, step)
    try:
        columns = Columns()
        for first, group in _groups(frames):
            writer.write(columns.tables(group, first))
        return writer.finish(facts)
    except BaseException:
        writer.discard()
        raise


def _groups(frames: Sequence[Kept]) -> Iterator[tuple[int, Sequence[Kept]]]:
    """Yield the frames of whole nodes together, as many as a row group takes; only a node alone is divided."""
    first = 0
    while first < len(frames):
        end = min(first + GROUP_FRAMES, len(frames))
        if end < len(frames):
            node = frames[end].node
            begin = end
            while begin > first and frames[begin - 1].node == node:
                begin -= 1
            end = begin if begin > first else end
        yield first, frames[first:end]
        first = end


def main(arguments: Sequence[str]) -> int:
    """Compact; 0 when nothing is left, 1 when it failed, with the reason on standard error."""
    journal, folder, through = arguments
    os.nice(NICENESS)
    pa.set_cpu_count(1)
    server = os.getppid()

    def while_wanted(_step: str) -> None:
        # A server that was started anew has swept the folder and looks for nothing more to appear in it.
        if os.getppid() != server:
            raise SystemExit(1)

    def tell(sealed: Sealed) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(sealed) + b"\n")
        sys.stdout.buffer.flush()

    try:
        compact(Path(journal), Path(folder), int(through), tell, while_wanted)
    except (OSError, sqlite3.Error, pa.ArrowException) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
