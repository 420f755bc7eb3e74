"""Jobs with one slow device, as the detectors of its causes see them."""

from __future__ import annotations

import dataclasses

import numpy as np

from eagle_eye.detectors.types import Detector, Verdict
from tests.detectors.windows import STEP_S, Story

COMPUTE_S = 0.3  # of a step of STEP_S
ACTIVITY = ("gpu_tensor", "gpu_nvlink_rx", "gpu_nvlink_tx", "gpu_pcie_rx", "gpu_pcie_tx")  # work done in a second
ROWS = 120
SICK_ROWS = 20
LONG_ROWS = 110  # as long as a job that reports no steps needs to show what it loses


def job(nodes: int = 6, gpus: int = 4, rows: int = ROWS) -> Story:
    """Return a healthy job with counters and ports, long enough for faults of a minute."""
    return Story(nodes=nodes, gpus=gpus, rows=rows).hardware().ports()


def one(verdicts: list[Verdict]) -> Verdict:
    """Return the only verdict."""
    assert len(verdicts) == 1, verdicts
    return verdicts[0]


def without(story: Story, *prefixes: str) -> Story:
    """Return the story on a site that lacks metrics."""
    for metrics in (story.device, story.node):
        for name in [name for name in metrics if name.startswith(prefixes)]:
            del metrics[name]
    return story


def hookless(story: Story) -> Story:
    """Return the story on a site whose training says nothing."""
    return without(story, "train_", "nccl_")


def hot(story: Story, column: int = 5, rows: int = SICK_ROWS, ratio: float = 0.8, celsius: float = 87.0) -> Story:
    """A GPU throttles for heat: hot, the clock down, power down, and the thermal bit."""
    device = story.device
    device["gpu_sm_clock_hertz"][-rows:, column] *= ratio
    device["gpu_power_watts"][-rows:, column] *= ratio
    device["gpu_temperature_celsius"][-rows:, column] = celsius
    device["gpu_throttle_reasons"][-rows:, column] = 0x20
    return held_up(story, column, rows, ratio)


def capped(story: Story, column: int = 5, rows: int = SICK_ROWS, ratio: float = 0.8) -> Story:
    """A GPU's power is held down: clock and power down, cooler than before."""
    device = story.device
    device["gpu_sm_clock_hertz"][-rows:, column] *= ratio
    device["gpu_power_watts"][-rows:, column] *= ratio
    device["gpu_temperature_celsius"][-rows:, column] -= 6
    return held_up(story, column, rows, ratio)


def held_up(story: Story, column: int, rows: int, ratio: float) -> Story:
    """One rank computes longer, so that all steps are longer, all others wait and all GPUs do less in a second."""
    device = story.device
    before = device["train_step_seconds"][-rows:].copy()
    device["train_compute_seconds"][-rows:, column] /= ratio
    longest = STEP_S + COMPUTE_S * (1 / ratio - 1)
    device["train_step_seconds"][-rows:] = np.maximum(before, longest)
    more = device["train_step_seconds"][-rows:] - before
    others = np.arange(len(story.series)) != column
    device["nccl_collective_seconds"][-rows:, others] += more[:, others]
    less = before / device["train_step_seconds"][-rows:]
    for name in device:
        if name.startswith(ACTIVITY):
            device[name][-rows:] *= less
    for name in ("node_rdma_rx_bytes_per_second", "node_rdma_tx_bytes_per_second"):
        story.node[name][-rows:] *= less[:, :1]
    return story


def longer_steps(story: Story, rows: int = SICK_ROWS, ratio: float = 1.2) -> Story:
    """All steps of the job take longer; the waits in collectives make up for it."""
    story.device["nccl_collective_seconds"][-rows:] += (ratio - 1) * story.device["train_step_seconds"][-rows:]
    story.device["train_step_seconds"][-rows:] *= ratio
    return story


def out_of_phase(story: Story, node: str) -> Story:
    """One node's agent ticks half an interval after all others: its rows are on lines of their own."""
    story.times_s = np.sort(np.concatenate([story.times_s - 0.5, story.times_s]))
    columns, place = story.column(node), story.nodes.index(node)
    for metrics, own in ((story.device, columns), (story.node, [place])):
        for name, values in metrics.items():
            both = np.full((2 * len(values), values.shape[1]), np.nan)
            both[::2] = values
            both[1::2, own] = values[:, own]
            both[::2, own] = np.nan
            metrics[name] = both
    return story


def idle(story: Story, rows: int) -> Story:
    """No GPU works in the newest rows: clocks, power and links are as the driver leaves them then."""
    for name in ("gpu_utilization_ratio", "gpu_tensor_active_ratio"):
        story.device[name][-rows:] = 0.0
    story.device["gpu_power_watts"][-rows:] = 120.0
    return story.standstill(rows)


def slower(story: Story, rows: int, ratio: float) -> Story:
    """All that the job moves in a second has become less."""
    for values in (story.device, story.node):
        for name in [name for name in values if name.startswith((*ACTIVITY, "node_rdma_rx", "node_rdma_tx"))]:
            values[name][-rows:] *= ratio
    return story


def repeated(story: Story, column: int, rows: int) -> Story:
    """The driver of one GPU hangs: what it read in the first of the newest rows is its answer in all of them."""
    for name, values in story.device.items():
        if name.startswith("gpu_"):
            values[-rows:, column] = values[-rows, column]
    return story


def first_said(detector: Detector, story: Story, onset_row: int) -> int | None:
    """Return after how many rows from the onset a verdict that may be acted on comes; None: never."""
    for rows in range(onset_row + 1, len(story.times_s) + 1):
        window = story.window()
        seen = dataclasses.replace(
            window,
            now_s=float(story.times_s[rows - 1]),
            times_s=window.times_s[:rows],
            node_times_s=window.node_times_s[:rows],
            device={name: values[:rows] for name, values in window.device.items()},
            node={name: values[:rows] for name, values in window.node.items()},
        )
        if any(v.confidence >= 0.9 and len(v.kinds) >= 2 for v in detector.detect(seen)):
            return rows - onset_row
    return None
