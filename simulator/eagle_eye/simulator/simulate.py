"""The whole simulation: from a scenario to a recording, one run in memory before a site's instruments omit anything."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.schema.metrics import BY_NAME
from eagle_eye.simulator.arrays import Booleans, Floats, stream
from eagle_eye.simulator.job import ClusterLayout, hire, lay_out
from eagle_eye.simulator.names import FAULTS, SITUATIONS
from eagle_eye.simulator.scenario import Scenario, WrongScenario
from eagle_eye.simulator.second_physics import physics_of, read_instruments
from eagle_eye.simulator.story import Death, Place, PlannedPause, StopKind, Story
from eagle_eye.simulator.telemetry import GpuRows, HostRows, Sampling, account, sample
from eagle_eye.simulator.timing import Clockwork, Timeline
from eagle_eye.simulator.tracks import Tracks
from eagle_eye.simulator.training_rows import TrainingRows, checkpoint_rows, keeps_checkpoints, learn


class RecordedEvent(NamedTuple):
    """One event by its node's clock (Unix seconds); ``node`` None for the whole job."""

    time: float
    kind: str
    node: str | None
    device: int
    attributes: dict[str, Any]


class RecordedLabel(NamedTuple):
    """What was done to the job, and what is expected: one of ``backtest``'s words."""

    start: float
    end: float
    nodes: tuple[str, ...]
    fault: str
    expect: str


class Membership(NamedTuple):
    """From ``time`` on these ranks take part: rows of (rank, node, device, dp, pp, tp)."""

    time: float
    attempt: int
    ranks: tuple[tuple[int, str, int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """K rows of N nodes, G GPUs each, L links each.

    ``time`` and ``true_time`` (K, N) are Unix seconds as the node's clock and as the true clock have them.
    ``arrived`` (K, N) and ``device_arrived`` (K, N, G): the row exists. ``device`` maps metrics to (K, N, G),
    ``node`` to (K, N), ``link`` to (K, N, L); NaN is not observed, +inf a number that was not finite. ``slowdown`` is
    how much longer steps take after the onset than they would have without the fault, 0 where the job stopped.
    ``packed`` says that a step's work differed from replica to replica before any fault, shown by metrics or not.
    """

    scenario: Scenario
    layout: ClusterLayout
    job: str
    start: float
    end: float
    time: Floats
    true_time: Floats
    arrived: Booleans
    device_arrived: Booleans
    device: dict[str, Floats]
    node: dict[str, Floats]
    link: dict[str, Floats]
    members: tuple[Membership, ...]
    events: tuple[RecordedEvent, ...]
    labels: tuple[RecordedLabel, ...]
    slowdown: float
    packed: bool
    exports_xid: bool


PHASE_NAMES = {"checkpoint": "checkpoint", "evaluation": "eval"}


def announce(story: Story, timeline: Timeline) -> None:
    """Add the events of attempts and announced pauses to the story, at the times at which they took place."""
    for number, attempt in enumerate(timeline.attempts):
        began_s = attempt.start_s
        first = next((s for s, a in zip(timeline.start_s, timeline.attempt, strict=True) if a == number), began_s)
        if began_s > 0:
            _phase(story, began_s, "start", number)
        _phase(story, max(0.5, float(first) + (0.5 if began_s > 0 else 0.0)), "train", number)
    for begin_s, end_s, pause in timeline.pauses:
        if begin_s < 0 or not pause.announced:
            continue
        name = PHASE_NAMES.get(pause.kind)
        if name is None:
            continue
        number = sum(a.start_s <= begin_s for a in timeline.attempts) - 1
        _phase(story, begin_s, name, number)
        if pause.kind == "checkpoint":
            step = int(timeline.step[timeline.start_s < begin_s][-1]) if (timeline.start_s < begin_s).any() else 0
            for node in range(story.layout.nodes):
                # The first rank writes what is not sharded and is the last to finish.
                share = 1.0 if node == 0 else float(story.rng.uniform(0.5, 0.9))
                story.say(begin_s + 0.05, "checkpoint_begin", node, 0, step=step)
                story.say(begin_s + share * (end_s - begin_s), "checkpoint_end", node, 0, step=step)
        _phase(story, end_s, "train", number)


def _phase(story: Story, time_s: float, name: str, attempt: int) -> None:
    if time_s > story.scenario.duration_s:
        return
    dead: dict[Place, float] = {}
    starts = [a.start_s for a in story.attempts] or [0.0]
    since_s = starts[attempt] if attempt < len(starts) else 0.0
    for death in story.deaths:
        if since_s <= death.time_s <= time_s:
            dead.update(dict.fromkeys(death.places, death.time_s))
    silent = {o.node for o in story.outages if o.device is None and o.start_s <= time_s < o.end_s}
    for node in range(story.layout.nodes):
        if node in silent:
            continue
        for place in story.places(node):
            if place not in dead:
                rank = story.rank(place)
                story.say(time_s, "phase", node, place.device, name=name, rank=rank, attempt=attempt)


def idle_spares(story: Story, nodes: int) -> Story:
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


def beside_spares(job: Recording, spares: Recording) -> Recording:
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
            name: np.concatenate([found, _no_spares(more.get(name), found, other.nodes)], axis=1)
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


def _no_spares(values: Floats | None, like: Floats, nodes: int) -> Floats:
    """Return the values; where the spares' own job would not report them, nothing was observed."""
    if values is not None:
        return values.astype(like.dtype, copy=False)
    return np.full((len(like), nodes, *like.shape[2:]), np.nan, dtype=like.dtype)


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
    return beside_spares(recording, _of_one(idle_spares(story, spares))) if spares else recording


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
    if keeps_checkpoints(scenario):
        node |= {
            name: _kept(name, values) for name, values in checkpoint_rows(device["train_step"], scenario.interval_s)
        }
    link = {name: _kept(name, values) for name, values in hosts.links().items()}
    _blank(story, sampling, device)
    if not story.physics.own:
        device, node, link = (
            read_instruments(values, story.physics, scenario.interval_s) for values in (device, node, link)
        )
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
