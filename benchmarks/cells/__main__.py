"""What a sample costs where 1, 2 or 4 cells share one load and one PostgreSQL.

    python -m benchmarks.cells --cells 1,2,4,1,2,4 --nodes 2400 --seconds 75 --out benchmarks/results/cells.json
    python -m benchmarks.cells --writers 1,4,10 --seconds 10 --out benchmarks/results/cells-commits.json

The servers of all cells run on core 0, the load generators (one for each cell) and PostgreSQL on core 1; the machine
should do nothing else: a run that could not keep up is left out where runs are compared. The nodes' jobs, the same ones
for each number of cells, are given to the cells in equal parts before the load begins. ``--beside FOLDER`` measures one
cell with the servers of another working tree, too, which need not know cells, in turn with this one's. Exit code 1: a
frame was lost.

``--writers`` measures something else: how many decisions processes write into one database, which flushes each to disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.cells import commits
from benchmarks.cells.load import Fleet, job_nodes, loading
from benchmarks.ingest.processes import GENERATOR_CORE, Course, Look, free_port, look, program
from benchmarks.result_file import write_result
from eagle_eye.demo.two_servers import postgresql_programs
from eagle_eye.server.model.records import JobCell
from eagle_eye.server.store.settings import DEFAULT_CELL, RecordsSettings
from eagle_eye.server.store.sql_store import open_records
from eagle_eye.server.store.store import Change
from tests.server.postgresql_server import PostgresqlServer, serving

HERE = Path(__file__).resolve().parents[2]
WARM_UP_SHARE = 0.25  # of a run, which is not counted
TIMES_MAX = 1.1  # CPU per sample of several cells, of one's
LATE_S = 1.0  # a run whose slowest answers (p99) took longer is not compared: what waits is taken together, and cheaper


class Plan(NamedTuple):
    """One run."""

    cells: int
    nodes: int
    gpus: int
    job_nodes: int
    seconds: float
    tree: Path


def main() -> int:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cells", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", default="1,2,4", metavar="N,N,...", help="a run each, repeated or not (1,2,4)")
    parser.add_argument("--writers", metavar="N,N,...", help="only how fast so many processes write decisions")
    parser.add_argument("--nodes", type=int, default=2_400, help="in all cells together (2400)")
    parser.add_argument("--gpus", type=int, default=8, help="of each node (8)")
    parser.add_argument("--seconds", type=float, default=75.0, help="of each run, whose first quarter warms up (75)")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another working tree, to compare one cell with")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bin_ = postgresql_programs()
    if bin_ is None:
        sys.stderr.write("benchmarks.cells: PostgreSQL is not installed: apt-get install postgresql-15\n")
        return 2
    if args.writers:
        with serving(bin_, "fsync = on\n") as durable:
            return _keep(
                [commits.measure(durable, int(one), args.seconds) for one in args.writers.split(",")], args.out
            )
    os.sched_setaffinity(0, {GENERATOR_CORE})  # PostgreSQL, too, which is started from here
    runs: list[dict[str, Any]] = []
    counts = [int(one) for one in args.cells.split(",")]
    of_jobs = job_nodes(args.nodes, counts)
    with serving(bin_) as postgresql, tempfile.TemporaryDirectory(prefix="cells-") as folder:
        for count in counts:
            for tree in [HERE, args.beside.resolve()] if args.beside is not None and count == 1 else [HERE]:
                plan = Plan(count, args.nodes, args.gpus, of_jobs, args.seconds, tree)
                runs.append(measure(postgresql, Path(folder) / str(len(runs)), plan))
                sys.stderr.write(f"{runs[-1]}\n")
    _keep({"runs": runs, **compared(runs)}, args.out)
    return 0 if all(run["frames_lost"] == 0 for run in runs) else 1


def _keep(found: Any, file: Path | None) -> int:
    """Write and print the figures; return 0."""
    if file is not None:
        write_result(file, found)
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 0


def measure(postgresql: PostgresqlServer, folder: Path, plan: Plan) -> dict[str, Any]:
    """Return the figures of one run."""
    url = postgresql.new_database()
    names = [DEFAULT_CELL, *(f"cell-{number}" for number in range(1, plan.cells))]
    fleets = [Fleet(name, plan.nodes // plan.cells, plan.gpus, plan.job_nodes) for name in names]
    if plan.cells > 1:
        give(url, fleets)
    with ExitStack() as stack:
        addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
        pids = {name: stack.enter_context(_server(url, folder, name, addresses[name], plan)) for name in names}
        warm_s = WARM_UP_SHARE * plan.seconds
        courses = {name: Course(pid) for name, pid in pids.items()}
        with loading(fleets, addresses, plan.seconds, warm_s) as load:
            time.sleep(warm_s)
            database, commits = look(_postmaster(postgresql)), _commits(postgresql, url)
            began_s = time.time()
            time.sleep(max(plan.seconds - warm_s - 2.0, 1.0))
            ended_s = time.time()
            database_end, commits_end = look(_postmaster(postgresql)), _commits(postgresql, url)
            sent = load.results()
            received = sum(metric(address, "ingest_bytes_total") for address in addresses.values())
        looks = {name: course.stop() for name, course in courses.items()}
    took_s = ended_s - began_s
    busy = sum(cpu_s(found, began_s, ended_s) for found in looks.values()) / took_s
    samples_per_s = sum(one["samples_per_second"] for one in sent)
    return {
        "tree": "this" if plan.tree == HERE else "beside",
        "cells": plan.cells,
        "nodes": plan.nodes,
        "gpus": plan.gpus,
        "job_nodes": plan.job_nodes,
        "seconds": took_s,
        "samples_per_second": samples_per_s,
        "core_busy_ratio": busy,
        "cpu_seconds_per_million_samples": 1e6 * busy / samples_per_s,
        "postgresql_core_busy_ratio": (database_end.cpu_s - database.cpu_s) / took_s,
        "postgresql_commits_per_second": (commits_end - commits) / took_s,
        "rss_bytes_max": {name: max(one.rss_bytes for one in found) for name, found in looks.items()},
        "bytes_per_sample": received / max(sum(one["samples_acknowledged"] for one in sent), 1),
        "acknowledged_seconds_p99": max(one["acknowledged_seconds_settled"]["p99"] or 0.0 for one in sent),
        "frames_lost": sum(one["frames_lost"] for one in sent),
    }


def give(url: str, fleets: list[Fleet]) -> None:
    """Give each cell's jobs to it, before any server runs."""
    store = open_records(RecordsSettings(url), Path("/-"))
    try:
        now_s = time.time()
        entries = [
            JobCell(job=job, cell=fleet.cell, nodes=nodes, since_s=now_s, by="benchmark")
            for fleet in fleets
            for job, nodes in fleet.jobs().items()
        ]
        store.commit(Change(job_cells=tuple(entries)))
    finally:
        store.close()


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a sample costs with each number of cells, of what it costs with one: medians of repeated runs.

    Nothing without a run of one that kept up. With runs of another tree also what one costs, of what it costs there.
    """
    costs: dict[int, list[float]] = {}
    beside: list[float] = []
    for run in runs:
        if run["acknowledged_seconds_p99"] > LATE_S:
            continue
        of = costs.setdefault(run["cells"], []) if run["tree"] == "this" else beside
        of.append(run["cpu_seconds_per_million_samples"])
    if 1 not in costs:
        return {}
    base = statistics.median(costs.pop(1))
    times = {str(cells): statistics.median(several) / base for cells, several in costs.items()}
    found: dict[str, Any] = {"cpu_per_sample_times_one_cell": times, "asked_at_most": TIMES_MAX}
    if beside:
        found["one_cell_times_beside"] = base / statistics.median(beside)
    return found


def cpu_s(looks: list[Look], begin_s: float, end_s: float) -> float:
    """Return the CPU time between two moments, by the looks within."""
    within = [one for one in looks if begin_s <= one.time_s <= end_s]
    if len(within) < 2:
        raise RuntimeError(f"{end_s - begin_s:.0f} s are too short to be measured")
    first, last = within[0], within[-1]
    return (last.cpu_s - first.cpu_s) * (end_s - begin_s) / (last.time_s - first.time_s)


def metric(address: str, name: str) -> float:
    """Return a metric of a server, 0.0 where it has none."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30.0) as answer:
        lines = answer.read().decode().splitlines()
    return float(next((line.split()[-1] for line in lines if line.startswith(f"eagle_eye_{name} ")), 0.0))


def _server(url: str, folder: Path, name: str, address: str, plan: Plan) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.toml"
    cell = "" if name == DEFAULT_CELL else f'cell = "{name}"\n'
    file.write_text(f'[records]\nurl = "{url}"\n{cell}', encoding="utf-8")
    path = os.pathsep.join(map(str, [plan.tree, *sorted(part.parent for part in plan.tree.glob("*/eagle_eye"))]))
    command = [
        "env",
        f"PYTHONPATH={path}",
        sys.executable,
        "-m",
        "eagle_eye.cli.main",
        "server",
        "--config",
        str(file),
        "--listen",
        address,
    ]
    return program([*command, "--data", str(folder / name)], folder / f"{name}.log", f"http://{address}/leadz")


def _postmaster(postgresql: PostgresqlServer) -> int:
    return int((postgresql.folder / "data/postmaster.pid").read_text().splitlines()[0])


def _commits(postgresql: PostgresqlServer, url: str) -> int:
    database = url.partition("@/")[2].partition("?")[0]
    asked = f"SELECT xact_commit FROM pg_stat_database WHERE datname = '{database}'"
    return int(postgresql.execute(asked)[0][0])


if __name__ == "__main__":
    sys.exit(main())
