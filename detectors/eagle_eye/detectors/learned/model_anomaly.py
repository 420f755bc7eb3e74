"""Detects a node unlike its own past and its peers, using a model of the site's healthy history."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eagle_eye.detectors.signs.learned_features import FEATURES, NodeFeatures, look
from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.detectors.signs.progress import quiet_phase
from eagle_eye.detectors.types import Blind, Evidence, Floats, Integers, Verdict, Window

NO_MODEL = "no model: run eagle-eye train"
# Rate of sick nodes that no rule names, per 1,000 node-days: the fewest failures of any kind that a fleet has reported
# (2.3, FT-HSDP on 32,000 GPUs). The prior that a chance alarm is weighed against.
SICK_PER_1000_NODE_DAYS = 2.3
CONFIDENCE_MAX = 0.85  # the tail is extrapolated, so no score justifies more
INTERVAL_RATIO_MAX = 1.5  # between the model's interval and the window's: noise depends on the interval
POWER_LIMIT_RATIO = 0.05  # power limits that differ by less are the same
LOOKS_BACK_MAX = 12  # spans searched backwards for the onset
STANDSTILL_SPANS = 1.0  # after this long without a step, other detectors are responsible
# A claim holds while the node stays nearly as strange, so that wavering at the limit makes one incident, not ten.
HELD_RATIO = 30.0  # times the accepted rate
HELD_SPANS = 3  # spans for which it may waver
SUSPECTS_MAX = 16  # nodes examined closely; more at once are no single node's problem
MANY_RATIO = 0.2  # of the nodes: if this many are odd at once the job is, and the peers are no reference
REASONS_MAX = 3  # metrics named
REASON_SHARE_MIN = 0.1  # of the model's reconstruction error
HEALTHY_SIGMAS = 3.0  # from the normal value, given in the evidence as the edge of the healthy range
NEAR_WORD = {"level": "", "change": " (it has changed)", "spread": " (it is unsteady)"}


class _Reason(NamedTuple):
    metric: int
    feature: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Names the node that a model of healthy nodes finds anomalous, and the metrics responsible.

    Scores the ``learned_features`` vector of every node by three views (``learned_model``) and converts each score into
    alarms per node-day with a generalised Pareto tail of healthy scores (Siffer et al., KDD 2017). A node is anomalous
    if two of three views agree for ``model.looks`` consecutive spans on a rate below ``alarms_per_1000_node_days``, and
    no other node is anomalous in the same metric. Only asks for a look. Blind without a model, for a window with
    metrics, interval or hardware other than those learned, and while the job starts, pauses or stands still. Cannot
    see: anomalies shared by all nodes; drift slower than the window, unless it ends far from the peers; what is odd in
    only one view.
    """

    model: LearnedModel | None
    alarms_per_1000_node_days: float
    without: str = NO_MODEL  # why there is no model
    name: str = "learned"

    @property
    def every_s(self) -> float:
        """How often the answer can change: once per span."""
        return self.model.view.span_s if self.model else 0.0

    def detect(self, window: Window) -> list[Verdict]:
        """Return a verdict for each anomalous node."""
        model = self.model
        if model is None:
            raise Blind(self.without)
        if not len(window.nodes):
            return []
        _refuse_unlike_training(model, window)
        until_s = self._until_s(model, window)
        limit = HELD_RATIO * self.alarms_per_1000_node_days / 1000
        nodes = look(window, model.view, until_s)
        _refuse_other_metrics(model, window, nodes)
        inputs = model.inputs(nodes.values)
        scores = model.scores(inputs, limit)
        odd = np.flatnonzero(model.alarms_per_node_day(scores) <= limit)
        if len(odd) == 0:
            return []
        if len(odd) > max(1, MANY_RATIO * len(window.nodes)):
            raise Blind(f"{len(odd)} of {len(window.nodes)} nodes are unlike what was learned: the job is, no node")
        alone = _alone(model, inputs, odd)
        if len(alone) == 0:
            raise Blind(f"{len(odd)} nodes are strange in the same metrics: they share a cause, which is no node's own")
        return self._persistent(model, window, nodes, inputs, alone[:SUSPECTS_MAX], until_s)

    def _until_s(self, model: LearnedModel, window: Window) -> float:
        """Return the end of the newest complete row. Raises Blind while no conclusion is possible."""
        times_s = window.times_s if len(window.times_s) else window.node_times_s
        if not len(times_s):
            raise Blind("no rows yet")
        if quiet_phase(window):
            raise Blind("a rank evaluates or writes a checkpoint: nodes differ then by nature")
        until_s = float(times_s[-1])
        still_s = until_s - window.advanced_s
        if np.isfinite(window.last_step) and still_s > STANDSTILL_SPANS * model.view.span_s:
            raise Blind(f"no step has finished for {still_s:.0f} s")
        return until_s

    def _persistent(
        self, model: LearnedModel, window: Window, nodes: NodeFeatures, inputs: Floats, odd: Integers, until_s: float
    ) -> list[Verdict]:
        """Return the verdicts on nodes that were as anomalous in the preceding spans, or recently were."""
        scores = [model.scores(inputs[odd])]
        for back in range(1, model.looks + HELD_SPANS):
            try:
                before = look(window, model.view, until_s - back * model.view.span_s)
            except Blind as reason:
                if back < model.looks:
                    raise Blind(f"{len(odd)} nodes look strange, for too short a time to tell: {reason}") from None
                break
            scores.append(model.scores(model.inputs(before.values[odd])))
        runs = [np.minimum.reduce(scores[i : i + model.looks]) for i in range(len(scores) - model.looks + 1)]
        rates = np.minimum.reduce([model.alarms_per_node_day(run) for run in runs])
        verdicts = []
        for node, rate in zip(odd.tolist(), rates.tolist(), strict=True):
            if rate <= self.alarms_per_1000_node_days / 1000:
                onset_s = self._onset_s(model, window, node, until_s)
                verdicts.append(self._verdict(model, window, nodes, inputs, node, rate, onset_s))
        return verdicts

    def _onset_s(self, model: LearnedModel, window: Window, node: int, until_s: float) -> float:
        """Return the start of the run of spans in which the node was anomalous."""
        onset_s = until_s - model.looks * model.view.span_s
        for _ in range(LOOKS_BACK_MAX):
            try:
                before = model.inputs(look(window, model.view, onset_s).values[node : node + 1])
            except Blind:
                break
            if model.alarms_per_node_day(model.scores(before))[0] > HELD_RATIO * self.alarms_per_1000_node_days / 1000:
                break
            onset_s -= model.view.span_s
        return onset_s

    def _verdict(
        self,
        model: LearnedModel,
        window: Window,
        nodes: NodeFeatures,
        inputs: Floats,
        node: int,
        alarms_per_node_day: float,
        since_s: float,
    ) -> Verdict:
        name = window.nodes[node]
        rate = 1000 * alarms_per_node_day
        reasons = _reasons(model, inputs[node : node + 1])
        evidence = [_evidence(model, window, nodes, node, reason) for reason in reasons]
        words = [
            f"{e.metric} {e.value:.4g} against {e.peers_median:.4g}{NEAR_WORD[FEATURES[r.feature]]}"
            for e, r in zip(evidence, reasons, strict=True)
        ]
        score = Evidence(
            "learned_alarms_per_1000_node_days", name, None, rate, None, self.alarms_per_1000_node_days, "alarms"
        )
        return Verdict(
            detector=self.name,
            fault="node_anomaly",
            job=window.job,
            nodes=(name,),
            node=name,
            device=next((e.device for e in evidence if e.device is not None), None),
            confidence=min(SICK_PER_1000_NODE_DAYS / (SICK_PER_1000_NODE_DAYS + rate), CONFIDENCE_MAX),
            onset_s=since_s,
            summary=(
                f"{name} is unlike its peers and what was learned of healthy nodes: {', '.join(words)};"
                f" a healthy node looks so {rate:.2g} times in 1,000 node-days"
            ),
            evidence=(*evidence, score),
            kinds=frozenset({"learned"}),
            asks="notify",
        )


def _refuse_unlike_training(model: LearnedModel, window: Window) -> None:
    """Raise Blind if the window is of another fleet than the model's."""
    ratio = window.interval_s / model.interval_s
    if not 1 / INTERVAL_RATIO_MAX <= ratio <= INTERVAL_RATIO_MAX:
        raise Blind(
            f"the model learned rows of {model.interval_s:g} s, not of {window.interval_s:g} s: run eagle-eye train"
        )
    counts = np.bincount(window.node_of, minlength=len(window.nodes)) if len(window.node_of) else np.zeros(1, np.intp)
    other = sorted(set(counts.tolist()) - set(model.gpus_per_node) - {0})
    if other:
        raise Blind(f"the model learned nodes of {_listed(model.gpus_per_node)} GPUs, not of {_listed(other)}")
    limits = window.device.get("gpu_power_limit_watts")
    if model.power_limits_watts and limits is not None and len(limits) and np.isfinite(limits[-1]).any():
        watts = float(np.median(limits[-1][np.isfinite(limits[-1])]))
        if min(abs(watts / known - 1) for known in model.power_limits_watts) > POWER_LIMIT_RATIO:
            raise Blind(
                f"the model learned GPUs of {_listed(model.power_limits_watts)} W, these have {watts:.0f} W:"
                " run eagle-eye train on this hardware"
            )


def _refuse_other_metrics(model: LearnedModel, window: Window, nodes: NodeFeatures) -> None:
    absent = [
        m.name for m in model.view.metrics if (window.device if m.per_device else window.node).get(m.name) is None
    ]
    if absent:
        more = f" and {len(absent) - REASONS_MAX} more" if len(absent) > REASONS_MAX else ""
        raise Blind(
            f"the model learned {', '.join(absent[:REASONS_MAX])}{more}, which no node of this job reports:"
            " run eagle-eye train"
        )
    if not np.isfinite(nodes.values).any():
        raise Blind("no node has comparable peers that report what the model learned")


def _alone(model: LearnedModel, inputs: Floats, odd: Integers) -> Integers:
    """Return the odd nodes whose oddest metric no other odd node shares."""
    oddest = np.array([_reasons(model, inputs[node : node + 1])[0].metric for node in odd.tolist()])
    alone: Integers = odd[np.bincount(oddest)[oddest] == 1]
    return alone


def _reasons(model: LearnedModel, inputs: Floats) -> list[_Reason]:
    """Return the metrics that the autoencoder reconstructs worst, with their oddest feature, worst first."""
    residuals = model.residuals(inputs).reshape(-1, len(FEATURES))
    shares = residuals.sum(axis=1) / max(float(residuals.sum()), 1e-12)
    order = np.argsort(-shares, kind="stable")[:REASONS_MAX]
    found = [_Reason(int(m), int(residuals[m].argmax()), float(shares[m])) for m in order]
    return [reason for reason in found if reason.share >= REASON_SHARE_MIN] or found[:1]


def _evidence(model: LearnedModel, window: Window, nodes: NodeFeatures, node: int, reason: _Reason) -> Evidence:
    metric = model.view.metrics[reason.metric]
    line = sum(m.per_device == metric.per_device for m in model.view.metrics[: reason.metric])
    course = nodes.device if metric.per_device else nodes.node
    column, device = node, None
    if metric.per_device:
        own = np.flatnonzero(window.node_of == node)
        away = np.abs(course.level[line, own] - course.peers[line, own])
        column = int(own[np.argmax(np.where(np.isfinite(away), away, -1.0))])
        device = window.series[column].device
    level, peers = float(course.level[line, column]), float(course.peers[line, column])
    centre, scale = float(model.centre[reason.metric, 0]), float(model.scale[reason.metric, 0])
    side = 1.0 if level >= peers else -1.0
    edge = peers + (centre + side * HEALTHY_SIGMAS * scale) * float(course.grain[line, column])
    return Evidence(metric.name, window.nodes[node], device, level, peers, edge, metric.unit)


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{v:g}" for v in sorted(values))
