"""Synchronous steps: each rank's compute and waits, and when the step ends.

A step ends when the slowest replica of the slowest pipeline stage has arrived and the gradients are reduced. Every
other rank waits for the rest of the time. In the reduce-scatter the last to arrive therefore has the shortest duration,
which holds in all public production traces (correlation -1.0; Lin et al., OSDI 2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from eagle_eye.simulator.arrays import Booleans, Floats, Integers, stream
from eagle_eye.simulator.job import OVERHEAD_SHARE, TENSOR_SHARE, ClusterLayout, SimulatedJob
from eagle_eye.simulator.physics import Physics
from eagle_eye.simulator.story import PlannedPause, SimulatedAttempt, StopKind, Story
from eagle_eye.simulator.tracks import Quantity, Tracks

# Packed sequences: 0.81 at 1%, 1.39 at 99% of single steps in the same traces, as 1 + a (exp(b z) - 1).
PACKED_A, PACKED_B = 0.370, 0.309
# Part of a step's compute that grows with the squared sequence lengths (T = a N + b sum l^2; ResiHP, 2026).
QUADRATIC_SHARE = 0.6
RING_JITTER = 0.002
EXPERTS_KEPT = 0.98  # of an expert's popularity from step to step: routing changes over some fifty steps
EXPERT_MEMORY = 0.9  # of a rank's load that is left of it in the next step
BACKWARD_SHARE = 2 / 3  # of a microbatch's compute


@dataclass(slots=True)
class Timeline:
    """What happened, step by step. Arrays over S steps, those of ranks (S, N, G) in float32; seconds.

    ``end_s`` is inf for a step that never ended. ``arrival_s`` counts from the step's start to the rank's arrival in
    the last reduce-scatter. ``stuck`` tells of unfinished steps, by index: when they stopped, and how many of
    the step's collectives each rank (N, G) had issued and completed.
    """

    start_s: Floats
    end_s: Floats
    step: Integers
    attempt: Integers
    compute_s: Floats
    stall_s: Floats | None
    data_wait_s: Floats
    arrival_s: Floats
    reduce_scatter_s: Floats
    work: Floats
    communication_s: Floats
    attempts: tuple[SimulatedAttempt, ...]
    dead_from_s: Floats  # (attempts, N, G), inf while alive
    stuck: dict[int, tuple[float, Integers, Integers]]
    pauses: list[tuple[float, float, PlannedPause]]  # as they took place

    @property
    def finished(self) -> Booleans:
        """Which steps ended, (S,)."""
        return np.isfinite(self.end_s)


@dataclass(slots=True)
class _Recorder:
    """Grows as the run goes on."""

    start_s: list[float]
    end_s: list[float]
    step: list[int]
    attempt: list[int]
    compute: list[Floats]
    stall: list[Floats]
    wait: list[Floats]
    arrival: list[Floats]
    scatter: list[Floats]
    work: list[Floats]
    communication: list[float]


class _Roughness:
    """What the second physics adds to steps: noise with a memory, uneven experts, stumbles, a load that drifts."""

    def __init__(self, physics: Physics, layout: ClusterLayout) -> None:
        self._physics = physics
        self._rng = stream(physics.seed, "rough")
        self._shape = (layout.nodes, layout.gpus)
        self._state: Floats = physics.tail(self._rng, self._shape)
        self._experts: Floats = self._rng.standard_normal(self._shape)

    def noise(self, rng: np.random.Generator) -> Floats:
        """Return this step's noise of each rank, deviation 1."""
        kept = self._physics.step_correlation
        self._state = kept * self._state + math.sqrt(1.0 - kept**2) * self._physics.tail(rng, self._shape)
        # Heavy tails go up: work may be late by much, early only by little.
        return np.asarray(np.clip(self._state, -3.0, None), dtype=np.float32)

    def work(self, now_s: float) -> Floats:
        """Return the factor on each rank's compute."""
        physics, rng = self._physics, self._rng
        factor: Floats = np.full(self._shape, float(physics.load(now_s)))
        self._experts = EXPERTS_KEPT * self._experts + math.sqrt(1.0 - EXPERTS_KEPT**2) * rng.standard_normal(
            self._shape
        )
        if physics.uneven_experts:
            factor *= np.exp(physics.uneven_experts * np.clip(self._experts, -3.0, 3.0))
        stumbles, place = rng.random() < physics.hiccup_probability, rng.integers(0, self._shape)
        if stumbles:
            factor[tuple(place)] *= 1.0 + physics.hiccup_steps * float(rng.exponential(1.0))
        return factor


class Clockwork:
    """Runs the steps of a story one after the other."""

    def __init__(self, story: Story, tracks: Tracks) -> None:
        self._story = story
        self._tracks = tracks
        self._job: SimulatedJob = story.job
        self._layout: ClusterLayout = story.layout
        layout, physics = self._layout, story.physics
        rng = stream(story.scenario.seed, "speed")
        node = 1.0 + physics.node_spread * rng.standard_normal((layout.nodes, 1))
        device = 1.0 + physics.gpu_spread * rng.standard_normal((layout.nodes, layout.gpus))
        weights = np.array(self._job.stage_weights)[layout.stage()]
        self._base_s: Floats = (
            self._job.compute_s
            * weights
            * np.clip(node, 1.0 - physics.node_spread_limit, 1.0 + physics.node_spread_limit)
            * device
        )
        self._model_speed = _model_speed(layout)
        self._base_s = self._base_s * self._model_speed
        self._rng = stream(story.scenario.seed, "steps")
        self._experts = stream(story.scenario.seed, "experts")
        self._load = self._experts.standard_normal((layout.nodes, layout.gpus))
        self._parts = (layout.pp, layout.dp, layout.tp)
        self._any_stall = tracks.has(Quantity.STALL)
        self._physics = physics
        self._rough = None if physics.own else _Roughness(physics, layout)

    def run(self, until_s: float) -> Timeline:
        """Return all steps up to ``until_s``."""
        story, job = self._story, self._job
        lead_s = max(3 * job.step_s, 3 * story.scenario.interval_s)
        attempts = story.attempts or [SimulatedAttempt(-math.inf, job.first_step)]
        attempts = [
            a if math.isfinite(a.start_s) else SimulatedAttempt(-lead_s, a.first_step, a.slow_steps, a.stop)
            for a in attempts
        ]
        record = _Recorder([], [], [], [], [], [], [], [], [], [], [])
        taken: list[tuple[float, float, PlannedPause]] = []
        for number, attempt in enumerate(attempts):
            following_s = attempts[number + 1].start_s if number + 1 < len(attempts) else until_s
            self._attempt(number, attempt, following_s, record, taken)
        return self._timeline(record, tuple(attempts), taken)

    def _attempt(
        self,
        number: int,
        attempt: SimulatedAttempt,
        until_s: float,
        record: _Recorder,
        taken: list[tuple[float, float, PlannedPause]],
    ) -> None:
        now_s, step = attempt.start_s, attempt.first_step
        pauses = [p for p in sorted(self._story.pauses, key=lambda p: p.start_s) if p.start_s >= now_s]
        stop_s = attempt.stop.time_s if attempt.stop else math.inf
        slow = list(attempt.slow_steps)
        while now_s < until_s:
            while pauses and pauses[0].start_s <= now_s and stop_s > now_s:
                pause = pauses.pop(0)
                taken.append((now_s, now_s + pause.seconds, pause))
                now_s += pause.seconds
            duration_s = self._step(now_s, slow.pop(0) if slow else 1.0, record)
            step += 1
            ends = now_s + duration_s < stop_s
            record.start_s.append(now_s)
            record.end_s.append(now_s + duration_s if ends else math.inf)
            record.step.append(step)
            record.attempt.append(number)
            if not ends:
                return
            now_s += duration_s

    def _step(self, now_s: float, slow: float, record: _Recorder) -> float:
        """Work one step through and return its duration in seconds."""
        job, rng, tracks = self._job, self._rng, self._tracks
        pp, dp, tp = self._parts
        shape = self._base_s.shape
        common = 1.0 + self._physics.step_noise * float(rng.standard_normal())
        noise = rng.standard_normal(shape, dtype=np.float32) if self._rough is None else self._rough.noise(rng)
        lengths = rng.standard_normal(dp)
        ring = rng.standard_normal((pp, 1, tp)) * RING_JITTER
        compute = self._base_s * (1.0 + self._physics.rank_noise * noise) * (common * slow)
        if self._rough is not None:
            compute = compute * self._rough.work(now_s)
        units = np.ones(dp)
        if now_s >= job.packed_from_s:
            work = 1.0 + PACKED_A * (np.exp(PACKED_B * lengths) - 1.0)
            units = np.maximum(1.0 + (work - 1.0) / QUADRATIC_SHARE, 0.2)
            work = 1.0 + (units - 1.0) * QUADRATIC_SHARE
            compute = (compute.reshape(self._parts) * work[None, :, None]).reshape(shape)
        if job.expert_spread:
            fresh = self._experts.standard_normal(shape)
            self._load = EXPERT_MEMORY * self._load + math.sqrt(1.0 - EXPERT_MEMORY**2) * fresh
            compute = compute * np.exp(job.expert_spread * self._load)
        compute = compute * tracks.now(Quantity.COMPUTE, now_s)
        stall = tracks.now(Quantity.STALL, now_s)
        wait = job.data_wait_s * (0.7 + 0.3 * np.abs(noise)) + tracks.now(Quantity.DATA_WAIT, now_s)
        inside = np.asarray(tracks.now(Quantity.NVLINK_TIME, now_s)) * (TENSOR_SHARE * job.compute_s)
        local = (compute + stall + wait + inside).reshape(self._parts).max(axis=2)  # (pp, dp): tensor peers wait
        longest = local.max(axis=0)
        replica = longest + (local.sum(axis=0) - longest) / job.microbatches
        # The pipeline drains from its end: the backward pass leaves the last stage first and the first stage last.
        drain = BACKWARD_SHARE * (np.cumsum(local, axis=0) - local) / job.microbatches
        arrived = replica - drain
        network = np.broadcast_to(np.asarray(tracks.now(Quantity.NETWORK, now_s)), shape).reshape(self._parts)
        reduction = (
            job.communication_s
            * network.max(axis=(1, 2))
            * (1.0 + self._physics.network_noise * abs(float(noise.flat[0])))
        )
        together = arrived.max(axis=1) + reduction
        duration_s = float(together.max()) + OVERHEAD_SHARE * job.step_s * slow
        scatter = (arrived.max(axis=1, keepdims=True) - arrived)[:, :, None] + (
            0.5 * reduction[:, None, None] * (1.0 + ring)
        )
        record.compute.append((compute + stall).astype(np.float32))
        if self._any_stall:
            record.stall.append(np.broadcast_to(np.asarray(stall, dtype=np.float32), shape))
        record.wait.append(np.asarray(wait, dtype=np.float32))
        record.arrival.append(np.broadcast_to(arrived[:, :, None], self._parts).reshape(shape).astype(np.float32))
        record.scatter.append(np.broadcast_to(scatter, self._parts).reshape(shape).astype(np.float32))
        record.work.append(units)
        record.communication.append(float(reduction.max()))
        return duration_s

    def _timeline(
        self, record: _Recorder, attempts: tuple[SimulatedAttempt, ...], taken: list[tuple[float, float, PlannedPause]]
    ) -> Timeline:
        timeline = Timeline(
            start_s=np.array(record.start_s),
            end_s=np.array(record.end_s),
            step=np.array(record.step, dtype=np.int64),
            attempt=np.array(record.attempt, dtype=np.int64),
            compute_s=np.array(record.compute),
            stall_s=np.array(record.stall) if record.stall else None,
            data_wait_s=np.array(record.wait),
            arrival_s=np.array(record.arrival),
            reduce_scatter_s=np.array(record.scatter),
            work=np.array(record.work),
            communication_s=np.array(record.communication),
            attempts=attempts,
            dead_from_s=self._deaths(attempts),
            stuck={},
            pauses=taken,
        )
        for index in np.flatnonzero(~timeline.finished):
            self._stick(timeline, int(index))
        return timeline

    def _deaths(self, attempts: tuple[SimulatedAttempt, ...]) -> Floats:
        dead = np.full((len(attempts), self._layout.nodes, self._layout.gpus), math.inf)
        starts = [a.start_s for a in attempts]
        for death in self._story.deaths:
            number = max(0, int(np.searchsorted(starts, death.time_s, side="right")) - 1)
            nodes, devices = [p.node for p in death.places], [p.device for p in death.places]
            dead[number, nodes, devices] = np.minimum(dead[number, nodes, devices], death.time_s)
        return dead

    def _stick(self, timeline: Timeline, index: int) -> None:
        """Work out where everybody stands in a step that never ends: busy no longer, this far in the collectives."""
        job, layout = self._job, self._layout
        stop = timeline.attempts[int(timeline.attempt[index])].stop
        if stop is None:
            return
        into_s = max(0.0, stop.time_s - float(timeline.start_s[index]))
        usual_s = float(timeline.arrival_s[index].max()) + float(timeline.communication_s[index])
        reached = collectives_done(job, np.array(min(into_s / usual_s, 0.999)))
        shape = (layout.nodes, layout.gpus)
        completed = np.full(shape, int(reached), dtype=np.int64)
        issued = np.minimum(completed + stream(layout.world, "ahead").integers(1, 4, shape), job.collectives)
        if job.spread_collectives is False:
            issued = completed + 1
        culprit = np.zeros(shape, dtype=bool)
        for place in stop.culprits:
            culprit[place.node, place.device] = True
        if stop.kind is StopKind.LATE:
            issued[culprit] = completed[culprit]
        elif stop.kind is StopKind.TRANSFER:
            # The others complete this one, issue the next and wait there for the same transfers.
            issued[:] = int(reached) + 2
            completed[~culprit] = int(reached) + 1
        else:
            issued[:] = int(issued.max())
        timeline.stuck[index] = (stop.time_s, issued, completed)
        # Sharded parameters: everybody needs everybody at each layer, so all stop at once. Otherwise the culprit's
        # node stops now (its tensor peers wait for it), its pipeline replica a few microbatches later.
        arrival = timeline.arrival_s[index]
        planned = arrival.copy()
        if job.spread_collectives:
            np.minimum(arrival, into_s + usual_s / max(job.collectives, 1), out=arrival)
        elif stop.kind is not StopKind.SYMMETRIC:
            replica = np.isin(layout.replica(), np.unique(layout.replica()[culprit]))
            near = culprit.any(axis=1, keepdims=True)
            slack_s = usual_s / job.microbatches
            arrival[replica] = np.minimum(arrival[replica], into_s + 2 * slack_s)
            arrival[np.broadcast_to(near, shape)] = into_s
        timeline.compute_s[index] *= arrival / planned


def collectives_done(job: SimulatedJob, share: Floats) -> Floats:
    """Return how many of a step's collectives are done at a share of its duration (0..1)."""
    first = 0.0 if job.spread_collectives else 0.9
    done: Floats = np.floor(job.collectives * np.clip((share - first) / (1.0 - first), 0.0, 1.0))
    return done


def _model_speed(layout: ClusterLayout) -> Floats:
    """Return each node's compute factor by its GPU model against the job's first model, (N, 1)."""
    first = layout.models[0]
    speed = [
        1.0 if m == first else first.boost_hz * first.power_limit_w / (m.boost_hz * m.power_limit_w)
        for m in layout.models
    ]
    return np.array(speed)[:, None]
