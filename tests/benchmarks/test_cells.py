"""The benchmark of cells: its own parts, and a tiny run of two cells against one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cells.__main__ import compared, cpu_s
from benchmarks.cells.load import Fleet, job_nodes
from benchmarks.ingest.processes import Look
from eagle_eye.demo.two_servers import postgresql_programs


def test_a_cells_jobs_have_all_its_nodes_and_the_generators_names() -> None:
    jobs = Fleet("west", 203, 8, 100).jobs()
    assert jobs == {"west-job-000": 100, "west-job-001": 100, "west-job-002": 3}


@pytest.mark.parametrize(("nodes", "cells", "expected"), [(3600, [1, 2, 4], 100), (16, [1, 2], 8), (2400, [1], 120)])
def test_each_number_of_cells_has_the_same_jobs(nodes: int, cells: list[int], expected: int) -> None:
    size = job_nodes(nodes, cells)
    assert size == expected
    for count in cells:
        jobs = [job for at in range(count) for job in Fleet(str(at), nodes // count, 8, size).jobs().values()]
        assert jobs == [size] * (nodes // size)


def test_cpu_time_is_that_between_the_two_moments() -> None:
    looks = [Look(float(at), 2.0 * at, 0) for at in range(10)]
    assert cpu_s(looks, 2.0, 6.0) == 8.0


def test_what_is_too_short_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match="too short"):
        cpu_s([Look(0.0, 0.0, 0)], 0.0, 1.0)


def run_of(cells: int, cost: float, late_s: float = 0.1, tree: str = "this") -> dict[str, Any]:
    figures = {"cpu_seconds_per_million_samples": cost, "acknowledged_seconds_p99": late_s}
    return {"tree": tree, "cells": cells, **figures}


def test_several_cells_are_compared_with_one_by_the_medians_of_their_runs() -> None:
    runs = [run_of(1, 0.2), run_of(2, 0.3), run_of(1, 0.2), run_of(2, 0.9), run_of(1, 0.7), run_of(2, 0.3)]
    assert compared(runs)["cpu_per_sample_times_one_cell"] == {"2": pytest.approx(1.5)}


def test_nothing_is_compared_without_a_run_of_one_cell() -> None:
    assert compared([run_of(2, 0.3)]) == {}


def test_one_cell_is_compared_with_one_of_another_tree_by_the_medians() -> None:
    runs = [run_of(1, 0.3), run_of(1, 0.2, tree="beside"), run_of(1, 0.3), run_of(1, 0.2, tree="beside")]
    assert compared(runs)["one_cell_times_beside"] == pytest.approx(1.5)


def test_a_run_that_could_not_keep_up_is_not_compared() -> None:
    runs = [run_of(1, 0.2), run_of(2, 0.1, late_s=5.0), run_of(2, 0.3)]
    assert compared(runs)["cpu_per_sample_times_one_cell"] == {"2": pytest.approx(1.5)}


@pytest.mark.slow  # servers and generators in processes of their own
@pytest.mark.skipif(postgresql_programs() is None, reason="PostgreSQL is not installed (apt-get install postgresql-15)")
def test_two_cells_take_what_one_takes_and_lose_nothing(tmp_path: Path) -> None:
    out = tmp_path / "cells.json"
    command = [sys.executable, "-m", "benchmarks.cells", "--cells", "1,2", "--nodes", "16", "--seconds", "12"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = json.loads(out.read_text())["runs"]
    assert [(run["cells"], run["frames_lost"]) for run in runs] == [(1, 0), (2, 0)]
    assert runs[0]["samples_per_second"] == pytest.approx(runs[1]["samples_per_second"], rel=0.2)
    assert all(run["cpu_seconds_per_million_samples"] > 0.0 for run in runs)


@pytest.mark.slow  # processes that write
@pytest.mark.skipif(postgresql_programs() is None, reason="PostgreSQL is not installed (apt-get install postgresql-15)")
def test_what_several_processes_decide_is_counted(tmp_path: Path) -> None:
    out = tmp_path / "commits.json"
    command = [sys.executable, "-m", "benchmarks.cells", "--writers", "1,2", "--seconds", "1"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(one["decisions_per_second"] > 0.0 for one in json.loads(out.read_text()))
