"""Spare nodes that the job was given but does not use: no rank runs there until they replace another node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eagle_eye.simulator.arrays import Floats, stream
from eagle_eye.simulator.job import hire
from eagle_eye.simulator.recording import Recording
from eagle_eye.simulator.story import Death, StopKind, Story


def idle(story: Story, nodes: int) -> Story:
    """Return the story of ``nodes`` more nodes beside those of a job: nothing runs on them."""
    layout, scenario = story.layout, story.scenario
    letters, first = layout.names[-1][:2], int(layout.names[-1][2:]) + 1
    layout = replace(
        layout,
        names=tuple(f"{letters}{first + n:04d}" for n in range(nodes)),
        tp=1,
        pp=1,
        dp=nodes * layout.gpus,
        switch=layout.switch[-1:] * nodes,
        link_switch=layout.link_switch[-1:] * nodes,
        models=layout.models[-1:] * nodes,
    )
    scenario = replace(scenario, fault="none", background=None, nodes=nodes, habits=False)
    rng = stream(scenario.seed, "spares")
    reported = Story(scenario, layout, hire(scenario, layout, story.physics), rng, physics=story.physics)
    before_s = -max(reported.job.step_s, scenario.interval_s)
    reported.stop(before_s, StopKind.SYMMETRIC)
    reported.deaths.append(Death(before_s, reported.everywhere()))
    return reported


def beside(job: Recording, spares: Recording) -> Recording:
    """Return the job's recording with the spare nodes' rows; membership, events and labels are the job's."""
    one, other = job.layout, spares.layout
    layout = replace(
        one,
        names=one.names + other.names,
        switch=one.switch + other.switch,
        link_switch=one.link_switch + other.link_switch,
        models=one.models + other.models,
    )

    def joined(values: dict[str, Floats], more: dict[str, Floats]) -> dict[str, Floats]:
        return {
            name: np.concatenate([found, _none(more.get(name), found, other.nodes)], axis=1)
            for name, found in values.items()
        }

    return replace(
        job,
        layout=layout,
        time=np.concatenate([job.time, spares.time], axis=1),
        true_time=np.concatenate([job.true_time, spares.true_time], axis=1),
        arrived=np.concatenate([job.arrived, spares.arrived], axis=1),
        device_arrived=np.concatenate([job.device_arrived, spares.device_arrived], axis=1),
        device=joined(job.device, spares.device),
        node=joined(job.node, spares.node),
        link=joined(job.link, spares.link),
    )


def _none(values: Floats | None, like: Floats, nodes: int) -> Floats:
    """Return the values; where the spares' own job would not report them, nothing was observed."""
    if values is not None:
        return values.astype(like.dtype, copy=False)
    return np.full((len(like), nodes, *like.shape[2:]), np.nan, dtype=like.dtype)
