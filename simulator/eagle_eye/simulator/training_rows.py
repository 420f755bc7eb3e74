"""What agents would report of training: learning signals, durations, collectives, and checkpoints in memory.

Durations and norms are means over the steps that finished since the last row; while none finished they repeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eagle_eye.simulator.arrays import Booleans, Floats, Integers, normal, stream
from eagle_eye.simulator.job import OVERHEAD_SHARE
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.story import Story
from eagle_eye.simulator.telemetry import Sampling, overlap
from eagle_eye.simulator.timing import Timeline, collectives_done
from eagle_eye.simulator.tracks import Quantity, Tracks

LOSS_FLOOR, LOSS_START, LOSS_STEPS = 1.75, 9.0, 2500.0  # a language model's curve: floor + power law of steps


@dataclass(frozen=True, slots=True)
class Signals:
    """Per step: ``loss`` and ``grad_norm`` (S,), the same on all ranks; ``local_grad`` (S, N, G), before the reduction.

    Not finite numbers stand as +inf. ``checksum`` is (S, stages, lanes): replicas agree; ``deviation`` (S, N, G) is
    what corrupted replicas add, None where none is.
    """

    loss: Floats
    grad_norm: Floats
    local_grad: Floats
    checksum: Floats
    deviation: Floats | None


def learn(story: Story, timeline: Timeline, tracks: Tracks) -> Signals:
    """Return the learning signals of all steps."""
    layout, physics = story.layout, story.physics
    rng = stream(story.scenario.seed, "learning")
    steps = len(timeline.start_s)
    trend = LOSS_FLOOR + (LOSS_START - LOSS_FLOOR) * (1.0 + timeline.step / LOSS_STEPS) ** -0.7
    loss = trend * (1.0 + physics.loss_noise * rng.standard_normal(steps))
    grad_norm = 0.35 * np.exp(physics.grad_noise * rng.standard_normal(steps))
    starts_s = np.repeat(timeline.start_s[:, None], layout.nodes, axis=1)
    loss = loss * _jobwide(tracks.devices(Quantity.LOSS, starts_s))
    grad_norm = grad_norm * _jobwide(tracks.devices(Quantity.GRAD_NORM, starts_s))
    # The mean of dp independent gradients is smaller than each of them.
    local = normal(rng, (steps, layout.nodes, layout.gpus), 0.06, 1.0)
    local *= (grad_norm * math.sqrt(min(layout.dp, 16)))[:, None, None]
    local = local * np.asarray(tracks.devices(Quantity.LOCAL_GRAD, starts_s), dtype=np.float32)
    broken = ~np.isfinite(loss)
    local[broken] = np.inf
    grad_norm[broken] = np.inf
    start = rng.standard_normal((1, layout.pp, layout.tp)) * 1e4
    walk = np.cumsum(rng.standard_normal((steps, layout.pp, layout.tp)), axis=0)
    deviation = tracks.devices(Quantity.CHECKSUM, starts_s)
    return Signals(loss, grad_norm, local, start + walk, None if isinstance(deviation, float) else deviation)


def _jobwide(change: Floats | float) -> Floats | float:
    """Return the change of the first rank: these quantities are the same on all."""
    return change if isinstance(change, float) else change[:, 0, 0]


SQUARED_LENGTHS = 2.0e8  # of a step's sequences, where packing is even
PROCESS_CPUS = 1.2
READ_BYTES_PER_S = 4e6  # of a rank's data loaders
GROUP_OFFSET = 137  # collectives that one stage's group is ahead of the one before it, where they count apart


class TrainingRows:
    """Answers for the training metrics of all rows of a run."""

    def __init__(self, story: Story, timeline: Timeline, sampling: Sampling) -> None:
        self._story = story
        self._timeline = timeline
        self._times_s = sampling.true_s
        self._done = np.flatnonzero(timeline.finished)
        layout = story.layout
        self._node = np.arange(layout.nodes)[None, :, None]
        self._device = np.arange(layout.gpus)[None, None, :]
        attempts = np.array([a.start_s for a in timeline.attempts])
        # Which attempt is on at each row; before the first the job does not exist yet.
        self._attempt: Integers = np.searchsorted(attempts, self._times_s, side="right") - 1
        self._low, self._high, known = self._windows(attempts)
        which = np.maximum(self._attempt, 0)[:, :, None]
        dead = self._times_s[:, :, None] >= timeline.dead_from_s[which, self._node, self._device]
        dead |= (self._attempt < 0)[:, :, None]
        for left_s, nodes in story.gone:
            dead[:, list(nodes)] |= (self._times_s[:, list(nodes)] >= left_s)[:, :, None]
        self.dead: Booleans = dead  # (K, N, G): no training process on this device
        self.known: Booleans = known[:, :, None] & ~dead

    def metrics(self, signals: Signals, tracks: Tracks) -> Iterator[tuple[str, Floats]]:
        """Yield (name, values (K, N, G)); NaN where no process could say it."""
        story, timeline, job = self._story, self._timeline, self._story.job
        scenario, layout = story.scenario, story.layout
        rng = stream(scenario.seed, "hook")
        done = self._done
        shape = (len(self._times_s), layout.nodes, layout.gpus)
        duration_s = timeline.end_s[done] - timeline.start_s[done]
        compute_s, wait_s = timeline.compute_s[done], timeline.data_wait_s[done]
        yield "train_step", self._last(timeline.step[done].astype(np.float64))
        step_s = self._mean(duration_s)
        # CUDA events resolve half a microsecond; what differs between ranks is when the host reads its clock.
        yield "train_step_seconds", step_s * normal(rng, shape, 2e-4, 1.0)
        yield "train_compute_seconds", self._mean(compute_s)
        yield "train_data_wait_seconds", self._mean(wait_s)
        collective_s = duration_s[:, None, None] * (1.0 - OVERHEAD_SHARE) - compute_s - wait_s
        yield "nccl_collective_seconds", self._mean(np.maximum(collective_s, 0.002 * job.step_s))
        scatter_s = timeline.reduce_scatter_s[done]
        if layout.dp > 1:
            yield "nccl_reduce_scatter_seconds", self._mean(scatter_s)
            yield "nccl_bus_bandwidth_bytes_per_second", self._mean(bus_bytes(story) / scatter_s)
        yield "train_loss", self._mean(signals.loss[done])
        yield "train_grad_norm", self._mean(signals.grad_norm[done])
        if job.says_local_grad:
            yield "train_local_grad_norm", self._mean(signals.local_grad[done])
        if job.says_checksum:
            yield "train_parameter_checksum", self._checksum(signals)
        units = timeline.work[done]
        if job.says_work_units:
            per_rank = units[:, layout.replica()].astype(np.float32) * SQUARED_LENGTHS
            yield "train_work_units", self._mean(per_rank)
        tokens = job.tokens * tracks.devices(Quantity.TOKENS, self._times_s)
        yield "train_tokens_per_second", tokens / step_s
        issued, completed = self._sequences()
        yield "nccl_sequence", issued
        yield "nccl_completed_sequence", completed
        yield from self._processes(tracks)

    def _processes(self, tracks: Tracks) -> Iterator[tuple[str, Floats]]:
        """Yield what the kernel says of the ranks' processes: one thread spins for its GPU, the loaders read."""
        times_s, alive, shape = self._times_s, ~self.dead, self.dead.shape
        rng = stream(self._story.scenario.seed, "processes")
        spans_s = np.diff(times_s, axis=0, prepend=times_s[:1] - self._story.scenario.interval_s)
        cpus = PROCESS_CPUS * normal(rng, shape, 0.05, 1.0) * tracks.devices(Quantity.CPUS, times_s)
        bytes_per_s = READ_BYTES_PER_S * normal(rng, shape, 0.3, 1.0) * self.known
        for begin_s, end_s, pause in self._timeline.pauses:
            share = overlap(times_s - spans_s, times_s, begin_s, end_s)[:, :, None]
            bytes_per_s *= 1.0 - share
            if pause.alone:
                cpus[:, :1, :1] += share[:, :1] * (pause.cpus - cpus[:, :1, :1])
                bytes_per_s[:, :1, :1] += share[:, :1] * pause.disk_bytes_per_s
        for stop_s, _, _ in self._timeline.stuck.values():
            bytes_per_s *= (times_s < stop_s)[:, :, None]
        for name, rate in (("rank_cpu_seconds_total", cpus), ("rank_io_bytes_total", np.maximum(bytes_per_s, 0.0))):
            yield name, np.where(alive, np.cumsum(rate * spans_s[:, :, None], axis=0), np.nan)
        held = np.zeros(shape) + tracks.devices(Quantity.HELD, times_s)
        yield "rank_blocked_ratio", np.where(alive, np.minimum(held, 1.0), np.nan)

    def _windows(self, attempts: Floats) -> tuple[Integers, Integers, Booleans]:
        """Return which finished steps a row speaks of, [low, high) (K, N), and whether there are any."""
        timeline, done = self._timeline, self._done
        ends_s = timeline.end_s[done]
        high = np.searchsorted(ends_s, self._times_s, side="right")
        before = np.vstack([np.searchsorted(ends_s, self._times_s[:1] - self._story.scenario.interval_s), high[:-1]])
        rows = np.arange(len(high))[:, None]
        fresh = np.maximum.accumulate(np.where(high > before, rows, -1), axis=0)
        low = np.where(fresh >= 0, np.take_along_axis(before, np.maximum(fresh, 0), axis=0), high - 1)
        firsts = np.searchsorted(timeline.attempt[done], np.arange(len(attempts)))
        first = firsts[np.maximum(self._attempt, 0)]
        known = (high > first) & (self._attempt >= 0)
        high = np.maximum(high, 1)
        low = np.clip(np.maximum(low, first), 0, high - 1)
        return low, high, known

    def _last(self, per_step: Floats) -> Floats:
        """Return the value of the last finished step, (K, N, G), from (F,)."""
        if not len(per_step):
            return np.full(self.known.shape, np.nan)
        return np.where(self.known, per_step[self._high - 1][:, :, None], np.nan)

    def _mean(self, per_step: Floats) -> Floats:
        """Return the mean over each row's steps, (K, N, G) float32, from (F,) or (F, N, G); inf where any was."""
        result = np.full(self.known.shape, np.nan, dtype=np.float32)
        if not len(per_step):
            return result
        endless = ~np.isfinite(per_step)
        mean = self._sums(np.where(endless, 0.0, per_step)) / (self._high - self._low)[:, :, None]
        if endless.any():
            mean = np.where(self._sums(endless) > 0, np.inf, mean)
        np.copyto(result, mean, where=self.known, casting="same_kind")
        return result

    def _sums(self, per_step: Floats | Booleans) -> Floats:
        """Return the sum over each row's steps, (K, N, G) or (K, N, 1)."""
        total = np.zeros((len(per_step) + 1, *per_step.shape[1:]))
        np.cumsum(per_step, axis=0, out=total[1:])
        if per_step.ndim == 1:
            return (total[self._high] - total[self._low])[:, :, None]
        sums: Floats = total[self._high[:, :, None], self._node, self._device]
        sums -= total[self._low[:, :, None], self._node, self._device]
        return sums

    def _checksum(self, signals: Signals) -> Floats:
        layout = self._story.layout
        index = self._done[np.minimum(self._high, len(self._done)) - 1][:, :, None] if len(self._done) else None
        if index is None:
            return np.full(self.known.shape, np.nan)
        value = signals.checksum[index, layout.stage()[None], layout.lane()[None]]
        if signals.deviation is not None:
            value = value + signals.deviation[index, self._node, self._device]
        return np.where(self.known, value, np.nan)

    def _sequences(self) -> tuple[Floats, Floats]:
        """Return (issued, completed) collective numbers at each row, (K, N, G)."""
        story, timeline, job = self._story, self._timeline, self._story.job
        layout = story.layout
        rng = stream(story.scenario.seed, "ahead")
        ahead = rng.uniform(0.05, 0.3, (1, layout.nodes, layout.gpus))
        current = np.clip(np.searchsorted(timeline.start_s, self._times_s, side="right") - 1, 0, None)
        length_s = np.where(timeline.finished, timeline.end_s - timeline.start_s, np.inf)
        share = np.clip((self._times_s - timeline.start_s[current]) / length_s[current], 0.0, 1.0)[:, :, None]
        base = (timeline.step - 1) * job.collectives
        for number, attempt in enumerate(timeline.attempts):
            # A new attempt makes new communicators, which count from zero.
            began = attempt.first_step if number else 0
            base = np.where(timeline.attempt == number, base - began * job.collectives, base)
        completed = collectives_done(job, share)
        issued = np.maximum(collectives_done(job, np.minimum(share + ahead, 1.0)), completed)
        for index, (stop_s, at_issued, at_completed) in timeline.stuck.items():
            here = (current == index)[:, :, None]
            usual_s = float(timeline.arrival_s[index].max()) + float(timeline.communication_s[index])
            so_far = np.minimum(self._times_s, stop_s) - timeline.start_s[index]
            moving = collectives_done(job, np.clip(so_far / usual_s, 0.0, 1.0))[:, :, None]
            stopped = (self._times_s >= stop_s)[:, :, None]
            completed = np.where(here, np.where(stopped, at_completed, np.minimum(moving, at_completed)), completed)
            issued = np.where(here, np.where(stopped, at_issued, np.minimum(moving, at_issued)), issued)
        for begin_s, end_s, pause in timeline.pauses:
            if pause.alone:
                inside = ((self._times_s >= begin_s) & (self._times_s < end_s))[:, :, None]
                others = np.ones((layout.nodes, layout.gpus))
                others[0, 0] = 0.0
                issued = np.where(inside, completed + others, issued)
        offset = base[current][:, :, None]
        if not job.wide_sequence:
            offset = offset + layout.stage()[None] * GROUP_OFFSET
        alive = ~self.dead
        return np.where(alive, offset + issued, np.nan), np.where(alive, offset + completed, np.nan)


def bus_bytes(story: Story) -> float:
    """Return the bytes that a reduce-scatter moves over the bus, so that an unhindered one runs at 75% of line rate."""
    return 0.75 * 50e9 * 0.5 * story.job.communication_s


# Checkpoints in memory are captured at each step, and whole in the next one. Some jobs keep them, chosen by their seed;
# no random number is drawn for it, so that all other rows are unaffected.

ONE_OF, WHICH = 8, 6  # jobs, by their seeds
REPLICAS = 2
PERSIST_EVERY_STEPS = 500
BLOCKED_S = 0.02  # a capture
SHARD_BYTES = 4e9  # of a rank; four whole steps are kept, one arrives
SPACED_STEPS = 100  # between the older ones of them


def keeps_checkpoints(scenario: Scenario) -> bool:
    """Whether the scenario's job keeps its steps in memory."""
    return scenario.seed % ONE_OF == WHICH


def checkpoint_rows(train_step: Floats, interval_s: float) -> Iterator[tuple[str, Floats]]:
    """Yield (name, values (K, N)) of a job whose ranks had come to these steps (K, N, G); NaN where nobody says it."""
    step: Floats = np.fmax.reduce(train_step, axis=2)
    nodes, gpus = train_step.shape[1:]
    whole = np.maximum(step - 1.0, 0.0)
    known = np.where(np.isfinite(step), 0.0, np.nan)
    copies = known + gpus * min(REPLICAS, nodes)
    captures = gpus * np.fmax.accumulate(step, axis=0)
    yield "memory_checkpoint_step", whole
    yield "memory_checkpoint_age_steps", step - whole
    first = np.nanmin(step, initial=np.inf)
    spaced = np.maximum(whole // SPACED_STEPS * SPACED_STEPS, first)
    older = {
        "previous": whole - 1.0,
        "second_oldest": spaced,
        "oldest": np.maximum(spaced - SPACED_STEPS, first),
    }
    for which, kept in older.items():
        kept[~((kept >= 0) & (kept < whole))] = np.nan
        yield f"memory_checkpoint_{which}_step", kept
        yield f"memory_checkpoint_{which}_age_seconds", _rows_since(step, kept) * interval_s
    yield "memory_checkpoint_copies", copies
    yield "memory_checkpoint_copies_wanted", copies
    yield "memory_checkpoint_captures_total", captures
    yield "memory_checkpoint_skips_total", known
    yield "memory_checkpoint_blocked_seconds_total", BLOCKED_S * captures
    yield "memory_checkpoint_bytes", 5 * SHARD_BYTES * copies
    persisted = np.full_like(step, np.nan)
    persisted[:, 0] = whole[:, 0] // PERSIST_EVERY_STEPS * PERSIST_EVERY_STEPS  # the first node's store tells
    yield "memory_checkpoint_persisted_step", persisted
    yield "memory_checkpoint_persist_seconds", known
    yield "memory_checkpoint_damaged_total", known


def _rows_since(step: Floats, kept: Floats) -> Floats:
    """Return for how many rows each node had come to the step that it keeps (K, N); NaN where it keeps none."""
    rows = np.arange(len(step))
    found = np.full_like(kept, np.nan)
    for node in range(step.shape[1]):
        reached = np.fmax.accumulate(np.nan_to_num(step[:, node], nan=-1.0))
        found[:, node] = rows - np.searchsorted(reached, kept[:, node])
    return np.where(np.isfinite(kept), found, np.nan)
