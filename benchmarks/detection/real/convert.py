"""Recorded series as trace folders, so that the engine judges them exactly as it judges a live job."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagle_eye.server.backtest.run import Backtest, VerdictLine
from eagle_eye.server.backtest.trace import FORMAT, Trace
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings

Floats = NDArray[np.floating[Any]]
START_S = 1_780_000_000.0  # of series without dates


def write_trace(
    folder: Path, job: str, interval_s: float, workers: Mapping[str, tuple[Floats, Mapping[str, Floats]]]
) -> Path:
    """Write a trace with one node of one device for each worker and return its folder.

    ``workers[node]`` is (times_s (K,), {metric: (K,)}); NaN where nothing was observed. The ranks are replicas of each
    other.
    """
    nodes = sorted(workers)
    folder.mkdir(parents=True)
    ends = [float(times_s[-1]) for times_s, _ in workers.values()]
    starts = [float(times_s[0]) for times_s, _ in workers.values()]
    header = {
        "format": FORMAT,
        "job": job,
        "interval_s": interval_s,
        "start": min(starts) - interval_s,
        "end": max(ends),
        "nodes": [{"node": node, "gpus": 1} for node in nodes],
        "ranks": [{"rank": i, "node": node, "device": 0, "dp": i, "pp": 0, "tp": 0} for i, node in enumerate(nodes)],
    }
    (folder / "trace.json").write_text(json.dumps(header), encoding="utf-8")
    metrics = sorted({metric for _, columns in workers.values() for metric in columns})
    tables = []
    for node in nodes:
        times_s, columns = workers[node]
        gap = np.full(len(times_s), np.nan)
        tables.append(
            pa.table(
                {
                    "time": times_s,
                    "node": pa.array([node] * len(times_s)),
                    "device": np.zeros(len(times_s), dtype=np.int16),
                    **{metric: np.asarray(columns.get(metric, gap), dtype=np.float64) for metric in metrics},
                }
            )
        )
    pq.write_table(pa.concat_tables(tables), folder / "samples.parquet")
    return folder


def judge(folder: Path, blind: Counter[str] | None = None) -> list[VerdictLine]:
    """Return what the engine says about a trace with default settings.

    ``blind`` grows by the judgements in which each detector could not tell, and under "" by all judgements: silence
    of a blind detector is no merit.
    """
    backtest = Backtest(Trace(folder), DetectionSettings(), PolicySettings())
    lines = list(backtest.run())
    if blind is not None:
        blind.update(backtest.blind)
        blind[""] += backtest.judgements
    return lines


def blind_ratios(blind: Counter[str]) -> dict[str, float]:
    """Return the share of judgements in which each detector could not tell."""
    return {name: round(count / blind[""], 4) for name, count in sorted(blind.items()) if name}


def counts(lines: Sequence[VerdictLine]) -> dict[str, int]:
    """Return how many verdicts there were by fault and action; a verdict that changes counts once for each."""
    found: dict[str, set[str]] = {}
    for line in lines:
        found.setdefault(f"{line.fault} -> {line.action}", set()).add(line.id)
    return {name: len(ids) for name, ids in sorted(found.items())}
