"""Raw segments without minutes get them beside the server: killed at whatever step, nothing is lost or doubled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_eye.schema.metrics import BY_NAME
from eagle_eye.server.history.embedded_history import Compaction, EmbeddedHistory
from eagle_eye.server.history.history import BucketSeries, Run
from eagle_eye.server.history.segment_tables import MINUTES_FOLDER
from eagle_eye.server.model.errors import HistoryUnavailable
from tests.server.builders import NOW, FakeClock
from tests.server.segments.kept import FOREVER_S, WITHIN_S, batch, compact, opened, remake, rich, told

DAY_S = 86_400
LATER = NOW + 3 * DAY_S

# A fork a step, each killed one step later than the one before. What it finds is there for all of them.
KILLED = """
import os, sys
from pathlib import Path
from tests.server.segments import test_remaking

for number in test_remaking.STEPS:
    child = os.fork()
    if child == 0:
        test_remaking.killed_at(Path(sys.argv[1]), number)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


# Of a segment that is written (drafted, its tables closed, synced, renamed, durable) and put in its place (heard of,
# put) those between which anything differs.
STEPS = (0, 2, 3, 5, 6)


def filled(history: EmbeddedHistory, segments: int = 3) -> None:
    """Have some segments of two nodes, the last of what came late, and the next day."""
    for at in [*range(1, segments), 0]:
        for node in ("n1", "n2"):
            raws = [rich(10 * at + n, node) for n in (1, 2)]
            history.submit(batch(raws, NOW + 10 * segments)).result(WITHIN_S)
        compact(history)


def without_minutes(history: EmbeddedHistory) -> None:
    """Have no minutes, as if an earlier version had written the segments."""
    history.journal.change(lambda writer: writer.execute("DELETE FROM levels")).result(WITHIN_S)
    shutil.rmtree(history.segment_store.levels.folder(MINUTES_FOLDER))
    history.segment_store.levels.folder(MINUTES_FOLDER).mkdir()


def courses(history: EmbeddedHistory) -> object:
    """Return how many values a query by minutes sees of each series, and their sum."""
    found: dict[object, list[float]] = {}
    for name in ("gpu_power_watts", "link_errors_total"):
        with history.courses(BY_NAME[name], [], 0.0, FOREVER_S, None, 60.0, 10**9) as reading:
            assert not any(isinstance(course, Run) for course in reading.courses)
        with history.courses(BY_NAME[name], [], 0.0, FOREVER_S, None, 60.0, 10**9) as reading:
            for one in reading.courses:
                assert isinstance(one, BucketSeries)
                sums = found.setdefault((name, one.node, one.key), [0.0, 0.0])
                sums[0] += float(one.summary.counts.sum())
                sums[1] += float(one.summary.last.sum())
    return found


def killed_at(root: Path, number: int) -> None:
    """Do what is due in a copy of the folder, and die at the step of this number."""
    left = [number]

    def step(_name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), 9)

    shutil.copytree(root / "whole", root / f"killed-{number}")
    with opened(root / f"killed-{number}", FakeClock(LATER)) as history:
        remake(history, step)


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_step_leaves_each_frame_once(tmp_path: Path) -> None:
    with opened(tmp_path / "whole") as history:
        filled(history)
        expected, seen = told(history), courses(history)
        without_minutes(history)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["-9"] * len(STEPS)
    for path in sorted(tmp_path.glob("killed-*")):
        with opened(path, FakeClock(LATER)) as history:
            assert told(history) == expected
            remake(history)
            assert (told(history), courses(history)) == (expected, seen)
            for level, table in (("raw", "segments"), ("1m", "levels")):
                named = {name for (name,) in history.journal.reader.read(f"SELECT name FROM {table}", ())}
                assert {folder.name for folder in (path / "history" / level).iterdir()} == named
            assert history.segment_store.size()[0] == 3


def test_who_reads_while_segments_are_retired_reads_on(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        filled(history)
        expected = told(history)
        reading = history.query([], 0.0, FOREVER_S)
        first = next(reading)
        history.segment_store.retain(NOW + 30 * DAY_S)
        assert len(list(history.segment_store.folder.iterdir())) == 3
        assert len([first, *reading]) == len(expected)
        assert len(list(history.segment_store.folder.iterdir())) == 0


def test_who_reads_for_too_long_is_told_so(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(tmp_path, clock) as history:
        filled(history)
        reading = history.query([], 0.0, FOREVER_S)
        next(reading)
        history.segment_store.retain(NOW + 30 * DAY_S)
        clock.advance(3_601)
        history.segment_store.retain(clock.now_s())
        with pytest.raises(HistoryUnavailable, match="took more than 3600 s"):
            list(reading)
        assert history.segment_store.set_aside_total == 0


def test_the_process_makes_them_beside_the_server(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        filled(history)
        seen = courses(history)
        without_minutes(history)
    with opened(tmp_path) as history:
        history.compaction.compact_if_due()
        assert history.compaction.failures == 0
        assert courses(history) == seen
        assert remake(history) == 0


def test_a_process_that_fails_is_counted_and_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as history:
        filled(history)
        expected = told(history)
        without_minutes(history)
    with opened(tmp_path) as history:
        command = (sys.executable, "-S", "-c", "import sys; sys.exit('no room')")
        settings, clock = history.compaction._settings, history.compaction._clock
        failing = Compaction(history.journal, history.segment_store, settings, clock, command)
        failing.compact_if_due()
        assert failing.failures == 1
        assert "no room" in caplog.text
        assert told(history) == expected
