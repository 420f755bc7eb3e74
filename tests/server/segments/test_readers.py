"""Segments are read as they are by what people analyse data with."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.server.history.segment_tables import MINUTES_FOLDER
from tests.server.builders import FakeClock
from tests.server.segments.kept import WITHIN_S, batch, compact, opened, rich
from tests.server.segments.test_levels import START_S, add, sample

HOW = "is not installed: make test-full installs it"


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with opened(tmp_path_factory.mktemp("history")) as history:
        for numbers in ((1, 2), (3,)):
            history.submit(batch([rich(n) for n in numbers])).result(WITHIN_S)
            compact(history)
        return history.segment_store.folder


def test_pandas_reads_a_segment(raw: Path) -> None:
    pandas = pytest.importorskip("pandas", reason=f"pandas {HOW}")
    table = pandas.concat([pandas.read_parquet(path) for path in sorted(raw.glob("*/samples.parquet"))])
    watts = table[table.device == 0].sort_values("time").gpu_power_watts
    assert watts.tolist() == [301.0, 302.0, 303.0]


def test_duckdb_reads_all_segments_at_once(raw: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason=f"duckdb {HOW}")
    statement = f"SELECT max(gpu_power_watts) FROM '{raw}/*/samples.parquet' WHERE node = 'n1' AND device = 1"
    assert duckdb.sql(statement).fetchall() == [(304.0,)]
    statement = f"SELECT DISTINCT ranks->>'$[0].role' FROM '{raw}/*/frames.parquet'"
    assert duckdb.sql(statement).fetchall() == [("pp0",)]


def test_polars_reads_all_segments_at_once(raw: Path) -> None:
    polars = pytest.importorskip("polars", reason=f"polars {HOW}")
    table = polars.scan_parquet(raw / "*" / "samples.parquet").filter(polars.col("device") == -1).collect()
    assert table["node_cpu_utilization_ratio"].to_list() == [0.25] * 3


@pytest.fixture(scope="module")
def minutes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return segments of minutes: three of one GPU, whose counter goes from 1 to 6, by one within each and between."""
    clock = FakeClock()
    with opened(tmp_path_factory.mktemp("levels"), clock) as history:
        for minute in (0, 1, 2):
            add(history, *(sample(2 * minute + n, START_S + 60 * minute + n) for n in (1, 2)))
        clock.advance(86_400)
        return history.segment_store.levels.folder(MINUTES_FOLDER)


def test_pandas_reads_minutes(minutes: Path) -> None:
    pandas = pytest.importorskip("pandas", reason=f"pandas {HOW}")
    for number, folder in enumerate(sorted(minutes.iterdir())):
        table = pandas.read_parquet(folder / "series.parquet", filters=[("metric", "==", "gpu_power_watts")])
        assert table[["time", "count", "mean"]].to_numpy().tolist() == [[START_S + 60 * number, 2, 300.0]]


def test_duckdb_adds_up_increases_as_the_document_says(minutes: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason=f"duckdb {HOW}")
    text = (Path(__file__).parents[3] / "docs" / "explanation" / "history.md").read_text()
    statement = text[text.index("SELECT node, device, sum(increase") :].split(";")[0]
    assert duckdb.sql(statement.replace("history/1m", str(minutes))).fetchall() == [("n1", 0, 5.0)]


def test_polars_reads_minutes(minutes: Path) -> None:
    polars = pytest.importorskip("polars", reason=f"polars {HOW}")
    table = polars.scan_parquet(minutes / "*" / "series.parquet").filter(polars.col("link").is_null()).collect()
    assert set(table["metric"]) == {"gpu_power_watts", "gpu_ecc_corrected_total"}
