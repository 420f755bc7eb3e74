"""Extracts a model's training features of healthy nodes from recorded history, look by look.

The server's own engine runs over the trace, so that a model sees what the detector will see, and everything that a rule
calls a fault is left out. Also left out are labelled faults, the time around hardware events and process exits,
evaluations and checkpoints, and the beginning of each attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.learned_features import FEATURES, ROWS_PAST_MIN, ROWS_SPAN_MIN, Metric, View, look
from eagle_eye.detectors.signs.progress import QUIET_PHASES
from eagle_eye.detectors.types import Blind, Floats, Integers, Window
from eagle_eye.schema.metrics import METRICS, MetricKind, MetricSpec, Scope
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.settings import DetectionSettings

# The least difference that may mean something, by unit: sensors' resolution and the jitter of healthy, identical nodes.
# Units that are absent hold states and counts, which rules judge.
GRAINS = {
    "ratio": 0.01,
    "celsius": 1.0,
    "watts": 5.0,
    "hertz": 1e7,
    "bytes": 2.0**28,
    "bytes_per_second": 1e7,
    "tasks": 1.0,
    "packets_per_second": 50.0,
    "segments_per_second": 5.0,
}
# Training's own metrics are judged by rules. They are excluded so that a learned score is independent evidence.
SPOKEN_BY_TRAINING = ("train_", "nccl_", "memory_checkpoint_")
SPAN_S, PAST_S = 60.0, 300.0
LOOKS = 3  # spans in a row that must be strange: most of what passes by itself has passed by then
TICK_S = 15.0  # how often rules are asked while history is read: a fault lasts longer
BEFORE_S, AFTER_S = 120.0, 600.0  # around a fault or event, what is left out
WARMUP_S = 600.0  # of each attempt: compilation, first steps, GPUs that warm up
DISTURBING = frozenset(
    {"xid", "sxid", "process_exit", "oom_kill", "link_down", "gpu_lost", "machine_check", "kernel_panic"}
    | {"training_error"}
)
LOOKS_MAX = 500_000  # in memory: about 350 node-days


class Shape(NamedTuple):
    """What history is read with: rows of ``interval_s`` seen through a view, ``looks`` spans to a claim."""

    interval_s: float
    view: View
    looks: int


@dataclass(slots=True, kw_only=True)
class HealthyHistory:
    """Looks at healthy nodes, in order of time for each node.

    ``features`` (W, metrics, 3); ``node`` (W,) indexes ``nodes``, ``run`` (W,) counts attempts, ``number`` (W,) is the
    look's place in its run: looks of one node and run with successive numbers follow each other. ``left_out`` counts
    looks by reason.
    """

    shape: Shape
    features: Floats
    node: Integers
    run: Integers
    number: Integers
    times_s: Floats
    nodes: tuple[str, ...]
    gpus_per_node: tuple[int, ...]
    power_limits_watts: tuple[float, ...]
    gpu_models: tuple[str, ...]
    job: str
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def node_days(self) -> float:
        """Total observed time of healthy nodes."""
        return len(self.features) * self.shape.view.span_s / 86_400

    def narrowed(self, metrics: Iterable[Metric]) -> Floats:
        """Return the features of these metrics alone, in this order. Raises KeyError for one that was not read."""
        at = {metric.name: i for i, metric in enumerate(self.shape.view.metrics)}
        return self.features[:, [at[metric.name] for metric in metrics]]


class NoHistory(ValueError):
    """There is too little history, or nothing comparable, to learn from."""


def candidates() -> tuple[Metric, ...]:
    """Return every metric that a model may look at."""
    return tuple(Metric(s.name, s.scope is Scope.DEVICE, GRAINS[s.unit], s.unit) for s in METRICS if _eligible(s))


def _eligible(spec: MetricSpec) -> bool:
    spoken = spec.name.startswith(SPOKEN_BY_TRAINING)
    return spec.kind is MetricKind.GAUGE and spec.scope is not Scope.LINK and spec.unit in GRAINS and not spoken


def shape_for(interval_s: float, window_s: float) -> Shape:
    """Return how rows of this interval are viewed, so that every look has enough rows. Raises NoHistory."""
    span_s, past_s = max(SPAN_S, ROWS_SPAN_MIN * interval_s), max(PAST_S, ROWS_PAST_MIN * interval_s)
    looks = min(LOOKS, int((window_s - past_s) // span_s))
    if looks < 1:
        raise NoHistory(f"rows of {interval_s:g} s: detection.window_s of {window_s:g} s holds too few of them")
    return Shape(interval_s, View(metrics=candidates(), span_s=span_s, past_s=past_s), looks)


def read(folders: Iterable[Path], settings: DetectionSettings) -> HealthyHistory:
    """Return the looks at healthy nodes of all traces. Raises BadTrace, NoHistory."""
    traces = [Trace(folder) for folder in folders]
    intervals = sorted({trace.header.interval_s for trace in traces})
    if len(intervals) != 1:
        raise NoHistory(f"the traces have rows of {', '.join(f'{i:g}' for i in intervals)} s; learn from one kind")
    shape = shape_for(intervals[0], settings.window_s)
    readers = [_Reader(trace, shape, settings) for trace in traces]
    parts = [part for reader in readers for part in reader.looks()]
    left_out = sum((reader.left_out for reader in readers), Counter[str]())
    if not parts:
        why = ", ".join(f"{n} {reason}" for reason, n in left_out.most_common())
        raise NoHistory(f"no look at a healthy node remains ({why or 'the traces are too short'})")
    names = sorted({name for part in parts for name in part.nodes})
    code = {name: i for i, name in enumerate(names)}
    runs = {run: i for i, run in enumerate(dict.fromkeys(part.run for part in parts))}
    sizes = [len(part.nodes) for part in parts]
    if sum(sizes) > LOOKS_MAX:
        raise NoHistory(f"{sum(sizes)} looks at nodes; at most {LOOKS_MAX} fit into memory: take a shorter period")
    return HealthyHistory(
        shape=shape,
        features=np.concatenate([part.features for part in parts]),
        node=np.array([code[name] for part in parts for name in part.nodes], np.intp),
        run=np.repeat([runs[part.run] for part in parts], sizes),
        number=np.repeat([part.number for part in parts], sizes),
        times_s=np.repeat([part.time_s for part in parts], sizes),
        nodes=tuple(names),
        gpus_per_node=tuple(sorted(set[int]().union(*(reader.gpus for reader in readers)))),
        power_limits_watts=tuple(sorted(set[float]().union(*(reader.watts for reader in readers)))),
        gpu_models=tuple(sorted({n.gpu_model for trace in traces for n in trace.header.nodes if n.gpu_model})),
        job=", ".join(sorted({trace.header.job for trace in traces})),
        left_out=left_out,
    )


class _Part(NamedTuple):
    """One look: the features of those nodes that were healthy."""

    run: tuple[str, str, int]
    number: int
    time_s: float
    nodes: list[str]
    features: Floats


class _Disturbance(NamedTuple):
    """Something that happened to a node, or to the whole job (node "")."""

    job: str
    node: str
    from_s: float
    until_s: float
    reason: str


class _Reader:
    """Runs the engine over one trace and looks at its nodes once a span."""

    def __init__(self, trace: Trace, shape: Shape, settings: DetectionSettings) -> None:
        self._trace = trace
        self._shape = shape
        self._engine = Engine(settings, watching_since_s=trace.header.start)
        self._disturbances: set[_Disturbance] = set()
        self.left_out: Counter[str] = Counter()
        self.gpus: set[int] = set()
        self.watts: set[float] = set()

    def looks(self) -> list[_Part]:
        """Return the trace's looks, without what was not healthy."""
        for label in self._trace.labels() or []:
            for node in label.nodes or [""]:
                self._note("", node, label.start, label.end, "labelled fault")
        found = list(self._raw())
        return [kept for part in found if (kept := self._healthy(part)) is not None]

    def _raw(self) -> Iterator[_Part]:
        header, span_s = self._trace.header, self._shape.view.span_s
        tick_s = max(TICK_S, header.interval_s)
        steps = iter(self._trace.steps())
        step = next(steps, None)
        looked = 0
        for k in range(1, int((header.end - header.start) / tick_s) + 1):
            now_s = header.start + k * tick_s
            while step is not None and step.time_s <= now_s:
                if step.job is not None:
                    self._engine.observe_job(step.job)
                elif step.frame is not None:
                    self._engine.observe(step.frame, step.time_s)
                    for event in step.frame.events:
                        if event.kind in DISTURBING:
                            self._note("", step.frame.node, event.time_s, event.time_s, f"event {event.kind}")
                step = next(steps, None)
            for judgement in self._engine.tick(now_s):
                self._note_verdicts(judgement)
            number = int((now_s - header.start + 1e-6) // span_s)
            if number > looked:
                looked = number
                yield from self._look(number, now_s)

    def _look(self, number: int, now_s: float) -> Iterator[_Part]:
        for track in self._engine.tracks():
            window = self._engine.window(track, now_s, self._trace.header.start)
            if not len(window.times_s) or now_s - window.started_s < WARMUP_S + self._shape.view.past_s:
                self.left_out["start of an attempt"] += len(window.nodes)
                continue
            if any(phase in QUIET_PHASES for phase in window.phase):
                self.left_out["evaluation or checkpoint"] += len(window.nodes)
                continue
            try:
                nodes = look(window, self._shape.view, float(window.times_s[-1]))
            except Blind:
                self.left_out["too few rows"] += len(window.nodes)
                continue
            self._note_fleet(window)
            values = nodes.values.reshape(len(window.nodes), -1)
            seen = np.flatnonzero(np.isfinite(values).any(axis=1))
            self.left_out["nothing comparable"] += len(window.nodes) - len(seen)
            run = (str(self._trace.folder), window.job, window.attempt)
            yield _Part(run, number, now_s, [window.nodes[i] for i in seen], nodes.values[seen])

    def _note_fleet(self, window: Window) -> None:
        self.gpus.update(int(n) for n in np.bincount(window.node_of) if n)
        limits = window.device.get("gpu_power_limit_watts")
        if limits is not None and np.isfinite(limits[-1]).any():
            self.watts.add(round(float(np.median(limits[-1][np.isfinite(limits[-1])]))))

    def _note_verdicts(self, judgement: Judgement) -> None:
        for verdict in judgement.verdicts:
            for node in verdict.nodes or ("",):
                self._note(judgement.job, node, verdict.onset_s, judgement.now_s, f"verdict {verdict.fault}")

    def _note(self, job: str, node: str, from_s: float, until_s: float, reason: str) -> None:
        self._disturbances.add(_Disturbance(job, node, from_s - BEFORE_S, until_s + AFTER_S, reason))

    def _healthy(self, part: _Part) -> _Part | None:
        """Return the look without the nodes to which something happened while it lasted, None if none is left."""
        from_s = part.time_s - self._shape.view.span_s - self._shape.view.past_s
        sick: dict[str, str] = {}
        for one in self._disturbances:
            if one.from_s < part.time_s and one.until_s > from_s and one.job in ("", part.run[1]):
                sick[one.node] = one.reason
        keep: NDArray[np.bool_] = np.array(["" not in sick and name not in sick for name in part.nodes], dtype=np.bool_)
        for name in part.nodes:
            if "" in sick or name in sick:
                self.left_out[sick.get(name, sick.get("", ""))] += 1
        if not keep.any():
            return None
        nodes = [name for name, ok in zip(part.nodes, keep, strict=True) if ok]
        return part._replace(nodes=nodes, features=part.features[keep])


def observed(history: HealthyHistory, share: float) -> tuple[Metric, ...]:
    """Return the metrics that were observed in at least this share of the looks."""
    level = FEATURES.index("level")
    present = np.isfinite(history.features[:, :, level]).mean(axis=0)
    return tuple(m for m, ratio in zip(history.shape.view.metrics, present, strict=True) if ratio >= share)
