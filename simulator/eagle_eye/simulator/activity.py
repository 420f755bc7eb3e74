"""GPU activity in each row's interval: busy, waiting inside a collective, idle; and the network traffic.

A GPU that waits in a collective spins in a kernel: it counts as utilised while its tensor cores are idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.simulator.arrays import Booleans, Floats
from eagle_eye.simulator.story import Story
from eagle_eye.simulator.timing import Timeline

SPREAD_TRAFFIC = 0.8  # of the bytes that sharded parameters move before the step's end


@dataclass(frozen=True, slots=True)
class RowActivity:
    """Shares of each row's interval: ``busy``, ``idle`` (no kernel) (K, N, G); ``paused`` of ranks alive (K, N).

    ``steps`` (K, N): training steps' worth of traffic between nodes per second.
    """

    busy: Floats
    idle: Floats
    steps: Floats


def account(story: Story, timeline: Timeline, times_s: Floats, dead: Booleans) -> RowActivity:
    """Return the GPUs' activity between each row and the one before it."""
    interval_s = story.scenario.interval_s
    edges_s = np.vstack([times_s[:1] - interval_s, times_s])
    spans_s = np.diff(edges_s, axis=0)
    busy, idle = _integrals(timeline, edges_s)
    spans = spans_s[:, :, None]
    busy = (np.diff(busy, axis=0) / spans).astype(np.float32)
    idle = (np.diff(idle, axis=0) / spans).astype(np.float32)
    for begin_s, end_s, pause in timeline.pauses:
        share = overlap(edges_s[:-1], edges_s[1:], begin_s, end_s)[:, :, None].astype(np.float32)
        if pause.alone:
            busy[:, 0, :1] += share[:, 0] * pause.busy
        else:
            busy += share * pause.busy
        if pause.spins:
            idle[:, 0, :1] += share[:, 0] * (1.0 - pause.busy)
        else:
            idle += share * (1.0 - pause.busy)
    busy[dead] = 0.0
    idle[dead] = 1.0
    np.clip(busy, 0.0, 1.0, out=busy)
    np.clip(idle, 0.0, 1.0, out=idle)
    return RowActivity(busy, idle, np.diff(_traffic(story, timeline, edges_s), axis=0) / spans_s)


def overlap(from_s: Floats, to_s: Floats, begin_s: float, end_s: float) -> Floats:
    """Return the share of each interval that lies between two moments."""
    inside = np.minimum(to_s, end_s) - np.maximum(from_s, begin_s)
    shares: Floats = np.clip(inside, 0.0, None) / (to_s - from_s)
    return shares


def _integrals(timeline: Timeline, edges_s: Floats) -> tuple[Floats, Floats]:
    """Return the seconds that each rank was busy, and without work, up to each edge, (K+1, N, G)."""
    compute = timeline.compute_s
    work = compute if timeline.stall_s is None else compute - timeline.stall_s
    without = timeline.data_wait_s if timeline.stall_s is None else timeline.data_wait_s + timeline.stall_s
    current = np.searchsorted(timeline.start_s, edges_s, side="right") - 1
    early = (current < 0)[:, :, None]
    current = np.maximum(current, 0)
    nodes, devices = compute.shape[1:]
    at = (current[:, :, None], np.arange(nodes)[None, :, None], np.arange(devices)[None, None, :])
    into_s = (edges_s - timeline.start_s[current])[:, :, None]
    wait_s, arrival_s = timeline.data_wait_s[at], timeline.arrival_s[at]
    # From the data's arrival to the last reduce-scatter a rank computes at an even rate, then it waits.
    progress = np.clip((into_s - wait_s) / np.maximum(arrival_s - wait_s, 1e-6), 0.0, 1.0)
    busy = _before(work)[at] + work[at] * progress
    idle = _before(without)[at] + np.minimum(into_s, wait_s)
    if timeline.stall_s is not None:
        idle += timeline.stall_s[at] * progress
    return np.where(early, 0.0, busy), np.where(early, 0.0, idle)


def _before(per_step: Floats) -> Floats:
    """Return the sum over all earlier steps, same shape, float64."""
    total = np.cumsum(per_step, axis=0, dtype=np.float64)
    total[1:] = total[:-1]
    total[:1] = 0.0
    return total


def _traffic(story: Story, timeline: Timeline, edges_s: Floats) -> Floats:
    """Return how many steps' traffic has crossed the network up to each edge, (K+1, N)."""
    early = SPREAD_TRAFFIC if story.job.spread_collectives else 0.15
    knots_s, amounts = [], []
    total = 0.0
    finish = np.where(timeline.finished, timeline.end_s, np.nan)
    for index, (start_s, end_s) in enumerate(zip(timeline.start_s, finish, strict=True)):
        if np.isnan(end_s):
            stop = timeline.attempts[int(timeline.attempt[index])].stop
            stop_s = start_s if stop is None else max(stop.time_s, start_s)
            knots_s += [start_s, stop_s + 1e-6]
            amounts += [total, total + 0.5 * early]
            total += 0.5 * early
            continue
        exchange_s = min(float(timeline.communication_s[index]), 0.95 * (end_s - start_s))
        knots_s += [start_s, end_s - exchange_s, end_s]
        amounts += [total, total + early, total + 1.0]
        total += 1.0
    return np.interp(edges_s, knots_s, amounts)
