"""What one pass over a whole fleet costs: the engine's tick beside two off-the-shelf detectors, on the same data.

A pass of Eagle Eye is ``Engine.tick``: every detector judges the whole window. Taking in the frames is reported apart,
for it happens as they arrive. Beside it, in the same run and on the newest interval of the same data, one row a GPU:
scikit-learn's ``IsolationForest.score_samples`` and PyOD's ``ECOD.decision_function``, both fitted on 10,000 rows and
given one core. They judge single rows: no time, no peers, no verdict. Seconds of CPU, whoever else uses the machine;
medians of several passes; where some of
Eagle Eye's detectors look less often than every second, the mean shows it. Then the same for
smaller fleets, and ``eagle-eye backtest`` on a simulated trace of 32 nodes against real time.

The largest fleet is measured as many jobs, too: rows of numbers taken in as the server does (``Engine.observe_rows``),
and ``DetectionLoop.tick`` over a real store, the engine's pass and what is written because of it. Healthy first; then
every job hangs in the same moment, as when what they share fails, until each has its incident.

    python -m benchmarks.detection.cost --out benchmarks/results/cost.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import msgspec
import numpy as np
import psutil
from rich.console import Console
from rich.progress import track
from threadpoolctl import threadpool_limits

from benchmarks.detection import generate
from benchmarks.detection.fleets import ManyJobs
from benchmarks.detection.plan import Case
from eagle_eye.schema.frame import WIRE_VERSION, Block, Frame, Rank
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.backtest.run import Backtest
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings
from eagle_eye.server.monitor.detection_loop import DetectionLoop
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file

START_S = 1_780_000_000.0
STEP_S = 1.0  # one training step an interval
SEED = 0
FITTED_ROWS = 10_000
HUNG_S = 75  # a hang whose culprit nobody knows is reported after a minute
# 30 metrics of a GPU and of the rank on it: name, typical value, relative spread between rows.
METRICS: tuple[tuple[str, float, float], ...] = (
    ("gpu_utilization_ratio", 0.99, 0.005),
    ("gpu_tensor_active_ratio", 0.5, 0.02),
    ("gpu_sm_active_ratio", 0.8, 0.02),
    ("gpu_dram_active_ratio", 0.4, 0.02),
    ("gpu_memory_used_bytes", 7e10, 0.001),
    ("gpu_power_watts", 640.0, 0.02),
    ("gpu_power_limit_watts", 700.0, 0.0),
    ("gpu_temperature_celsius", 62.0, 0.03),
    ("gpu_memory_temperature_celsius", 75.0, 0.03),
    ("gpu_sm_clock_hertz", 1.75e9, 0.003),
    ("gpu_memory_clock_hertz", 2.6e9, 0.0),
    ("gpu_throttle_reasons", 0.0, 0.0),
    ("gpu_ecc_corrected_total", 0.0, 0.0),
    ("gpu_ecc_uncorrected_total", 0.0, 0.0),
    ("gpu_remapped_rows_total", 0.0, 0.0),
    ("gpu_pcie_rx_bytes_per_second", 4e9, 0.05),
    ("gpu_pcie_tx_bytes_per_second", 4e9, 0.05),
    ("gpu_pcie_link_width", 16.0, 0.0),
    ("gpu_pcie_link_generation", 5.0, 0.0),
    ("gpu_nvlink_rx_bytes_per_second", 9e10, 0.03),
    ("gpu_nvlink_tx_bytes_per_second", 9e10, 0.03),
    ("gpu_nvlinks_active", 18.0, 0.0),
    ("train_step", 0.0, 0.0),  # counts
    ("train_step_seconds", STEP_S, 0.0),
    ("train_compute_seconds", 0.8 * STEP_S, 0.004),
    ("train_loss", 2.5, 0.0),
    ("nccl_sequence", 0.0, 0.0),  # counts
    ("nccl_completed_sequence", 0.0, 0.0),  # counts
    ("nccl_collective_seconds", 0.15 * STEP_S, 0.02),
    ("nccl_bus_bandwidth_bytes_per_second", 3e11, 0.02),
)
COUNTED = {"train_step": 1.0, "nccl_sequence": 40.0, "nccl_completed_sequence": 40.0}  # a step


class Fleet:
    """One job on all nodes, healthy: frames of one interval after the other."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self.nodes, self.gpus = nodes, gpus
        self._rng = np.random.default_rng(SEED)
        self._names = [name for name, _, _ in METRICS]
        self._typical = np.array([value for _, value, _ in METRICS])
        self._spread = np.array([spread for _, _, spread in METRICS])
        self._keys: list[int | str] = list(range(gpus))
        self._ranks = [
            [Rank("fleet", n * gpus + g, nodes * gpus, g, role=f"pp{n % 4}") for g in range(gpus)] for n in range(nodes)
        ]
        self.newest = np.zeros((nodes * gpus, len(METRICS)))

    def frames(self, line: int) -> list[Frame]:
        """Return every node's frame of an interval; ``newest`` (rows, metrics) then holds its values."""
        shape = (self.nodes, len(METRICS), self.gpus)
        noise = self._rng.standard_normal(shape, dtype=np.float32).astype(np.float64)
        values = self._typical[None, :, None] * (1 + self._spread[None, :, None] * noise)
        for index, name in enumerate(self._names):
            if name in COUNTED:
                values[:, index, :] = COUNTED[name] * (line + 1)
        self.newest = values.transpose(0, 2, 1).reshape(-1, len(METRICS))
        return [self._frame(node, line, values[node]) for node in range(self.nodes)]

    def _frame(self, node: int, line: int, values: np.ndarray[Any, np.dtype[np.float64]]) -> Frame:
        block = Block(Scope.DEVICE, self._keys, self._names, values.astype("<f8").tobytes())
        return Frame(
            version=WIRE_VERSION,
            node=f"node{node:05d}",
            boot_id="b",
            stream="s",
            sequence=line + 1,
            time_s=START_S + line + 1.0,
            interval_s=1.0,
            agent_version="benchmark",
            job="fleet",
            ranks=self._ranks[node],
            blocks=[block],
        )


def fleet_cost(nodes: int, gpus: int, window_s: float, warm: int, passes: int) -> dict[str, Any]:
    """Return what ticks and frames cost a fleet of this size, and the other detectors on its newest interval."""
    fleet = Fleet(nodes, gpus)
    settings = msgspec.structs.replace(DetectionSettings(), window_s=window_s)
    engine = Engine(settings, watching_since_s=START_S)
    before_bytes = psutil.Process().memory_info().rss
    observing, ticking = [], []
    verdicts, blind = 0, set[str]()
    for line in range(warm + passes):
        frames = fleet.frames(line)
        began_s = process_time()
        for frame in frames:
            engine.observe(frame, frame.time_s)
        observed_s = process_time()
        judgements = engine.tick(START_S + line + 1.2)
        ticked_s = process_time()
        if line >= warm:
            observing.append(observed_s - began_s)
            ticking.append(ticked_s - observed_s)
        verdicts = sum(len(judgement.verdicts) for judgement in judgements)
        blind = {name for judgement in judgements for name in judgement.blind}
    rows = nodes * gpus
    result: dict[str, Any] = {
        "nodes": nodes,
        "gpus_a_node": gpus,
        "metrics": len(METRICS),
        "rows": rows,
        "values": rows * len(METRICS),
        "window_s": window_s,
        "lines_in_window": min(warm + passes, int(window_s)),
        "verdicts": verdicts,
        "blind": sorted(blind),
        "engine_rss_bytes": psutil.Process().memory_info().rss - before_bytes,
        "eagle_eye_tick": _figure(ticking, rows),
        "eagle_eye_observe": _figure(observing, rows),
    }
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", category=RuntimeWarning)  # ECOD on metrics that are the same everywhere
        result.update({name: _figure(list(_timed(run, passes)), rows) for name, run in _others(fleet.newest)})
    return result


class _Clock:
    """The time of the row that came last."""

    def __init__(self) -> None:
        self.time_s = START_S

    def now_s(self) -> float:
        return self.time_s

    def monotonic_s(self) -> float:
        return self.time_s - START_S


def jobs_cost(nodes: int, gpus: int, nodes_a_job: int, warm: int, passes: int) -> dict[str, Any]:
    """Return what the detection loop costs with many jobs, healthy and with all of them hung."""
    fleet = ManyJobs(nodes, gpus, nodes_a_job, START_S)
    before_bytes = psutil.Process().memory_info().rss
    with tempfile.TemporaryDirectory() as folder:
        store, clock = open_file(Path(folder) / RECORDS_FILE), _Clock()
        engine = Engine(DetectionSettings(), watching_since_s=START_S)
        watch = DetectionLoop(engine, store, clock, PolicySettings(), "http://localhost")
        taken: list[float] = []
        ticked: list[float] = []
        for line in range(warm + passes + HUNG_S):
            arrived = fleet.rows(line, hung=line >= warm + passes)
            clock.time_s = START_S + line + 0.5
            began_s = process_time()
            engine.observe_rows(arrived)
            observed_s = process_time()
            watch.tick(clock.now_s())
            taken.append(observed_s - began_s)
            ticked.append(process_time() - observed_s)
        incidents = len(store.open_incidents())
        store.close()
    rows = nodes * gpus
    return {
        "nodes": nodes,
        "nodes_a_job": nodes_a_job,
        "jobs": fleet.jobs,
        "samples": fleet.samples,
        "healthy": _figure(ticked[warm : warm + passes], rows, fleet.samples),
        "all_hang": _figure(ticked[warm + passes :], rows, fleet.samples),
        "incidents": incidents,
        "observe_rows": _figure(taken[warm:], rows, fleet.samples),
        "engine_rss_bytes": psutil.Process().memory_info().rss - before_bytes,
    }


def _others(data: np.ndarray[Any, np.dtype[np.float64]]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the off-the-shelf detectors, fitted, as something to call for one pass over the data."""
    from pyod.models.ecod import ECOD
    from sklearn.ensemble import IsolationForest

    fitted = data[np.random.default_rng(SEED).permutation(len(data))[:FITTED_ROWS]]
    forest = IsolationForest(random_state=SEED).fit(fitted)
    yield "isolation_forest_score_samples", lambda: forest.score_samples(data)
    ecod = ECOD(n_jobs=1)
    ecod.fit(fitted)
    yield "ecod_decision_function", lambda: ecod.decision_function(data)


def _timed(run: Callable[[], object], passes: int) -> Iterator[float]:
    for _ in range(passes):
        began_s = process_time()
        run()
        yield process_time() - began_s


def _figure(seconds: list[float], rows: int, values: int | None = None) -> dict[str, float]:
    """Return what passes cost over so many GPUs' rows and values (None: METRICS of each row)."""
    median_s = statistics.median(seconds)
    return {
        "median_s": round(median_s, 5),
        "mean_s": round(statistics.fmean(seconds), 5),
        "max_s": round(max(seconds), 5),
        "us_a_row": round(1e6 * median_s / rows, 4),
        "us_a_value": round(1e6 * median_s / (values or rows * len(METRICS)), 5),
    }


def backtest_speed(nodes: int, minutes: float) -> dict[str, float]:
    """Return how many times faster than real time a healthy simulated trace is judged, reading it included."""
    case = Case(
        key="cost",
        kind="healthy",
        fault="none",
        seed=SEED,
        nodes=nodes,
        gpus=8,
        minutes=minutes,
        step_s=2.0,
        interval_s=1.0,
        strength="medium",
        creeping=False,
        background=None,
    )
    with generate.written(generate.record(case), "full") as folder:
        began_s = perf_counter()
        backtest = Backtest(Trace(folder), DetectionSettings(), PolicySettings())
        verdicts = len(list(backtest.run()))
        took_s = perf_counter() - began_s
    return {
        "nodes": nodes,
        "trace_s": 60 * minutes,
        "took_s": round(took_s, 2),
        "times_real_time": round(60 * minutes / took_s, 1),
        "verdicts": verdicts,
    }


def main() -> int:
    """Measure and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_250, 5_000, 12_500])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--window", type=float, default=60.0, help="seconds that detectors see (default 60)")
    parser.add_argument(
        "--warm",
        type=int,
        default=60,
        help="intervals fed before the first pass counts (default 60: the window is full)",
    )
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--jobs", type=int, nargs="*", default=[128, 16], help="nodes a job, for fleets of many jobs")
    parser.add_argument("--minutes", type=float, default=20.0, help="of the trace that is backtested; 0 for none")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    console = Console(stderr=True)
    sizes = track(sorted(args.nodes), "fleet sizes", console=console, disable=not sys.stderr.isatty())
    fleets = [fleet_cost(nodes, args.gpus, args.window, args.warm, args.passes) for nodes in sizes]
    results: dict[str, Any] = {"fleets": fleets}
    if len(fleets) > 1:
        # 1 where the cost grows as the nodes do; the slope of the logarithms, by least squares.
        nodes = np.log([fleet["nodes"] for fleet in fleets])
        ticks = np.log([fleet["eagle_eye_tick"]["median_s"] for fleet in fleets])
        results["tick_growth_exponent"] = round(float(np.polyfit(nodes, ticks, 1)[0]), 3)
    results["many_jobs"] = [
        jobs_cost(max(args.nodes), args.gpus, nodes_a_job, args.warm, args.passes) for nodes_a_job in args.jobs
    ]
    if args.minutes > 0:
        results["backtest"] = backtest_speed(32, args.minutes)
    text = json.dumps(results, indent=1) + "\n"
    sys.stdout.write(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
