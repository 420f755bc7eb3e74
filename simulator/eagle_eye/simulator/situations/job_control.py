"""Situations in which somebody starts, stops or changes the job on purpose."""

from __future__ import annotations

import math
from dataclasses import replace

from eagle_eye.simulator import endings
from eagle_eye.simulator.story import EndlessStep, MissingRows, SimulatedAttempt, StopKind, Story


def warm_up(story: Story) -> None:
    """The job starts within the trace: nothing at first, then slow steps that compile and fill caches."""
    start_s = float(story.rng.uniform(5.0, 20.0))
    first_s = float(story.rng.uniform(20.0, 60.0))
    # Compilation and data set indices come before and in the first step, whatever a step takes later.
    factors = (first_s / story.job.step_s, 6.0, 2.5, 1.5, 1.2)
    story.attempts.append(SimulatedAttempt(start_s, 0, tuple(max(f, 1.0) for f in factors)))
    story.job = replace(story.job, first_step=0, checkpoint_every_s=math.inf)


def restart(story: Story) -> None:
    """Somebody else restarts the job: all ranks end, a new attempt begins on the same nodes."""
    stop_s = story.onset(0.35, 0.5)
    begin_s = stop_s + float(story.rng.uniform(20.0, 60.0))
    job = story.job
    lead_s = 3 * max(job.step_s, story.scenario.interval_s)
    again = job.first_step + int(0.7 * stop_s / job.step_s)
    story.attempts += [
        SimulatedAttempt(-lead_s, job.first_step, (), EndlessStep(stop_s, StopKind.SYMMETRIC)),
        SimulatedAttempt(begin_s, again, (5.0, 2.0, 1.2)),
    ]
    story.say(stop_s - 0.5, "job_state", state="completing", attempt=0)
    _end_all(story, stop_s)
    story.say(begin_s, "job_state", state="running", attempt=1)
    story.job = replace(job, checkpoint_every_s=math.inf)


def scancel(story: Story) -> None:
    """The user cancels the job: the scheduler says so, ranks end by SIGTERM."""
    moment_s = story.onset(0.5, 0.7)
    story.stop(moment_s, StopKind.SYMMETRIC)
    story.say(moment_s - float(story.rng.uniform(0.1, 1.5)), "job_state", state="cancelled", attempt=0)
    _end_all(story, moment_s)


def preempted(story: Story) -> None:
    """The scheduler takes the nodes for a job of higher priority: SIGTERM, and SIGKILL for those that linger."""
    moment_s = story.onset(0.5, 0.7)
    story.stop(moment_s, StopKind.SYMMETRIC)
    story.say(moment_s - float(story.rng.uniform(0.1, 1.5)), "job_state", state="preempted", attempt=0)
    lingering = story.culprit().node
    for node in range(story.layout.nodes):
        late = node == lingering
        code = endings.KILLED if late else endings.TERMINATED
        after_s = 30.0 if late else float(story.rng.uniform(0.0, 3.0))
        endings.end(story, story.places(node), moment_s + after_s, code)


def elastic_leave(story: Story) -> None:
    """An elastic job gives a node back: a new membership without it, its ranks say goodbye, the job goes on."""
    if story.layout.nodes < 2:
        return
    node, moment_s = story.culprit().node, story.onset()
    story.gone.append((moment_s, (node,)))
    for place in story.places(node):
        story.say(moment_s, "process_exit", node, place.device, exit_code=0, rank=story.rank(place), goodbye=True)
    story.say(moment_s + 5.0, "agent_stop", node, reason="node released")
    story.outages.append(MissingRows(node, moment_s + 5.0))


def _end_all(story: Story, moment_s: float) -> None:
    for node in range(story.layout.nodes):
        endings.end(story, story.places(node), moment_s + float(story.rng.uniform(0.0, 2.0)), endings.TERMINATED)
