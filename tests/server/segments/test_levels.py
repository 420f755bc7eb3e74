"""Minutes and hours say what the raw frames say, are made anew for what came late, and outlive them."""

from __future__ import annotations

import logging
import math
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Rank, block, decode_frame, encode_frame
from eagle_eye.schema.metrics import BY_NAME, Scope
from eagle_eye.server.admin.backup import back_up
from eagle_eye.server.history.embedded_history import HISTORY_FILE, EmbeddedHistory
from eagle_eye.server.history.history import runs_of, speaks_of
from eagle_eye.server.history.segments.levels import HOURS, MINUTES, NUMBERS, Level
from eagle_eye.server.history.steps import Statistic, in_steps
from eagle_eye.server.model.errors import HistoryMoved
from tests.server.builders import NOW, FakeClock, frame
from tests.server.segments.kept import WITHIN_S, batch, compact, keep_up, opened, told
from tests.server.segments.test_downsampling import directly

HOUR_S = 3_600.0
START_S = 1_699_920_000.0  # midnight, UTC
POWER = "gpu_power_watts"


def sample(sequence: int, time_s: float, node: str = "n1", value: float = 300.0, job: str | None = "job") -> bytes:
    values = {POWER: value, "gpu_ecc_corrected_total": float(sequence)}
    return encode_frame(frame(sequence, node, time_s, job=job, ranks=[], blocks=[block(Scope.DEVICE, {0: values})]))


def add(history: EmbeddedHistory, *raws: bytes, received_s: float | None = None) -> None:
    """Have the frames, of one node, in a segment of their own."""
    history.submit(batch(raws, received_s or history.upkeep._clock.now_s())).result(WITHIN_S)
    compact(history)


def rows_of(history: EmbeddedHistory, level: Level) -> list[dict[str, Any]]:
    folders = sorted(history.segment_store.levels.folder(level).iterdir())
    return [row for folder in folders for row in pq.read_table(folder / "series.parquet").to_pylist()]


def power(history: EmbeddedHistory, step_s: float, statistic: Statistic = "last", **asked: Any) -> dict[float, float]:
    """Return the power of n1's device 0 by time, as a query sees it."""
    start_s, end_s = asked.pop("start_s", START_S), asked.pop("end_s", START_S + 86_400.0)
    job = asked.pop("job", None)
    spec = BY_NAME[str(asked.pop("metric", POWER))]
    with history.courses(spec, ["n1"], start_s, end_s, job, step_s, 10**9) as reading:
        series = in_steps(reading.courses, spec, statistic, start_s, step_s, 10)
    found = series.get(("n1", 0))
    return dict(zip([start_s + at * step_s for at in found.steps], found.values, strict=True)) if found else {}


def spans(history: EmbeddedHistory, step_s: float) -> list[tuple[float, float, int]]:
    with history.courses(BY_NAME[POWER], ["n1"], START_S, START_S + 86_400.0, None, step_s, 10**9) as reading:
        return [
            ((one.start_s - START_S) / HOUR_S, (one.end_s - START_S) / HOUR_S, one.bucket_s) for one in reading.spans
        ]


def random_frames(rng: random.Random) -> list[bytes]:
    """Return frames of an hour, of two nodes, with gaps, resets, changing jobs, and some that no columns can hold."""
    raws = []
    for node in ("n1", "n2"):
        total = 0.0
        for sequence in range(1, 90):
            total = rng.choice([total + rng.randrange(3), total, 0.0]) if rng.random() < 0.9 else total
            cells = {
                POWER: rng.choice([rng.uniform(50, 700), math.nan, math.inf]),
                "gpu_ecc_corrected_total": total,
                "gpu_throttle_reasons": float(rng.choice([0, 1, 4, 12])),
                "gpu_power_limit_watts": 700.0,
                "train_step": float(sequence // 7),
            }
            kept = {name: value for name, value in cells.items() if rng.random() < 0.95}
            blocks = [
                block(Scope.DEVICE, dict.fromkeys(range(rng.randrange(1, 3)), kept)),
                block(Scope.NODE, {-1: {"node_cpu_utilization_ratio": rng.random()}}),
                block(Scope.LINK, {f"mlx5_{at}": {"link_errors_total": total, "link_up": 1.0} for at in range(2)}),
            ]
            strange = [Event(NOW, "xid", 0, {"code": math.nan})] if rng.random() < 0.1 else []
            jobs = rng.choice([["a"], ["a", "b"], []]) if node == "n1" else ["a"]
            ranks = [Rank(job, 0, 8, 0) for job in jobs]
            time_s = START_S + 1.7 * sequence * rng.choice([1, 20, 23.5]) + 0.001 * sequence  # all different
            raws.append(
                encode_frame(frame(sequence, node, time_s, job=None, ranks=ranks, blocks=blocks, events=strange))
            )
    return raws


def values_of(raws: list[bytes], level: Level) -> dict[tuple[object, ...], list[float]]:
    """Return all values by metric, node, device or link, bucket and job (None: whosever), in order of time."""
    found: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for raw in raws:
        one = decode_frame(raw)
        begin_s = one.time_s // level.bucket_s * level.bucket_s
        for name in {name for each in one.blocks for name in each.metrics}:
            for run in runs_of(one, one.time_s, BY_NAME[name]):
                for job in (None, *(job for job in ("a", "b") if speaks_of(one, job))):
                    of = found.setdefault((name, run.node, run.key, begin_s, job), [])
                    of.append((one.time_s, float(run.values[0])))
    return {key: [value for _, value in sorted(values)] for key, values in found.items()}


def test_buckets_are_what_the_raw_values_are_however_these_came(tmp_path: Path) -> None:
    rng = random.Random(5)
    raws = random_frames(rng)
    rng.shuffle(raws)
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        for at in range(0, len(raws), 40):
            waiting = [history.submit(batch([raw], clock.now_s())) for raw in raws[at : at + 40]]
            assert all(future.result(WITHIN_S) for future in waiting)
            compact(history)
        clock.advance(86_400)
        keep_up(history)
        for level in (MINUTES, HOURS):
            expected = values_of(raws, level)
            counts = dict.fromkeys(expected, 0)
            checked = 0
            for row in rows_of(history, level):
                key = row["metric"], row["node"], row["device"] if row["link"] is None else row["link"], row["time"]
                for job in (None, *(row["job"].split("\n") if row["job"] else ())):
                    counts[(*key, job)] += row["count"]
                values = expected[(*key, None)]
                if row["count"] < len(values):  # what a job has of a bucket is in a row for those that it was with
                    continue
                checked += 1
                direct = directly(values, BY_NAME[row["metric"]].kind)
                mean = None if direct[3] is None else pytest.approx(direct[3], rel=1e-6)
                assert [row[name] for name in NUMBERS] == [*direct[:3], mean, *direct[4:]], key
            assert counts == {key: len(values) for key, values in expected.items()}
            assert checked > 10


def test_what_came_late_is_in_the_minutes_of_its_time(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        add(history, sample(1, START_S + 61, value=100.0), sample(3, START_S + 63, value=300.0))
        clock.advance(HOUR_S)
        keep_up(history)
        assert power(history, 60.0, "mean") == {START_S + 60: 200.0}
        add(history, sample(2, START_S + 62, value=800.0), sample(4, START_S + 121, value=50.0))
        # It is read beside the minutes until these are made anew, and then once as before.
        late = {START_S + 60: 400.0, START_S + 120: 50.0}
        assert power(history, 60.0, "mean") == late
        keep_up(history)
        assert history.upkeep.downsampled == 1
        clock.advance(HOUR_S)
        keep_up(history)
        assert history.upkeep.downsampled == 2
        assert power(history, 60.0, "mean") == late
        assert [row["count"] for row in rows_of(history, MINUTES) if row["metric"] == POWER] == [3, 1]
        assert power(history, 60.0, "increase", metric="gpu_ecc_corrected_total") == {START_S + 60: 2, START_S + 120: 1}


def test_minutes_outlive_raw_frames_and_what_comes_later_still_is_added(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock, retention_s=2 * 86_400.0) as history:
        add(history, sample(1, START_S + 61, value=100.0), sample(2, START_S + 62, value=200.0))
        clock.advance(3 * 86_400)
        keep_up(history)
        history.segment_store.retain(clock.now_s())
        assert told(history) == []
        assert history.segment_store.dropped_as_they_were == 0
        # Of a query with short steps it is said that they answer.
        assert power(history, 1.0, "mean") == {START_S + 60: 150.0}
        assert spans(history, 1.0) == [(0, 1, 60), (1, 24, 0)]
        add(history, sample(3, START_S + 63, value=600.0), sample(4, START_S + 181, value=7.0))
        clock.advance(2 * HOUR_S)
        keep_up(history)
        assert power(history, 60.0, "mean") == {START_S + 60: 300.0, START_S + 180: 7.0}
        assert power(history, 60.0, "last") == {START_S + 60: 200.0, START_S + 180: 7.0}
        assert power(history, HOUR_S, "max") == {START_S: 600.0}


def test_a_query_takes_the_level_that_its_step_allows(tmp_path: Path) -> None:
    clock = FakeClock(START_S + 5 * HOUR_S)
    with opened(tmp_path, clock) as history:
        for hour in range(5):
            add(history, *(sample(100 * hour + n, START_S + hour * HOUR_S + 30 * n, value=n) for n in range(1, 9)))
        clock.advance(86_400)
        keep_up(history)
        add(history, sample(900, START_S + 10 * HOUR_S, value=1.0))
        assert spans(history, 1.0) == [(0, 24, 0)]
        assert spans(history, 60.0) == [(0, 5, 60), (5, 24, 0)]
        assert spans(history, HOUR_S) == [(0, 5, 3_600), (5, 24, 0)]
        of_raw = power(history, 59.0, "max", end_s=START_S + 6 * HOUR_S)
        assert len(of_raw) == 25
        for step_s in (HOUR_S, 2 * HOUR_S):
            answers: dict[Statistic, float] = {"max": 8.0, "min": 1.0, "last": 8.0, "mean": 4.5}
            for statistic, value in answers.items():
                assert set(power(history, step_s, statistic, end_s=START_S + 4 * HOUR_S).values()) == {value}
        # The range ends within an hour: its hours are whole there, and minutes answer for the rest.
        assert power(history, HOUR_S, "mean", end_s=START_S + HOUR_S + 120)[START_S + HOUR_S] == 2.0


def test_a_job_has_its_own_part_of_a_bucket(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        jobs = ["a", "b", "a", None]
        add(history, *(sample(n, START_S + n, value=n, job=job) for n, job in enumerate(jobs, 1)))
        clock.advance(86_400)
        keep_up(history)
        for step_s in (60.0, HOUR_S):
            assert [power(history, step_s, "mean", job=job)[START_S] for job in ("a", "b", None)] == [2.0, 2.0, 2.5]
            assert power(history, step_s, "last", job="a") == {START_S: 3.0}


def test_levels_are_retired_by_age_and_by_size_of_their_own(tmp_path: Path) -> None:
    clock = FakeClock(START_S + 3 * HOUR_S)
    kept = {"minutes_retention_s": 2.5 * 86_400.0, "hours_retention_bytes": 1 << 20}
    with opened(tmp_path, clock, **kept) as history:
        for day in range(3):
            add(history, sample(day + 1, START_S + day * 86_400 + 5), received_s=clock.now_s())
            clock.advance(86_400)
            keep_up(history)
        assert [history.segment_store.kept()[level].segments for level in ("raw", "1m", "1h")] == [3, 3, 3]
        history.segment_store.retain(clock.now_s())
        assert [history.segment_store.kept()[level].segments for level in ("raw", "1m", "1h")] == [3, 2, 3]
        assert history.segment_store.kept()["1m"].oldest_s == START_S + 86_400
        history.journal.change(lambda w: w.execute("UPDATE downsampled SET bytes = 600000 WHERE level = '1h'")).result()
        clock.advance(120)
        history.segment_store.retain(clock.now_s())
        assert history.segment_store.kept()["1h"].segments == 1
        # It is not begun again, although raw frames are there.
        clock.advance(2 * HOUR_S)
        keep_up(history)
        assert [history.segment_store.kept()[level].segments for level in ("1m", "1h")] == [2, 1]
        assert len(list(history.segment_store.levels.folder(MINUTES).iterdir())) == 2


def test_raw_frames_that_are_about_to_go_are_downsampled_before_their_hour_is_over(tmp_path: Path) -> None:
    clock = FakeClock(START_S + 100)
    with opened(tmp_path, clock, retention_s=1_000.0) as history:
        add(history, sample(1, START_S + 61))
        clock.advance(300)
        keep_up(history)
        clock.advance(1_000)
        history.segment_store.retain(clock.now_s())
        assert told(history) == []
        assert (history.segment_store.dropped_by_retention, history.segment_store.dropped_as_they_were) == (1, 0)
        assert power(history, 60.0) == {START_S + 60: 300.0}
        add(history, sample(2, START_S + 1_000))
        clock.advance(2_000)
        history.segment_store.retain(clock.now_s())
        assert history.segment_store.dropped_as_they_were == 1


@pytest.mark.parametrize("level", [MINUTES, HOURS])
def test_a_broken_segment_of_a_level_is_set_aside_and_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, level: Level
) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        add(history, sample(1, START_S + 61, value=100.0), sample(2, START_S + 3 * HOUR_S, value=500.0))
        clock.advance(86_400)
        keep_up(history)
        folder = min(history.segment_store.levels.folder(level).iterdir())
        table = folder / "series.parquet"
        content = bytearray(table.read_bytes())
        content[4:60] = b"?" * 56
        table.write_bytes(content)
        at_s = START_S + 60 if level is MINUTES else START_S
        with caplog.at_level(logging.ERROR), pytest.raises(HistoryMoved, match="ask again"):
            power(history, level.bucket_s, "max")
        # What it was made of answers, and then it is made anew at once.
        assert power(history, level.bucket_s, "max")[at_s] == 100.0
        assert f"{level.name}/{folder.name}" in caplog.text
        assert history.segment_store.levels.set_aside_total == 1
        assert (tmp_path / "history" / "set-aside" / f"{level.name}-{folder.name}").is_dir()
        keep_up(history)
        keep_up(history)
        assert len(list(history.segment_store.levels.folder(level).iterdir())) == (2 if level is MINUTES else 1)
        assert power(history, level.bucket_s, "max")[at_s] == 100.0
        assert not folder.exists()


def test_hours_answer_for_minutes_that_broke_when_their_frames_were_gone(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock, retention_s=2 * 86_400.0) as history:
        add(history, sample(1, START_S + 61, value=100.0))
        clock.advance(3 * 86_400)
        keep_up(history)
        history.segment_store.retain(clock.now_s())
        (folder,) = history.segment_store.levels.folder(MINUTES).iterdir()
        (folder / "series.parquet").write_bytes(b"")
        with pytest.raises(HistoryMoved):
            power(history, 60.0)
        assert power(history, 60.0) == {START_S: 100.0}
        assert spans(history, 60.0)[0] == (0, 1, 3_600)
        keep_up(history)
        assert history.segment_store.kept()["1m"].segments == 0
        aside = tmp_path / "history" / "set-aside"
        assert [path.name for path in aside.iterdir()] == [f"1m-{folder.name}"]
        clock.advance(100 * 86_400)
        history.segment_store.retain(clock.now_s())
        assert list(aside.iterdir()) == []


def test_a_broken_raw_segment_costs_only_its_own_frames(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        add(history, sample(1, START_S + 61, value=100.0))
        (broken,) = history.segment_store.folder.iterdir()
        add(history, sample(2, START_S + 62, value=200.0))
        (broken / "samples.parquet").write_bytes(b"")
        clock.advance(HOUR_S)
        keep_up(history)
        keep_up(history)
        assert history.segment_store.set_aside_total == 1
        assert power(history, 60.0) == {START_S + 60: 200.0}


def test_levels_outlive_a_lost_journal(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock, retention_s=2 * 86_400.0) as history:
        add(history, sample(1, START_S + 61, value=100.0))
        clock.advance(86_400)
        keep_up(history)
        add(history, sample(2, START_S + 2 * 86_400, value=100.0))
        clock.advance(2 * 86_400)
        history.segment_store.retain(clock.now_s())
        (history.segment_store.levels.folder(MINUTES) / ".partial-1").mkdir()
        before = [power(history, step_s) for step_s in (60.0, HOUR_S)]
    for file in tmp_path.glob(f"{HISTORY_FILE}*"):
        file.unlink()
    with opened(tmp_path, clock) as history:
        assert [power(history, step_s) for step_s in (60.0, HOUR_S)] == before
        assert len(list(history.segment_store.levels.folder(MINUTES).iterdir())) == 1


def test_a_query_reads_only_the_row_groups_of_its_metric_and_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_eye.server.history.segments.series.GROUP_ROWS", 2)
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        for node in "abcd":
            history.submit(batch([sample(1, START_S + 1, node)], clock.now_s())).result(WITHIN_S)
        compact(history)
        clock.advance(HOUR_S)
        keep_up(history)
        read: list[list[int]] = []
        batches = pq.ParquetFile.iter_batches

        def noted(self: pq.ParquetFile, size: int, groups: list[int], *more: object, **others: object) -> object:
            read.append(groups)
            return batches(self, size, groups, *more, **others)

        monkeypatch.setattr(pq.ParquetFile, "iter_batches", noted)
        with history.courses(BY_NAME[POWER], ["c"], START_S, START_S + HOUR_S, None, 60.0, 10) as reading:
            assert 1 <= reading.frames <= 4
            assert [course.node for course in reading.courses] == ["c"]
        assert read == [[1]]


def test_a_backup_holds_the_levels(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path / "data", clock) as history:
        add(history, sample(1, START_S + 61, value=100.0))
        clock.advance(86_400)
        keep_up(history)
        copied = {one.file for one in back_up(tmp_path / "data", tmp_path / "backup")}
        names = {
            level.name: next(history.segment_store.levels.folder(level).iterdir()).name for level in (MINUTES, HOURS)
        }
        assert {f"history/{level}/{name}/series.parquet" for level, name in names.items()} <= copied
        before = [power(history, step_s) for step_s in (60.0, HOUR_S)]
    with opened(tmp_path / "backup", clock) as history:
        assert [power(history, step_s) for step_s in (60.0, HOUR_S)] == before
