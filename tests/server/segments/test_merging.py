"""Small segments become one: the same frames, found as fast, at whatever step the process is killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from eagle_eye.schema.metrics import BY_NAME
from eagle_eye.server.history.embedded_history import HISTORY_FILE, EmbeddedHistory
from eagle_eye.server.history.history import Run
from eagle_eye.server.history.segments import planning, worker
from eagle_eye.server.history.segments.downsampling import BucketSeries
from eagle_eye.server.history.segments.merging import GROUP_FRAMES
from eagle_eye.server.history.segments.planning import SourceSegment, merges
from eagle_eye.server.history.segments.tasks import Merge, TaskResult
from eagle_eye.server.history.segments.upkeep import Upkeep
from eagle_eye.server.model.errors import HistoryUnavailable
from tests.server.builders import NOW, FakeClock
from tests.server.segments.kept import FOREVER_S, WITHIN_S, batch, compact, keep_up, opened, rich, told

DAY_S = 86_400
LATER = NOW + 3 * DAY_S

# A fork a step, each killed one step later than the one before. What it finds is there for all of them.
KILLED = """
import os, sys
from pathlib import Path
from tests.server.segments import test_merging

for whole in ("minutes", "merge"):
    for number in test_merging.STEPS:
        child = os.fork()
        if child == 0:
            test_merging.killed_at(Path(sys.argv[1]), whole, number)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
"""


# Of a segment that is written (drafted, its tables closed, synced, renamed, durable) and put in its place (heard of,
# put) those between which anything differs.
STEPS = (0, 2, 3, 5, 6)
WORK: dict[str, dict[str, int]] = {"minutes": {"merge_below_bytes": 0}, "merge": {}}


def filled(history: EmbeddedHistory, segments: int = 3) -> None:
    """Have some segments of two nodes, the last of what came late, and the next day."""
    for at in [*range(1, segments), 0]:
        for node in ("n1", "n2"):
            raws = [rich(10 * at + n, node) for n in (1, 2)]
            history.submit(batch(raws, NOW + 10 * segments)).result(WITHIN_S)
        compact(history)
    clock = history.upkeep._clock
    assert isinstance(clock, FakeClock)
    clock.advance(2 * DAY_S)


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


def test_a_merged_segment_tells_what_its_sources_told(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        filled(history)
        before = told(history)
        power = BY_NAME["gpu_power_watts"]
        runs = sorted(
            (run.node, run.key, time_s, value)
            for run in history.runs(power, [], 0.0, FOREVER_S, "job")
            for time_s, value in zip(run.times_s.tolist(), run.values.tolist(), strict=True)
        )
        keep_up(history)
        assert (history.upkeep.merged, history.segment_store.size()[0]) == (3, 1)
        assert told(history) == before
        (folder,) = history.segment_store.folder.iterdir()
        # By node, device and time, so that one node's values lie together.
        table = pq.read_table(folder / "samples.parquet")
        places = list(zip(*(table[name].to_pylist() for name in ("node", "device", "time")), strict=True))
        assert places == sorted(places)
        frames = pq.read_table(folder / "frames.parquet")
        assert (frames["time"].to_numpy()[table["frame"].to_numpy()] == table["time"].to_numpy()).all()
        assert runs == [
            (run.node, run.key, time_s, value)
            for run in history.runs(power, [], 0.0, FOREVER_S, "job")
            for time_s, value in zip(run.times_s.tolist(), run.values.tolist(), strict=True)
        ]
        minutes = history.upkeep.downsampled
        history.upkeep._clock.advance(DAY_S)  # type: ignore[attr-defined]
        keep_up(history)
        assert history.upkeep.downsampled == minutes  # what is merged is not downsampled again


def test_row_groups_stay_small_and_nodes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.server.history.segments.merging.GROUP_FRAMES", 7)
    with opened(tmp_path) as history:
        for at in (0, 1):
            for node in ("a", "b", "c"):
                history.submit(batch([rich(10 * at + n, node) for n in (1, 2, 3, 4)][: 4 if node == "b" else 1]))
            history.submit(batch([rich(1, f"d{at}")])).result(WITHIN_S)
            compact(history)
        before = told(history)
        history.upkeep._clock.advance(2 * DAY_S)  # type: ignore[attr-defined]
        keep_up(history)
        (folder,) = history.segment_store.folder.iterdir()
        file = pq.ParquetFile(folder / "frames.parquet")
        nodes = [file.read_row_group(n)["node"].to_pylist() for n in range(file.metadata.num_row_groups)]
        assert nodes == [["a"] * 2, ["b"] * 7, ["b"] + ["c"] * 2 + ["d0", "d1"]]
        assert told(history) == before


def killed_at(root: Path, whole: str, number: int) -> None:
    """Do what is due in a copy of ``whole``, and die at the step of this number."""
    left = [number]

    def step(_name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), 9)

    shutil.copytree(root / whole, root / f"{whole}-{number}")
    with opened(root / f"{whole}-{number}", FakeClock(LATER), **WORK[whole]) as history:
        keep_up(history, step)


def test_a_process_that_is_killed_at_any_step_leaves_each_frame_once(tmp_path: Path) -> None:
    with opened(tmp_path / "minutes") as history:
        filled(history)
        expected = told(history)
    shutil.copytree(tmp_path / "minutes", tmp_path / "merge")
    with opened(tmp_path / "merge", FakeClock(LATER), merge_below_bytes=0) as history:
        keep_up(history)
        seen = courses(history)
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
    assert done.stdout.split() == ["-9"] * 2 * len(STEPS)
    for path in sorted(tmp_path.glob("m*-*")):
        whole = path.name.split("-")[0]
        with opened(path, FakeClock(LATER), **WORK[whole]) as history:
            assert told(history) == expected
            keep_up(history)
            assert (told(history), courses(history)) == (expected, seen)
            for level, table in (("raw", "segments"), ("1m", "downsampled WHERE level = '1m'")):
                named = {name for (name,) in history.journal.reader.read(f"SELECT name FROM {table}", ())}
                assert {folder.name for folder in (path / "history" / level).iterdir()} == named
            assert history.segment_store.size()[0] == (1 if whole == "merge" else 3)


def test_who_reads_while_segments_are_merged_reads_on(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        filled(history)
        expected = told(history)
        reading = history.query([], 0.0, FOREVER_S)
        first = next(reading)
        keep_up(history)
        assert len(list(history.segment_store.folder.iterdir())) == 4
        assert len([first, *reading]) == len(expected)
        assert len(list(history.segment_store.folder.iterdir())) == 1


def test_who_reads_for_too_long_is_told_so(tmp_path: Path) -> None:
    clock = FakeClock()
    with opened(tmp_path, clock) as history:
        filled(history)
        reading = history.query([], 0.0, FOREVER_S)
        next(reading)
        keep_up(history)
        clock.advance(3_601)
        history.segment_store.retain(clock.now_s())
        with pytest.raises(HistoryUnavailable, match="took more than 3600 s"):
            list(reading)
        assert history.segment_store.set_aside_total == 0


def test_segments_that_went_while_they_were_merged_do_not_come_back(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        filled(history)

        def perform(task: object) -> TaskResult:
            answer = worker.perform(tmp_path / "history", task)  # type: ignore[arg-type]
            if isinstance(task, Merge):
                history.journal.change(
                    lambda writer: writer.execute("DELETE FROM segments WHERE name = ?", (task.sources[0],))
                ).result(WITHIN_S)
            return answer

        history.upkeep.work(perform)
        assert (history.upkeep.merged, history.segment_store.size()[0]) == (0, 2)
        assert len(list(history.segment_store.folder.iterdir())) == 3  # of the one that the test deleted the folder too


def test_a_merged_segment_outlives_a_lost_journal_and_an_older_one(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        filled(history)
    older = (tmp_path / HISTORY_FILE).read_bytes()
    with opened(tmp_path, FakeClock(NOW + 2 * DAY_S)) as history:
        expected = told(history)
        keep_up(history)
        assert history.upkeep.merged == 3
    (tmp_path / HISTORY_FILE).write_bytes(older)
    with opened(tmp_path) as history:
        assert told(history) == expected
        assert history.segment_store.set_aside_total == 0
    for file in tmp_path.glob(f"{HISTORY_FILE}*"):
        file.unlink()
    with opened(tmp_path) as history:
        assert told(history) == expected


def test_segments_of_another_versions_columns_stay_as_they_are(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        filled(history)
        expected = told(history)
        path = min(history.segment_store.folder.iterdir()) / "samples.parquet"
        pq.write_table(pq.read_table(path).drop_columns(["gpu_power_limit_watts"]), path)
        keep_up(history)
        keep_up(history)
        assert (history.upkeep.merged, history.upkeep.failures, history.segment_store.size()[0]) == (2, 0, 2)
        assert told(history) == expected


def test_the_process_does_what_is_due_beside_the_server(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        filled(history)
        expected = told(history)
        history.upkeep.look()
        assert (history.upkeep.failures, history.upkeep.merged, history.upkeep.downsampled) == (0, 3, 2)
        assert history.upkeep.ok
        assert told(history) == expected


def test_a_process_that_fails_is_counted_and_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path) as history:
        filled(history)
        expected = told(history)
        command = (sys.executable, "-S", "-c", "import sys; sys.exit('no room')")
        settings = history.upkeep._settings
        failing = Upkeep(history.journal, history.segment_store, settings, history.upkeep._clock, command)
        failing.look()
        assert (failing.failures, failing.ok) == (1, False)
        assert "no room" in caplog.text
        assert told(history) == expected


def small(at: int, first_s: float, size: int = 100, shard: int = 0) -> SourceSegment:
    return SourceSegment(at, f"{int(first_s)}-{shard}-abc", first_s, first_s + 300, first_s + 310, 10, size)


def test_what_is_merged_waits_for_company_or_for_the_days_end() -> None:
    many = [small(n, 300.0 * n) for n in range(planning.MERGE_COUNT)]
    assert list(merges(many, 1_000, 900, 7_200)) == [tuple(many)]
    assert list(merges(many[1:], 1_000, 900, 7_200)) == []
    assert list(merges(many[:2], 1_000, 900, DAY_S + 899)) == []
    assert list(merges(many[:2], 1_000, 900, DAY_S + 900)) == [tuple(many[:2])]
    assert list(merges(many[:1], 1_000, 900, 9 * DAY_S)) == []
    assert list(merges(many, 100, 900, 9 * DAY_S)) == []  # large enough
    groups = [small(1, 0.0), small(2, 300.0, shard=1), small(3, float(DAY_S))]
    assert list(merges(groups, 1_000, 900, 9 * DAY_S)) == []
    # What grew is merged again when it has doubled.
    grown = [small(20, 0.0, 5_000), *many]
    assert list(merges(grown, 10_000, 900, 7_200)) == []
    assert list(merges([*grown, small(21, 3_900.0, 4_000)], 10_000, 900, 7_200)) != []


def test_no_merge_is_large() -> None:
    sizes = [planning.MERGE_BYTES_MAX // 3 + 1] * 5
    batches = list(merges([small(n, 300.0 * n, size) for n, size in enumerate(sizes)], 1 << 30, 900, 9 * DAY_S))
    assert [len(each) for each in batches] == [2, 2]
    assert GROUP_FRAMES < planning.MERGE_FRAMES_MAX
