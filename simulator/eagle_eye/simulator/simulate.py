"""The whole simulation: from a scenario to a recording."""

from __future__ import annotations

import math

import numpy as np

from eagle_eye.schema.metrics import BY_NAME
from eagle_eye.simulator.activity import account
from eagle_eye.simulator.announcements import announce
from eagle_eye.simulator.arrays import Floats, stream
from eagle_eye.simulator.checkpoint_rows import checkpoint_rows, keeps
from eagle_eye.simulator.gpu_rows import GpuRows
from eagle_eye.simulator.host_rows import HostRows
from eagle_eye.simulator.instruments import read
from eagle_eye.simulator.job import hire
from eagle_eye.simulator.layout import lay_out
from eagle_eye.simulator.names import FAULTS, SITUATIONS
from eagle_eye.simulator.recording import Membership, RecordedEvent, RecordedLabel, Recording
from eagle_eye.simulator.sampling import Sampling, sample
from eagle_eye.simulator.scenario import Scenario, WrongScenario
from eagle_eye.simulator.second_physics import physics_of
from eagle_eye.simulator.signals import learn
from eagle_eye.simulator.spares import beside, idle
from eagle_eye.simulator.story import PlannedPause, Story
from eagle_eye.simulator.timing import Clockwork, Timeline
from eagle_eye.simulator.tracks import Tracks
from eagle_eye.simulator.training_rows import TrainingRows

EPOCH_S = 1_767_225_600.0  # 2026-01-01; seeds start at different hours of that year
# What a restart costs a day's training: 600 s of the 24 h that remain.
RESTART_COST_RATIO = 600.0 / 86_400.0
# Situations that end or change the job leave no room for a fault beside them.
ENDING = frozenset({"restart", "scancel", "preempted", "elastic_leave"})


def simulate(scenario: Scenario) -> Recording:
    """Return the recording of a scenario; the same scenario always gives the same one. Raises WrongScenario."""
    return record(tell(scenario))


def record(story: Story) -> Recording:
    """Return the recording of a story, its spare nodes beside the job's."""
    recording = _of_one(story)
    spares = story.physics.spare_nodes
    return beside(recording, _of_one(idle(story, spares))) if spares else recording


def _of_one(story: Story) -> Recording:
    scenario = story.scenario
    tracks = Tracks(story.tracks, story.layout.nodes, story.layout.gpus)
    timeline = Clockwork(story, tracks).run(scenario.duration_s)
    slowdown = _slowdown(story, timeline)
    announce(story, timeline)
    sampling = sample(story, tracks)
    signals = learn(story, timeline, tracks)
    training = TrainingRows(story, timeline, sampling)
    device: dict[str, Floats] = {}
    for name, values in training.metrics(signals, tracks):
        device[name] = _kept(name, values)
    activity = account(story, timeline, sampling.true_s, training.dead)
    for name, values in GpuRows(story, tracks, sampling.true_s, activity, training.dead).metrics():
        device[name] = _kept(name, values)
    hosts = HostRows(story, tracks, timeline, sampling, activity, training.dead)
    node = {name: _kept(name, values) for name, values in hosts.metrics()}
    if keeps(scenario):
        node |= {
            name: _kept(name, values) for name, values in checkpoint_rows(device["train_step"], scenario.interval_s)
        }
    link = {name: _kept(name, values) for name, values in hosts.links().items()}
    _blank(story, sampling, device)
    if not story.physics.own:
        device, node, link = (read(values, story.physics, scenario.interval_s) for values in (device, node, link))
    start = EPOCH_S + float(stream(scenario.seed, "start").integers(0, 360 * 24)) * 3600.0
    return Recording(
        scenario=scenario,
        layout=story.layout,
        job=story.job.name,
        start=start,
        end=start + scenario.duration_s,
        time=np.round(start + sampling.stamped_s, 3),
        true_time=np.round(start + sampling.true_s, 3),
        arrived=sampling.arrived,
        device_arrived=sampling.device_arrived,
        device=device,
        node=node,
        link=link,
        members=_members(story, timeline, start),
        events=_events(story, sampling, start),
        labels=_labels(story, start, slowdown),
        slowdown=slowdown,
        packed=story.job.packed_from_s <= 0,
        exports_xid=story.job.exports_xid,
    )


def tell(scenario: Scenario) -> Story:
    """Return the scenario's story: its causes, without their effects."""
    physics = physics_of(scenario)
    layout = lay_out(scenario, physics)
    job = hire(scenario, layout, physics)
    story = Story(scenario, layout, job, stream(scenario.seed, f"story {scenario.fault}"), physics=physics)
    if scenario.background is not None and (scenario.background not in SITUATIONS or scenario.background in ENDING):
        expected = ", ".join(name for name in SITUATIONS if name not in ENDING)
        raise WrongScenario(f"background is {scenario.background!r}; expected one of {expected}")
    for name in (scenario.background or "none", scenario.fault):
        teller = SITUATIONS.get(name) or FAULTS.get(name)
        if teller is None:
            raise WrongScenario(f"fault is {name!r}; --list shows the faults and situations that there are")
        story.background_tracks = len(story.tracks)
        teller.tell(story)
    job = story.job
    moment_s = 0.5 * job.checkpoint_every_s
    while moment_s < scenario.duration_s:
        story.pauses.append(
            PlannedPause(
                "checkpoint", moment_s, job.checkpoint_s, announced=job.checkpoint_announced, disk_bytes_per_s=1.5e9
            )
        )
        moment_s += job.checkpoint_every_s + job.checkpoint_s
    if physics.other_pauses and scenario.habits:
        _pause(story)
    return story


def _pause(story: Story) -> None:
    """Add evaluations and other pauses of random length, some unannounced; none in which a fault begins."""
    physics, length_s = story.physics, story.scenario.duration_s
    rng = stream(story.scenario.seed, "pauses")
    for _ in range(int(rng.poisson(physics.other_pauses * length_s / 3600.0))):
        start_s, seconds = float(rng.uniform(0.0, length_s)), float(rng.uniform(*physics.other_pause_s))
        announced = bool(rng.random() < physics.announced_odds)
        kind = "evaluation" if rng.random() < 0.6 else "other"
        if not any(start_s - 2 * story.job.step_s < label.start_s < start_s + 2 * seconds for label in story.labels):
            story.pauses.append(
                PlannedPause(kind, start_s, seconds, physics.other_pause_busy, bool(rng.random() < 0.7), announced)
            )


def _slowdown(story: Story, timeline: Timeline) -> float:
    """Return how much longer the labelled fault makes steps, against the same run without it."""
    if not story.labels or any(a.stop for a in timeline.attempts):
        return 0.0
    label = story.labels[0]
    calm = Tracks(story.tracks[: story.background_tracks], story.layout.nodes, story.layout.gpus)
    healthy = Clockwork(story, calm).run(story.scenario.duration_s)

    def mean_s(run: Timeline) -> float:
        # The last part of the trace: what grew slowly has grown.
        after = (run.start_s > label.start_s + 0.5 * (story.scenario.duration_s - label.start_s)) & run.finished
        return float((run.end_s - run.start_s)[after].mean()) if after.any() else math.nan

    with_s, without_s = mean_s(timeline), mean_s(healthy)
    return with_s / without_s - 1.0 if math.isfinite(with_s) and math.isfinite(without_s) else 0.0


def _kept(name: str, values: Floats) -> Floats:
    """Return the values in the width in which they are kept: float64 for counters and sequences."""
    return values.astype(np.float64 if BY_NAME[name].exact else np.float32, copy=False)


def _blank(story: Story, sampling: Sampling, device: dict[str, Floats]) -> None:
    for blank in story.blanks:
        times_s = sampling.true_s[:, blank.node]
        silent = np.flatnonzero((times_s >= blank.start_s) & (times_s < blank.end_s))
        where = slice(None) if blank.device is None else slice(blank.device, blank.device + 1)
        for name, values in device.items():
            if name.startswith(blank.prefix):
                values[silent, blank.node, where] = np.nan


def _members(story: Story, timeline: Timeline, start: float) -> tuple[Membership, ...]:
    layout = story.layout
    stage, replica, lane = layout.stage(), layout.replica(), layout.lane()

    def ranks(without: tuple[int, ...] = ()) -> tuple[tuple[int, str, int, int, int, int], ...]:
        places = [(n, g) for n in range(layout.nodes) if n not in without for g in range(layout.gpus)]
        return tuple(
            (rank, layout.names[n], g, int(replica[n, g]), int(stage[n, g]), int(lane[n, g]))
            for rank, (n, g) in enumerate(places)
        )

    found = [Membership(start, 0, ranks())]
    found += [
        Membership(start + attempt.start_s, number, ranks())
        for number, attempt in enumerate(timeline.attempts)
        if number
    ]
    found += [Membership(start + left_s, len(found), ranks(nodes)) for left_s, nodes in story.gone]
    return tuple(found)


def _events(story: Story, sampling: Sampling, start: float) -> tuple[RecordedEvent, ...]:
    names, interval_s = story.layout.names, story.scenario.interval_s
    rows = len(sampling.true_s)
    found = []
    for time_s, kind, node, device, attributes in story.planned_events:
        if time_s > story.scenario.duration_s:
            continue
        offset_s = (
            0.0 if node is None else float(sampling.offset_s[min(int(max(time_s, 0) / interval_s), rows - 1), node])
        )
        name = None if node is None else names[node]
        found.append(RecordedEvent(round(start + time_s + offset_s, 3), kind, name, device, attributes))
    return tuple(sorted(found, key=lambda event: (event.time, event.kind, event.node or "", event.device)))


def _labels(story: Story, start: float, slowdown: float) -> tuple[RecordedLabel, ...]:
    names = story.layout.names
    return tuple(
        RecordedLabel(
            start=round(start + label.start_s, 3),
            end=round(start + min(label.end_s, story.scenario.duration_s), 3),
            nodes=tuple(names[n] for n in label.nodes),
            fault=label.fault,
            expect=label.expect or ("exclude" if slowdown > RESTART_COST_RATIO else "none"),
        )
        for label in story.labels
    )
