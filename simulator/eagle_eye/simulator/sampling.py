"""When each node's agent takes a row, which rows are lost, and its clock's errors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.simulator.arrays import Booleans, Floats, stream
from eagle_eye.simulator.story import Story
from eagle_eye.simulator.tracks import Quantity, Tracks

JITTER_MAX_SHARE = 0.45  # of the interval: rows stay in order


@dataclass(frozen=True, slots=True)
class Sampling:
    """``true_s`` and ``stamped_s`` (K, N): when a row was taken, in seconds from the start, and what its agent wrote.

    ``arrived`` (K, N): the row reached the server. ``device_arrived`` (K, N, G): so did the device's.
    """

    true_s: Floats
    stamped_s: Floats
    offset_s: Floats
    arrived: Booleans
    device_arrived: Booleans


def sample(story: Story, tracks: Tracks) -> Sampling:
    """Return the sampling times of the story's run."""
    scenario, layout = story.scenario, story.layout
    physics = story.physics
    rng = stream(scenario.seed, "sampling")
    rows, nodes = int(scenario.duration_s / scenario.interval_s), layout.nodes
    interval_s = scenario.interval_s
    phase_s = rng.uniform(0.0, interval_s, nodes)
    jitter_s = np.abs(rng.standard_normal((rows, nodes)))
    jitter_s *= min(physics.jitter_share * interval_s, physics.jitter_limit_s)
    np.minimum(jitter_s, JITTER_MAX_SHARE * interval_s, out=jitter_s)
    true_s = np.arange(rows)[:, None] * interval_s + phase_s + jitter_s
    skew_s = rng.standard_normal(nodes) * physics.clock_skew_s
    offset_s = skew_s + np.asarray(tracks.nodewise(Quantity.CLOCK_OFFSET, true_s)) + np.zeros_like(true_s)
    arrived = rng.random((rows, nodes)) >= physics.lost_ratio
    for _ in range(int(rng.poisson(physics.bursts_per_node_day * nodes * scenario.duration_s / 86_400))):
        first, node = int(rng.integers(rows)), int(rng.integers(nodes))
        arrived[first : first + int(rng.integers(2, 8)), node] = False
    device_arrived = np.ones((rows, nodes, layout.gpus), dtype=bool)
    for outage in story.outages:
        silent = (true_s[:, outage.node] >= outage.start_s) & (true_s[:, outage.node] < outage.end_s)
        if outage.device is None:
            arrived[silent, outage.node] = False
        else:
            device_arrived[silent, outage.node, outage.device] = False
    return Sampling(true_s, true_s + offset_s, offset_s, arrived, device_arrived)
