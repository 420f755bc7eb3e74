"""When a site reads its sources: an agent all of a node's at once, a Prometheus each exporter at moments of its own.

A Prometheus spreads its targets over their scrape interval, so that the exporters of one node are read at different
moments, at intervals of their own, and each may miss scrapes that the other does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from eagle_eye.simulator.arrays import Booleans, Floats, Integers, stream
from eagle_eye.simulator.recording import Recording
from eagle_eye.simulator.second_physics import Choice, Range

# Exporters, by what they read.
GPU_EXPORTER, NODE_EXPORTER = "dcgm-exporter", "node_exporter"
INTERVALS_S: Mapping[str, Choice] = {
    GPU_EXPORTER: Choice((15.0, 30.0), (0.7, 0.3), "15 s in vendors' examples; 30 s is its own collecting interval"),
    NODE_EXPORTER: Choice((15.0, 30.0, 60.0), (0.7, 0.2, 0.1), "15 s in examples to Prometheus' default of a minute"),
}
RANGES: Mapping[str, Range] = {
    "jitter_s": Range(0.001, 0.5, "within 2 ms timestamps are aligned; busy servers are later; assumed", log=True),
    "missed_ratio": Range(0.0003, 0.03, "scrapes that time out, beside the node's lost rows; assumed", log=True),
    "restarts_per_day": Range(0.05, 3.0, "of an exporter: upgrades, evictions, its own crashes; assumed", log=True),
    "restart_s": Range(5.0, 120.0, "from a process to a pod whose image is pulled; assumed", log=True),
}


class Scraping(NamedTuple):
    """How a site's Prometheus scrapes one kind of exporter."""

    interval_s: float
    jitter_s: float  # standard deviation
    missed_ratio: float
    restarts_per_day: float
    restart_s: float


class Reads(NamedTuple):
    """When one source of each node is read: (R, N).

    ``row`` is the recording's row that it shows, ``time`` when, in Unix seconds, ``here`` whether an answer came.
    ``rows`` is over how many rows counters have grown since the last answer.
    """

    row: Integers
    time: Floats
    here: Booleans
    rows: Integers


def with_each_row(recording: Recording) -> Reads:
    """Return the reads of an agent, which writes its clock's time."""
    row = np.broadcast_to(np.arange(len(recording.time))[:, None], recording.time.shape)
    return Reads(row, recording.time, recording.arrived, np.ones_like(row))


def scraping(seed: int, exporter: str) -> Scraping:
    """Return how the site of this seed scrapes an exporter; each number from a stream of its own."""
    choice = INTERVALS_S[exporter]
    every = int(stream(seed, f"{exporter} interval_s").choice(len(choice.values), p=choice.odds))
    drawn = {
        name: span.low * (span.high / span.low) ** float(stream(seed, f"{exporter} {name}").random())
        for name, span in RANGES.items()
    }
    return Scraping(interval_s=choice.values[every], **drawn)


def of_exporter(recording: Recording, exporter: str, how: Scraping) -> Reads:
    """Return the scrapes of one exporter of each node, at moments that Prometheus' clock gives."""
    true_s = recording.true_time - recording.start
    nodes = true_s.shape[1]
    seconds, interval_s = recording.scenario.duration_s, max(how.interval_s, recording.scenario.interval_s)
    count = int(seconds / interval_s)
    rng = stream(recording.scenario.seed, f"{exporter} scrapes")
    offset_s = rng.uniform(0.0, interval_s, nodes)
    late_s = np.abs(rng.normal(0.0, how.jitter_s, (count, nodes)))
    time_s = np.arange(count)[:, None] * interval_s + offset_s + np.minimum(late_s, interval_s / 3)
    row = np.stack([np.searchsorted(true_s[:, n], time_s[:, n], side="right") - 1 for n in range(nodes)], axis=1)
    here = (row >= 0) & (time_s < seconds) & (rng.random(time_s.shape) >= how.missed_ratio)
    for _ in range(int(rng.poisson(how.restarts_per_day * nodes * seconds / 86_400))):
        node, begin_s = int(rng.integers(nodes)), float(rng.uniform(0.0, seconds))
        here[(time_s[:, node] >= begin_s) & (time_s[:, node] < begin_s + how.restart_s), node] = False
    row = np.maximum(row, 0)
    here &= np.take_along_axis(recording.arrived, row, axis=0)
    return Reads(row, np.round(recording.start + time_s, 3), here, _since_last(row, here))


def _since_last(row: Integers, here: Booleans) -> Integers:
    """Return over how many rows a counter has grown since the last answer: (R, N), at least one."""
    answered = np.maximum.accumulate(np.where(here, row, -1), axis=0)
    before = np.vstack([np.full_like(row[:1], -1), answered[:-1]])
    grown: Integers = np.maximum(row - before, 1)
    return grown
