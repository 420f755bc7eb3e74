"""Segments are read as they are by what people analyse data with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.segments.kept import WITHIN_S, batch, compact, opened, rich

HOW = "is not installed: make test-full installs it"


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with opened(tmp_path_factory.mktemp("history")) as history:
        for numbers in ((1, 2), (3,)):
            history.submit(batch([rich(n) for n in numbers])).result(WITHIN_S)
            compact(history)
        return history.shelf.folder


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
