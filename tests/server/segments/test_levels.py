"""Minutes say what the raw frames say, however these came, and outlive them."""

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
from eagle_eye.server.admin.backup_command import back_up
from eagle_eye.server.history.embedded_history import HISTORY_FILE, EmbeddedHistory
from eagle_eye.server.history.history import Statistic, in_steps, runs_of, speaks_of
from eagle_eye.server.history.minutes import NUMBERS
from eagle_eye.server.history.segment_tables import MINUTE_S, MINUTES_FOLDER
from eagle_eye.server.model.errors import HistoryMoved
from tests.server.builders import NOW, FakeClock, frame
from tests.server.segments.kept import WITHIN_S, batch, compact, opened, remake, told
from tests.server.segments.test_downsampling import directly

HOUR_S = 3_600.0
START_S = 1_699_920_000.0  # midnight, UTC
POWER = "gpu_power_watts"


def sample(sequence: int, time_s: float, node: str = "n1", value: float = 300.0, job: str | None = "job") -> bytes:
    values = {POWER: value, "gpu_ecc_corrected_total": float(sequence)}
    return encode_frame(frame(sequence, node, time_s, job=job, ranks=[], blocks=[block(Scope.DEVICE, {0: values})]))


def add(history: EmbeddedHistory, *raws: bytes, received_s: float | None = None) -> None:
    """Have the frames, of one node, in a segment of their own."""
    history.submit(batch(raws, received_s or history.compaction._clock.now_s())).result(WITHIN_S)
    compact(history)


def rows_of(history: EmbeddedHistory) -> list[dict[str, Any]]:
    folders = sorted(history.segment_store.levels.folder(MINUTES_FOLDER).iterdir())
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


def values_of(raws: list[bytes]) -> dict[tuple[object, ...], list[float]]:
    """Return all values by metric, node, device or link, bucket and job (None: whosever), in order of time."""
    found: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for raw in raws:
        one = decode_frame(raw)
        begin_s = one.time_s // MINUTE_S * MINUTE_S
        for name in {name for each in one.blocks for name in each.metrics}:
            for run in runs_of([(one, one.time_s)], BY_NAME[name]):
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
        expected = values_of(raws)
        counts = dict.fromkeys(expected, 0)
        checked = 0
        for row in rows_of(history):
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
        for step_s in (60.0, 600.0, HOUR_S):
            low, high = (of_steps(raws, step_s, place) for place in (1, 2))
            assert (power(history, step_s, "min"), power(history, step_s, "max")) == (low, high)


def of_steps(raws: list[bytes], step_s: float, place: int) -> dict[float, object]:
    """Return one number of what n1's device 0 drew in each step, by the frames themselves."""
    found: dict[float, list[tuple[float, float]]] = {}
    for raw in raws:
        one = decode_frame(raw)
        for run in runs_of([(one, one.time_s)], BY_NAME[POWER]):
            if (run.node, run.key) == ("n1", 0):
                found.setdefault(one.time_s // step_s * step_s, []).append((one.time_s, float(run.values[0])))
    kind = BY_NAME[POWER].kind
    return {at_s: directly([value for _, value in sorted(values)], kind)[place] for at_s, values in found.items()}


def test_what_came_late_is_in_the_minutes_of_its_time(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        add(history, sample(1, START_S + 61, value=100.0), sample(3, START_S + 100, value=300.0))
        assert power(history, 60.0, "mean") == {START_S + 60: 200.0}
        add(history, sample(5, START_S + 150, value=50.0), sample(4, START_S + 110, value=800.0))
        assert power(history, 60.0, "mean") == {START_S + 60: 400.0, START_S + 120: 50.0}
        assert [row["count"] for row in rows_of(history) if row["metric"] == POWER] == [2, 1, 1]
        assert power(history, 60.0, "increase", metric="gpu_ecc_corrected_total")[START_S + 120] == 1


def test_parts_of_a_minute_are_put_in_order_by_when_they_began(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        add(history, *(sample(n, START_S + at_s) for n, at_s in ((1, 1), (9, 110), (12, 130))))
        add(history, *(sample(n, START_S + at_s) for n, at_s in ((3, 63), (5, 80))))
        grown = {START_S: 0, START_S + 60: 8, START_S + 120: 3}  # from 1 to 9: the first value of a minute counts too
        for retired in (False, True):
            assert power(history, 60.0, "increase", metric="gpu_ecc_corrected_total") == grown
            if not retired:
                history.segment_store.retain(clock.now_s() + 8 * 86_400)
        assert told(history) == []


def test_minutes_outlive_raw_frames_and_what_comes_later_still_is_beside_them(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock, retention_s=2 * 86_400.0) as history:
        add(history, sample(1, START_S + 61, value=100.0), sample(2, START_S + 62, value=200.0))
        clock.advance(3 * 86_400)
        history.segment_store.retain(clock.now_s())
        assert told(history) == []
        assert history.segment_store.dropped_as_they_were == 0
        # Of a query with short steps it is said that they answer.
        assert power(history, 1.0, "mean") == {START_S + 60: 150.0}
        assert spans(history, 1.0) == [(0, 1, 60), (1, 24, 0)]
        add(history, sample(3, START_S + 63, value=600.0), sample(4, START_S + 181, value=7.0))
        assert power(history, 60.0, "mean") == {START_S + 60: 300.0, START_S + 180: 7.0}
        assert power(history, 60.0, "last") == {START_S + 60: 600.0, START_S + 180: 7.0}
        assert power(history, HOUR_S, "max") == {START_S: 600.0}


def test_a_query_takes_the_level_that_its_step_allows(tmp_path: Path) -> None:
    clock = FakeClock(START_S + 5 * HOUR_S)
    with opened(tmp_path, clock) as history:
        for hour in range(5):
            add(history, *(sample(100 * hour + n, START_S + hour * HOUR_S + 30 * n, value=n) for n in range(1, 9)))
        clock.advance(86_400)
        history.submit(batch([sample(900, START_S + 10 * HOUR_S, value=1.0)], clock.now_s())).result(WITHIN_S)
        assert spans(history, 1.0) == [(0, 24, 0)]
        assert spans(history, 60.0) == [(0, 5, 60), (5, 24, 0)]
        assert spans(history, HOUR_S) == [(0, 5, 60), (5, 24, 0)]
        of_raw = power(history, 59.0, "max", end_s=START_S + 6 * HOUR_S)
        assert len(of_raw) == 25
        for step_s in (HOUR_S, 2 * HOUR_S):
            answers: dict[Statistic, float] = {"max": 8.0, "min": 1.0, "last": 8.0, "mean": 4.5}
            for statistic, value in answers.items():
                assert set(power(history, step_s, statistic, end_s=START_S + 4 * HOUR_S).values()) == {value}
        assert power(history, HOUR_S, "mean", end_s=START_S + HOUR_S + 120)[START_S + HOUR_S] == 2.0


def test_a_job_has_its_own_part_of_a_bucket(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        jobs = ["a", "b", "a", None]
        add(history, *(sample(n, START_S + n, value=n, job=job) for n, job in enumerate(jobs, 1)))
        for step_s in (60.0, HOUR_S):
            assert [power(history, step_s, "mean", job=job)[START_S] for job in ("a", "b", None)] == [2.0, 2.0, 2.5]
            assert power(history, step_s, "last", job="a") == {START_S: 3.0}


def test_minutes_are_retired_by_age_and_by_size_of_their_own(tmp_path: Path) -> None:
    clock = FakeClock(START_S + 3 * HOUR_S)
    with opened(tmp_path, clock, minutes_retention_s=2.5 * 86_400.0, minutes_retention_bytes=1 << 20) as history:
        for day in range(3):
            add(history, sample(day + 1, START_S + day * 86_400 + 5), received_s=clock.now_s())
            clock.advance(86_400)
        assert [history.segment_store.kept()[level].segments for level in ("raw", "1m", "1h")] == [3, 3, 0]
        history.segment_store.retain(clock.now_s())
        assert [history.segment_store.kept()[level].segments for level in ("raw", "1m")] == [3, 2]
        assert history.segment_store.kept()["1m"].oldest_s == START_S + 86_400
        history.journal.change(lambda writer: writer.execute("UPDATE levels SET bytes = 600000")).result()
        clock.advance(120)
        history.segment_store.retain(clock.now_s())
        assert history.segment_store.kept()["1m"].segments == 1
        assert len(list(history.segment_store.levels.folder(MINUTES_FOLDER).iterdir())) == 1


def test_frames_that_no_minutes_had_are_counted_when_they_go(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        add(history, sample(1, START_S + 1))
        history.journal.change(lambda writer: writer.execute("DELETE FROM levels")).result()
        history.segment_store.retain(clock.now_s() + 8 * 86_400)
        assert (history.segment_store.dropped_by_retention, history.segment_store.dropped_as_they_were) == (1, 1)


def test_broken_minutes_are_set_aside_and_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        add(history, sample(1, START_S + 61, value=100.0), sample(2, START_S + 3 * HOUR_S, value=500.0))
        folder = min(history.segment_store.levels.folder(MINUTES_FOLDER).iterdir())
        table = folder / "series.parquet"
        content = bytearray(table.read_bytes())
        content[4:60] = b"?" * 56
        table.write_bytes(content)
        with caplog.at_level(logging.ERROR), pytest.raises(HistoryMoved, match="ask again"):
            power(history, 60.0, "max")
        # What they were made of answers, and they are made anew of it.
        assert power(history, 60.0, "max")[START_S + 60] == 100.0
        assert spans(history, 60.0) == [(0, 3, 0), (3, 4, 60), (4, 24, 0)]
        assert f"1m/{folder.name}" in caplog.text
        assert history.segment_store.levels.set_aside_total == 1
        assert (tmp_path / "history" / "set-aside" / f"1m-{folder.name}").is_dir()
        history.compaction.compact_if_due()
        assert history.compaction.failures == 0
        assert folder.is_dir()
        assert remake(history) == 0
        assert power(history, 60.0, "max")[START_S + 60] == 100.0
        assert spans(history, 60.0) == [(0, 1, 60), (1, 3, 0), (3, 4, 60), (4, 24, 0)]


def test_broken_minutes_whose_frames_are_gone_are_a_gap(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock, retention_s=2 * 86_400.0) as history:
        add(history, sample(1, START_S + 61, value=100.0))
        clock.advance(3 * 86_400)
        history.segment_store.retain(clock.now_s())
        (folder,) = history.segment_store.levels.folder(MINUTES_FOLDER).iterdir()
        (folder / "series.parquet").write_bytes(b"")
        with pytest.raises(HistoryMoved):
            power(history, 60.0)
        assert power(history, 60.0) == {}
        (gap,) = history.gaps(["n1"], START_S, START_S + HOUR_S, levels=True)
        assert (gap.start_s, gap.end_s) == (START_S + 60, START_S + 120)
        assert remake(history) == 0
        aside = tmp_path / "history" / "set-aside"
        assert [path.name for path in aside.iterdir()] == [f"1m-{folder.name}"]
        clock.advance(800 * 86_400)
        history.segment_store.retain(clock.now_s())
        assert list(aside.iterdir()) == []


def test_minutes_stand_for_a_raw_segment_that_broke(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        add(history, sample(1, START_S + 61, value=100.0))
        (broken,) = history.segment_store.folder.iterdir()
        add(history, sample(2, START_S + 62, value=200.0))
        (broken / "samples.parquet").write_bytes(b"")
        assert len(told(history)) == 1
        assert history.segment_store.set_aside_total == 1
        assert power(history, 60.0, "mean") == {START_S + 60: 150.0}
        assert power(history, 1.0, "mean") == {START_S + 60: 100.0, START_S + 62: 200.0}
        assert history.gaps(["n1"], START_S, START_S + HOUR_S, levels=True) == []


def test_a_broken_raw_segment_without_minutes_is_set_aside_when_they_are_made(tmp_path: Path) -> None:
    with opened(tmp_path, FakeClock(START_S + HOUR_S)) as history:
        add(history, sample(1, START_S + 61))
        history.journal.change(lambda writer: writer.execute("DELETE FROM levels")).result()
        (broken,) = history.segment_store.folder.iterdir()
        (broken / "samples.parquet").write_bytes(b"")
        assert remake(history) == 1
        assert history.segment_store.set_aside_total == 1
        assert remake(history) == 0


def test_levels_outlive_a_lost_journal(tmp_path: Path) -> None:
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock, retention_s=2 * 86_400.0) as history:
        add(history, sample(1, START_S + 61, value=100.0))
        clock.advance(86_400)
        add(history, sample(2, START_S + 2 * 86_400, value=100.0))
        clock.advance(2 * 86_400)
        history.segment_store.retain(clock.now_s())
        (history.segment_store.levels.folder(MINUTES_FOLDER) / ".partial-1").mkdir()
        before = [power(history, step_s) for step_s in (60.0, HOUR_S)]
    for file in tmp_path.glob(f"{HISTORY_FILE}*"):
        file.unlink()
    with opened(tmp_path, clock) as history:
        assert [power(history, step_s) for step_s in (60.0, HOUR_S)] == before
        assert len(list(history.segment_store.levels.folder(MINUTES_FOLDER).iterdir())) == 2


def test_a_query_reads_only_the_row_groups_of_its_metric_and_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_eye.server.history.minutes.GROUP_ROWS", 2)
    clock = FakeClock(START_S + HOUR_S)
    with opened(tmp_path, clock) as history:
        for node in "abcd":
            history.submit(batch([sample(1, START_S + 1, node)], clock.now_s())).result(WITHIN_S)
        compact(history)
        clock.advance(HOUR_S)
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
        copied = {one.file for one in back_up(tmp_path / "data", tmp_path / "backup")}
        (folder,) = history.segment_store.levels.folder(MINUTES_FOLDER).iterdir()
        assert f"history/1m/{folder.name}/series.parquet" in copied
        before = [power(history, step_s) for step_s in (60.0, HOUR_S)]
    with opened(tmp_path / "backup", clock) as history:
        assert [power(history, step_s) for step_s in (60.0, HOUR_S)] == before
