"""Situations in which the job pauses or stumbles, and nobody is to blame."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eagle_eye.simulator.story import PlannedPause, Story
from eagle_eye.simulator.tracks import Quantity, Track

WRITE_BYTES_PER_S = 1.5e9  # per node, to the shared file system


def checkpoint(story: Story) -> None:
    """All ranks pause while the checkpoint is written; announced by the training code, or not."""
    announced = story.variant("announced", "unannounced") == "announced"
    _no_habits(story)
    length_s = story.scenario.duration_s
    start_s, every_s = story.onset(0.1, 0.3), float(story.rng.uniform(0.2, 0.4)) * length_s
    seconds = float(story.rng.uniform(8.0, 40.0))
    while start_s < length_s:
        story.pauses.append(
            PlannedPause("checkpoint", start_s, seconds, announced=announced, disk_bytes_per_s=WRITE_BYTES_PER_S)
        )
        start_s += every_s + seconds


def long_checkpoint(story: Story) -> None:
    """A checkpoint that takes a third of the trace, as on a slow file system; announced, and it ends."""
    _no_habits(story)
    seconds = float(story.rng.uniform(0.25, 0.4)) * story.scenario.duration_s
    story.pauses.append(
        PlannedPause("checkpoint", story.onset(0.3, 0.45), seconds, disk_bytes_per_s=0.3 * WRITE_BYTES_PER_S)
    )


def evaluation(story: Story) -> None:
    """The model is evaluated between training steps: forward passes only, the step count rests."""
    announced = story.variant("announced", "unannounced") == "announced"
    seconds = float(story.rng.uniform(0.1, 0.25)) * story.scenario.duration_s
    story.pauses.append(PlannedPause("evaluation", story.onset(), seconds, busy=0.6, announced=announced))


def lone_pause(story: Story) -> None:
    """Rank 0 saves, evaluates or compiles for 30 s to 10 minutes and says nothing of it; all others wait for it."""
    doing = story.variant("saves", "evaluates", "compiles")
    length_s = story.scenario.duration_s
    seconds = float(np.exp(story.rng.uniform(np.log(30.0), np.log(min(600.0, 0.5 * length_s)))))
    pause = PlannedPause(doing, story.onset(0.2, 0.4), seconds, announced=False, alone=True, cpus=0.6)
    if doing == "saves":
        pause = replace(pause, disk_bytes_per_s=WRITE_BYTES_PER_S)
    elif doing == "evaluates":
        pause = replace(pause, busy=0.6, cpus=1.2)
    else:
        pause = replace(pause, cpus=float(story.rng.uniform(0.9, 8.0)))
    story.pauses.append(pause)


def short_steps_pause(story: Story) -> None:
    """Steps of a fraction of a second, and pauses of 10 to 40 seconds in which the code does something else."""
    _no_habits(story)
    _shorten(story, float(story.rng.uniform(0.04, 0.1)))
    start_s, length_s = story.onset(0.08, 0.15), story.scenario.duration_s
    while start_s < length_s:
        seconds = float(story.rng.uniform(10.0, 40.0))
        story.pauses.append(
            PlannedPause("other", start_s, seconds, spins=bool(story.rng.random() < 0.5), announced=False)
        )
        start_s += seconds + float(story.rng.uniform(40.0, 120.0))


def storage_stall_short(story: Story) -> None:
    """The shared file system is slow for half a minute: all ranks wait for data, then all is well."""
    onset_s = story.onset()
    end_s = onset_s + float(story.rng.uniform(15.0, 40.0))
    story.change(Quantity.DATA_WAIT, float(story.rng.uniform(1.0, 4.0)) * story.job.step_s, onset_s, end_s=end_s)
    story.change(Quantity.IOWAIT, 0.1, onset_s, end_s=end_s)
    story.change(Quantity.IO_PRESSURE, 0.5, onset_s, end_s=end_s)
    story.change(Quantity.BLOCKED, 12.0, onset_s + 1.0, end_s=end_s)


def data_loader_hiccup(story: Story) -> None:
    """One rank waits for its data in a few steps, now and then."""
    at = story.culprit()
    for _ in range(3):
        onset_s = story.onset(0.2, 0.9)
        end_s = onset_s + float(story.rng.uniform(2, 5)) * story.job.step_s
        story.change(
            Quantity.DATA_WAIT, float(story.rng.uniform(0.3, 1.5)) * story.job.step_s, onset_s, at=at, end_s=end_s
        )


def periodic_gc(story: Story) -> None:
    """Python's garbage collector halts one rank in every k-th step."""
    at = story.culprit()
    every = int(story.rng.integers(10, 40))
    stall_s = float(story.rng.uniform(0.2, 0.6)) * story.job.step_s
    period_s = every * story.job.step_s
    story.tracks.append(
        Track(Quantity.STALL, stall_s, 0.0, nodes=(at.node,), device=at.device, period_s=period_s, duty=1.0 / every)
    )


def _shorten(story: Story, step_s: float) -> None:
    """Make all of a step shorter, unless steps are that short already."""
    job, factor = story.job, min(1.0, step_s / story.job.step_s)
    story.job = replace(
        job,
        step_s=job.step_s * factor,
        compute_s=job.compute_s * factor,
        communication_s=job.communication_s * factor,
        data_wait_s=job.data_wait_s * factor,
    )


def _no_habits(story: Story) -> None:
    story.job = replace(story.job, checkpoint_every_s=float("inf"))
