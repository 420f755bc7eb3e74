"""How the metric of a piece of evidence is drawn: as close to what the detector saw as the history allows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from eagle_eye.schema.action import EvidenceItem
from eagle_eye.schema.labels import METRIC_ENDINGS
from eagle_eye.schema.metrics import BY_NAME, MetricKind, MetricSpec

Form = Literal["value", "growth", "behind", "bits"]
BITS_OF_EASE = 0x01 | 0x02  # an idle GPU and user-set clocks are no trouble
PANELS_MAX = 6

# For quantities that detectors derive, and for events: the metric that shows them best.
STAND_INS: Mapping[str, str] = MappingProxyType(
    {
        "train_step_standstill_seconds": "train_step",
        "rank_silence_seconds": "train_step",
        "node_silence_seconds": "train_step",
        "gpu_idle_seconds": "gpu_utilization_ratio",
        "gpu_silence_seconds": "gpu_power_watts",
        "nccl_sequence_lag": "nccl_sequence",
        "lost_step_share": "train_compute_seconds",
        "slowest_node_share": "train_compute_seconds",
        "deviating_steps": "train_local_grad_norm",
        "steps_since_change": "train_step_seconds",
        "change_point_likelihood": "train_step_seconds",
        "xid": "train_step",
        "sxid": "train_step",
        "gpu_lost": "train_step",
        "process_exit": "train_step",
        "process_exits": "train_step",
        "oom_kill": "node_memory_used_ratio",
        "machine_check": "train_step",
        "host_error": "train_step",
        "kernel_panic": "train_step",
        "training_error": "train_step",
        "nccl_warning": "train_step",
        "link_down": "link_up",
    }
)
_BEHIND = frozenset({"nccl_sequence", "nccl_completed_sequence"})  # a lag of one is invisible among millions
_UNDRAWABLE = frozenset({"train_parameter_checksum"})  # the difference of two checksums is meaningless
# Metrics that people look at next, by kind of trouble.
_CONTEXT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "stop": ("train_step", "gpu_utilization_ratio"),
        "numbers": ("train_loss", "train_grad_norm"),
        "slow": ("train_step_seconds",),
        "pace": ("train_step_seconds",),
        "early": ("train_step_seconds",),
    }
)


class Drawing(NamedTuple):
    """A metric of the catalogue and how it is drawn.

    ``value``: as sent. ``growth``: a counter's increase since the chart's beginning. ``behind``: the lag behind the
    furthest. ``bits``: 1 where a bit of ``mask`` is set, else 0. ``threshold`` is in the same unit; None if none is
    meaningful here.
    """

    metric: MetricSpec
    form: Form
    threshold: float | None = None
    mask: int = 0


class Panel(NamedTuple):
    """One chart for an incident: ``evidence`` is the metric that the detector named, "" for context."""

    drawing: Drawing
    evidence: str
    node: str | None
    device: int | None


def drawing_of(metric: str, threshold: float | None = None, unit: str = "") -> Drawing | None:
    """Return how evidence of this metric is drawn; None if no series of the history shows it."""
    base = next((metric.removesuffix(end) for end in METRIC_ENDINGS if metric.endswith(end)), metric)
    spec = BY_NAME.get(STAND_INS.get(base, base))
    if spec is None or spec.name in _UNDRAWABLE:
        return None
    own = threshold if spec.name == metric and unit in ("", spec.unit) else None
    if spec.kind is MetricKind.MASK:
        mask = int(own) if own is not None and 0 < own < 2**53 else ~BITS_OF_EASE
        return Drawing(spec, "bits", None, mask)
    if spec.kind is MetricKind.COUNTER:
        return Drawing(spec, "growth", own)
    if spec.name in _BEHIND:
        return Drawing(spec, "behind")
    return Drawing(spec, "value", own)


def panels(evidence: list[EvidenceItem], trouble: str) -> list[Panel]:
    """Return an incident's charts: its evidence, then context about the job; each metric once for what it concerns."""
    found: dict[tuple[str, str | None, int | None], Panel] = {}
    for item in evidence:
        drawn = drawing_of(item.metric, item.threshold, item.unit)
        if drawn is None:
            continue
        key = (drawn.metric.name, item.node, item.device)
        if key not in found or (found[key].drawing.threshold is None and drawn.threshold is not None):
            found[key] = Panel(drawn, item.metric, item.node, item.device)
    # Where a node's or device's course is drawn, the whole job's of the same metric shows nothing more.
    of_nodes = {name for name, node, _ in found if node is not None}
    shown = [panel for (name, node, _), panel in found.items() if node is not None or name not in of_nodes]
    drawn_already = {name for name, _, _ in found}
    context = [drawing_of(name) for name in _CONTEXT.get(trouble, ()) if name not in drawn_already]
    return [*shown[:PANELS_MAX], *(Panel(one, "", None, None) for one in context if one is not None)]
