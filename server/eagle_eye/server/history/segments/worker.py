"""The process that downsamples segments, beside the server and after everybody else.

``python -m eagle_eye.server.history.segments.worker FOLDER`` reads tasks from standard input, a JSON line each,
does one after the other below the history's FOLDER, and answers on standard output. It changes no
manifest: the server does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from eagle_eye.server.history.segments import series
from eagle_eye.server.history.segments.deriving import derive
from eagle_eye.server.history.segments.facts import RAW_FOLDER, Step, no_step
from eagle_eye.server.history.segments.levels import LEVEL_OF_NAME, MINUTES, Book, LevelFacts
from eagle_eye.server.history.segments.processes import settle
from eagle_eye.server.history.segments.reader import BrokenSegment
from eagle_eye.server.history.segments.tasks import Downsample, TaskResult
from eagle_eye.server.model.errors import HistoryUnavailable

NICENESS = 15  # yields also to the compactor, on which the journal's size depends


def perform(folder: Path, task: Downsample, step: Step = no_step) -> TaskResult:
    """Do the task below the history's folder, and return what became of it."""
    try:
        return TaskResult("done", level_facts=_downsample(folder, task, step))
    except BrokenSegment as error:
        return TaskResult("broken", broken=error.segment, reason=f"{error}"[:500])
    except (OSError, pa.ArrowException, HistoryUnavailable, MemoryError) as error:
        return TaskResult("failed", reason=f"{type(error).__name__}: {error}"[:500])


def _downsample(folder: Path, task: Downsample, step: Step) -> LevelFacts | None:
    level = LEVEL_OF_NAME[task.facts.level]
    own = folder / level.name
    book = Book()
    if level is MINUTES:
        parts = derive([folder / RAW_FOLDER / name for name in task.sources], level, task.facts.start_s, book)
        if task.existing is not None:
            parts = series.rolled_up([series.parts_of(own / task.existing, book), parts], level, book, keep=True)
    else:
        sources = [series.parts_of(folder / MINUTES.name / name, book) for name in task.sources]
        if task.existing is not None:
            sources.insert(0, series.parts_of(own / task.existing, book, task.anew_s))
        parts = series.rolled_up(sources, level, book)
    return series.write(own, task.facts, parts, book, step)


def main(arguments: Sequence[str]) -> int:
    """Do what is asked until standard input ends."""
    (folder,) = arguments
    settle(NICENESS)
    decoder = msgspec.json.Decoder(Downsample)
    for line in sys.stdin.buffer:
        answer = perform(Path(folder), decoder.decode(line))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
