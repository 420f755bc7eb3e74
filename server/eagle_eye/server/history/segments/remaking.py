"""Builds missing minutes of raw segments: those of earlier versions, or whose minutes broke.

``python -m eagle_eye.server.history.segments.remaking FOLDER NAME...`` reads these raw segments below the history's
FOLDER and reports what is on disk as JSON lines on standard output. It changes no table: the server does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.server.history.segments.facts import FACTS_FILE, MINUTES_FOLDER, RAW_FOLDER, Facts, Remade, Step, no_step
from eagle_eye.server.history.segments.layout import FRAMES_FILE, LINKS_FILE, SAMPLES_FILE
from eagle_eye.server.history.segments.minutes import MinutesWriter
from eagle_eye.server.history.segments.processes import settle
from eagle_eye.server.history.segments.reader import BrokenSegment, Segment, reading, within
from eagle_eye.server.history.segments.row_tables import Tables
from eagle_eye.server.model.errors import HistoryUnavailable
from eagle_eye.server.telemetry.endings import in_words

NICENESS = 15  # yields also to the compactor, which bounds the journal's size


def remake(folder: Path, name: str, step: Step = no_step) -> Remade:
    """Write the minutes of the raw segment of this name. Raises OSError, ArrowException, HistoryUnavailable."""
    raw = folder / RAW_FOLDER / name
    writer = MinutesWriter(folder / MINUTES_FOLDER, name, step)
    try:
        with reading(name):
            Segment(raw).check_tables()
            facts = msgspec.json.decode((raw / FACTS_FILE).read_bytes(), type=Facts)
            with pq.ParquetFile(raw / FRAMES_FILE, page_checksum_verification=True) as file:
                first = 0
                for number in range(file.metadata.num_row_groups):
                    frames = file.read_row_group(number, columns=["time", "node", "job", "ranks", "raw"])
                    samples, links = (
                        within(Segment(raw).rows(table, None, first, first + len(frames)), first, len(frames))
                        for table in (SAMPLES_FILE, LINKS_FILE)
                    )
                    writer.add(Tables(frames, samples, links), first)
                    first += len(frames)
        return Remade(name, writer.finish(facts))
    except BrokenSegment as error:
        writer.discard()
        return Remade(name, None, f"{error}"[:500])
    except BaseException:
        writer.discard()
        raise


def main(arguments: Sequence[str]) -> int:
    """Build them; return 1 on failure, with the reason on standard error."""
    folder, *names = arguments
    settle(NICENESS)
    try:
        for name in names:
            sys.stdout.buffer.write(msgspec.json.encode(remake(Path(folder), name)) + b"\n")
            sys.stdout.buffer.flush()
    except (OSError, pa.ArrowException, HistoryUnavailable, MemoryError) as error:
        sys.stderr.write(f"{in_words(error)}\n")
        return 1
    return 0


if __name__ == "__main__":
    prepare_record_types()
    sys.exit(main(sys.argv[1:]))
