"""What the page's charts draw and say: a metric beside its peers, a job's course, the lanes of its past. Pure.

NaN means not observed, or unknown, which is never the same as 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from eagle_eye.schema.action import EvidenceItem, MemberRank
from eagle_eye.schema.labels import METRIC_ENDINGS, metric_label, number, throttled_by
from eagle_eye.schema.metrics import BY_NAME, MetricKind, MetricSpec, Scope
from eagle_eye.schema.names import natural_order
from eagle_eye.server.accounts import goodput
from eagle_eye.server.accounts.goodput import TimelineSpan
from eagle_eye.server.history.history import SeriesKey, SeriesSteps, Statistic
from eagle_eye.server.model.records import Attempt, Incident

# How the metric of a piece of evidence is drawn: as close to what the detector saw as the history allows.

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


# Which nodes a chart highlights, and the peers that it compares them with.

PEER_NODES_MAX = 16  # enough for a median and a spread: with eight GPUs each, 128 series
ACCUSED_MAX = 16  # nodes of one incident that are drawn as one


class Cast(NamedTuple):
    """The nodes that a chart shows.

    ``peers`` are those of the ``peers_total`` comparable nodes that are read, evenly picked. ``roles`` are those of the
    accused's ranks, ``role_of`` all known roles; if both are empty, roles are unknown and all members are compared.
    """

    accused: tuple[str, ...]
    device: int | None
    peers: tuple[str, ...]
    peers_total: int
    roles: frozenset[str]
    role_of: Mapping[tuple[str, int], str]

    @property
    def said(self) -> str:
        """A phrase for the nodes that the accused are compared with."""
        if not self.peers_total:
            return "no other node: none takes part"
        whom = f"{self.peers_total} other node{'s' if self.peers_total > 1 else ''}"
        named = sorted(self.roles - {""})
        alike = f"ranks of role {', '.join(named[:4])} on {whom}" if named else whom
        drawn = "" if len(self.peers) == self.peers_total else f", of which {len(self.peers)} are drawn"
        return f"{alike} of the same attempt{drawn}"

    def comparable(self, node: str, device: int) -> bool:
        """Return whether a peer's series does the same work as the accused."""
        return not self.roles or self.role_of.get((node, device), "") in self.roles


def cast(
    accused: Sequence[str],
    device: int | None,
    members: Iterable[MemberRank],
    nodes: Iterable[str],
    peers_max: int = PEER_NODES_MAX,
) -> Cast:
    """Return the nodes to show; ``members`` are the attempt's known ranks, ``nodes`` its nodes in their order."""
    blamed = tuple(dict.fromkeys(accused))
    role_of = {(rank.node, rank.device): rank.role for rank in members}
    roles = frozenset(
        role for (node, at), role in role_of.items() if node in blamed and (device is None or at == device)
    )
    everybody = dict.fromkeys([*nodes, *(node for node, _ in role_of)])
    alike = {node for (node, _), role in role_of.items() if role in roles} if roles else everybody
    others = [node for node in everybody if node in alike and node not in blamed]
    return Cast(blamed[:ACCUSED_MAX], device, picked(others, peers_max), len(others), roles, role_of)


def picked(names: Sequence[str], most: int) -> tuple[str, ...]:
    """Return at most ``most`` of the names, evenly spaced from first to last; deterministic."""
    if len(names) <= most:
        return tuple(names)
    return tuple(names[at * len(names) // most] for at in range(most))


# The time range that a chart shows, and the length of its steps.

POINTS = 300  # approximate number of steps: a screen has few more columns
POINTS_MAX = 2_000
# Lengths aligned with minutes and hours, so that downsampled buckets fill whole steps.
STEPS_S = (
    1.0,
    2.0,
    5.0,
    10.0,
    15.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1_800.0,
    3_600.0,
    10_800.0,
    21_600.0,
    86_400.0,
    172_800.0,
)
BEFORE_S = 180.0  # normal behaviour must be visible...
AFTER_S = 120.0  # ...and whether it continued
LENGTH_S_MAX = 14 * 86_400.0


class Stretch(NamedTuple):
    """A time range in steps: the start of its first step, their length and number."""

    start_s: float
    step_s: float
    steps: int

    @property
    def end_s(self) -> float:
        """The end of the last step."""
        return self.start_s + self.steps * self.step_s

    @property
    def times_s(self) -> list[float]:
        """The start of each step."""
        return [self.start_s + at * self.step_s for at in range(self.steps)]


def stretch(start_s: float, end_s: float, points: int = POINTS, least_s: float = 0.0) -> Stretch:
    """Return the range in about ``points`` steps of a round length, none shorter than ``least_s``."""
    wanted_s = max((end_s - start_s) / points, least_s, STEPS_S[0])
    step_s = next((length for length in STEPS_S if length >= wanted_s), STEPS_S[-1])
    begin_s = start_s // step_s * step_s
    return Stretch(begin_s, step_s, max(1, int(-((begin_s - end_s) // step_s))))


def around(incident: Incident, now_s: float) -> tuple[float, float]:
    """Return start and end of the range that shows an incident: from before its onset to after its verdict or end."""
    reported_s = max(incident.detected_s, incident.onset_s)
    lasted_s = reported_s - incident.onset_s
    over_s = incident.ended_s if incident.ended_s is not None else incident.seen_s
    end_s = max(reported_s, min(over_s, reported_s + max(lasted_s, 2 * AFTER_S))) + max(AFTER_S, lasted_s / 2)
    start_s = max(incident.onset_s - max(BEFORE_S, lasted_s), end_s - LENGTH_S_MAX)
    return start_s, max(min(end_s, now_s), start_s + 1.0)


# A chart of a metric: the accused's values, and the band of its peers.

LOW, HIGH = 5.0, 95.0  # percentiles that bound the band
BAND_MIN = 3  # minimum number of peers for a band
SILENT_STEPS_MIN = 2  # shorter gaps come from the sampling

Floats = np.ndarray[Any, np.dtype[np.float64]]


class Band(NamedTuple):
    """A chart. All columns have one value for each step; ``seen`` counts the peers' series observed in it."""

    accused: Floats
    low: Floats
    median: Floats
    high: Floats
    seen: Floats
    accused_series: int
    peer_series: int
    not_finite: int  # non-finite values of peers, which are excluded from the band


def statistic_of(drawing: Drawing) -> Statistic:
    """Return the statistic of a step that is drawn."""
    if drawing.form == "growth":
        return "increase"
    if drawing.form == "bits":
        return "max"
    return "mean" if drawing.metric.kind is MetricKind.GAUGE else "last"


def band(series: Mapping[SeriesKey, SeriesSteps], steps: int, drawing: Drawing, cast: Cast) -> Band:
    """Return the accused's values (the mean of its series) and the peers' median and percentiles in each step.

    Only peers' series that do comparable work count. Without other nodes the accused node's other devices are the
    peers.
    """
    keys = list(series)
    values = matrix(series, steps)
    values = _formed(values, drawing)
    own, others = _sides(keys, drawing.metric, cast)
    peers = values[others]
    infinite = np.isinf(peers)
    peers = np.where(infinite, np.nan, peers)
    low, median, high = percentiles(peers)
    return Band(
        mean(values[own]), low, median, high, np.isfinite(peers).sum(axis=0), len(own), len(others), int(infinite.sum())
    )


def matrix(series: Mapping[SeriesKey, SeriesSteps], steps: int) -> Floats:
    """Return the series as rows (S, T), NaN where a step has no value."""
    values = np.full((len(series), steps), np.nan)
    for line, found in enumerate(series.values()):
        at = np.asarray(found.steps, dtype=np.int64)
        inside = (at >= 0) & (at < steps)
        values[line, at[inside]] = np.asarray(found.values)[inside]
    return values


def percentiles(values: Floats) -> tuple[Floats, Floats, Floats]:
    """Return each column's low percentile, median and high percentile; NaN with too few values for a band, or none."""
    seen = np.isfinite(values).sum(axis=0)
    low, median, high = (np.full(values.shape[1], np.nan) for _ in range(3))
    some = seen > 0
    if some.any():
        low[some], median[some], high[some] = np.nanpercentile(values[:, some], (LOW, 50.0, HIGH), axis=0)
        low[seen < BAND_MIN] = high[seen < BAND_MIN] = np.nan
    return low, median, high


def mean(values: Floats) -> Floats:
    """Return each column's mean over observed values; NaN where there are none."""
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    with np.errstate(invalid="ignore"):
        total = np.where(known, values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def begun(found: Band) -> int:
    """Return the number of leading steps without any observation: the attempt had not begun."""
    seen = ~np.isnan(found.accused) | (found.seen > 0)
    return int(np.argmax(seen)) if seen.any() else 0


def without(found: Band, steps: int) -> Band:
    """Return the band without its first ``steps`` steps."""
    columns = (found.accused, found.low, found.median, found.high, found.seen)
    accused, low, median, high, seen = (column[steps:] for column in columns)
    return found._replace(accused=accused, low=low, median=median, high=high, seen=seen)


def silences(found: Band) -> list[tuple[int, int]]:
    """Return the ranges of steps (first and last) in which peers were observed but the accused was not."""
    if not found.accused_series or not found.peer_series:
        return []
    missing = np.isnan(found.accused) & (found.seen > 0)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], missing.astype(np.int8), [0]])))
    pairs = zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True)
    return [(first, last) for first, last in pairs if last - first + 1 >= SILENT_STEPS_MIN]


def _sides(keys: list[SeriesKey], metric: MetricSpec, cast: Cast) -> tuple[list[int], list[int]]:
    """Return the rows of the accused and those of the peers."""
    own: list[int] = []
    others: list[int] = []
    beside: list[int] = []
    for line, (node, key) in enumerate(keys):
        by_device = metric.scope is Scope.DEVICE and isinstance(key, int)
        if node in cast.accused:
            mine = not by_device or cast.device is None or key == cast.device
            (own if mine else beside).append(line)
        elif not by_device or cast.comparable(node, int(key)):
            others.append(line)
    return own, others or beside


def _formed(values: Floats, drawing: Drawing) -> Floats:
    if drawing.form == "growth":
        known = ~np.isnan(values)
        grown = np.cumsum(np.where(known, values, 0.0), axis=1)
        return np.where(known, grown, np.nan)
    if drawing.form == "bits":
        masks = np.where(np.isfinite(values), values, 0.0).astype(np.int64)
        return np.where(np.isnan(values), np.nan, (masks & drawing.mask != 0).astype(np.float64))
    if drawing.form == "behind" and values.size:
        highest = np.max(np.where(np.isfinite(values), values, -np.inf), axis=0)
        front = np.maximum.accumulate(highest)
        return np.where(np.isfinite(front), front - values, np.nan)
    return values


# The chart in sentences, for people who cannot see it or have no time to look.


def described(found: Band, shown: Stretch, drawing: Drawing, cast: Cast, name: str, detected_s: float) -> list[str]:
    """Return what the chart shows at the verdict, what was not observed, and what it leaves out."""
    unit = drawing.metric.unit
    at = min(max(int((detected_s - shown.start_s) // shown.step_s), 0), shown.steps - 1)
    sentences = [_at_verdict(found, at, drawing, name, unit)]
    if drawing.threshold is not None:
        sentences.append(f"The threshold is {number(drawing.threshold, unit)}.")
    intervals = f"{shown.steps} intervals of {shown.step_s:g} s"
    missing = np.isnan(found.accused) & (found.seen > 0)
    if found.accused_series and missing.any():
        sentences.append(f"No data from {name} in {missing.sum()} of {intervals} in which its peers reported.")
    nobody = np.isnan(found.accused) & (found.seen == 0)
    if nobody.any() and not nobody.all():
        sentences.append(f"No data from any node in {nobody.sum()} of {intervals}.")
    if np.isinf(found.accused).any():
        sentences.append(f"{name} was not finite in {np.isinf(found.accused).sum()} of {intervals}.")
    if found.not_finite:
        sentences.append(f"{found.not_finite} values of its peers were not finite and are left out of the band.")
    sentences.append(f"Compared with {cast.said}." if cast.accused else f"Shown: {cast.said}.")
    return sentences


def axis_label(metric: MetricSpec, drawing: Drawing) -> str:
    """Return the label of the vertical axis."""
    words = metric.help.rstrip(".")
    if drawing.form == "growth":
        return f"{words}: increase since the start of the chart"
    if drawing.form == "behind":
        return f"{words}: lag behind the furthest rank"
    if drawing.form == "bits":
        return f"Whether the clock is held down by {_reasons(drawing)}"
    return words


def _reasons(drawing: Drawing) -> str:
    """Return the reasons that the drawing's mask stands for."""
    return throttled_by(drawing.mask) if drawing.mask > 0 else "anything but an idle GPU or clocks set by a user"


def _at_verdict(found: Band, at: int, drawing: Drawing, name: str, unit: str) -> str:
    own, median = _near(found.accused, at), _near(found.median, at)
    if not found.accused_series and not found.peer_series:
        return f"The history has no {metric_label(drawing.metric.name)!r} for this time."
    if not found.accused_series:
        subject = (
            f"At the verdict the median is {number(median, unit)}" if np.isfinite(median) else "No data at the verdict"
        )
    elif np.isnan(own):
        subject = f"At the verdict there is no data from {name}"
    elif drawing.form == "bits":
        held = "was" if own > 0 else "was not"
        return f"At the verdict the clock of {name} {held} held down by {_reasons(drawing)}."
    else:
        subject = f"At the verdict {name} was at {number(own, unit)}"
    if found.accused_series and np.isfinite(median):
        subject += f", its peers' median at {number(median, unit)}"
    low, high = _near(found.low, at), _near(found.high, at)
    if np.isfinite(low) and np.isfinite(high):
        subject += f" (5% to 95%: {number(low, unit)} to {number(high, unit)})"
    return f"{subject}."


def _near(values: Floats, at: int) -> float:
    """Return the value of the step, or of one of the two before it."""
    known = [value for value in values[max(at - 2, 0) : at + 1] if not np.isnan(value)]
    return float(known[-1]) if known else math.nan


# A job's progress: step times, losses and throughput from its ranks' series, and its goodput.

TRAILING_S = 600.0  # window of the goodput sum: as long as a restart including repeated steps
SPANS_MAX = 1_000


class Spread(NamedTuple):
    """A metric over the ranks in each step; ``seen`` counts the ranks, ``infinite`` the non-finite values."""

    low: Floats
    median: Floats
    high: Floats
    seen: Floats
    infinite: Floats


def rank_spread(series: Mapping[SeriesKey, SeriesSteps], steps: int) -> Spread:
    """Return the median and the percentiles of the finite values."""
    values = matrix(series, steps)
    infinite = np.isinf(values)
    values = np.where(infinite, np.nan, values)
    return Spread(*percentiles(values), np.isfinite(values).sum(axis=0), infinite.sum(axis=0))


def rank_total(series: Mapping[SeriesKey, SeriesSteps], steps: int, nodes_read: int, nodes: int) -> Floats:
    """Return the sum over all ranks: the mean of those read, times the maximum number present at once.

    A rank whose agent is late causes no dip. Where only some nodes were read the others are assumed equal to these.
    """
    values = matrix(series, steps)
    known = np.isfinite(values)
    count = known.sum(axis=0)
    if not count.any() or not nodes_read:
        return np.full(steps, np.nan)
    means = np.where(known, values, 0.0).sum(axis=0) / np.maximum(count, 1)
    return np.where(count > 0, means * float(count.max()) * max(nodes, nodes_read) / nodes_read, np.nan)


def goodput_course(spans: Sequence[TimelineSpan], times_s: Sequence[float], trailing_s: float = TRAILING_S) -> Floats:
    """Return the goodput ratio of at most ``trailing_s`` up to each moment; NaN where unknown."""
    found = np.full(len(times_s), np.nan)
    for at, time_s in enumerate(times_s):
        ratio = goodput.account(goodput.clipped(spans, time_s - trailing_s, time_s)).goodput_ratio
        if ratio is not None:
            found[at] = ratio
    return found


def merged_spans(spans: Sequence[TimelineSpan], most: int = SPANS_MAX) -> list[TimelineSpan]:
    """Return at most ``most`` spans, by merging the shortest into their predecessors."""
    kept = list(spans)
    if len(kept) <= most:
        return kept
    least_s = sorted((span.seconds for span in kept), reverse=True)[most - 1]
    found: list[TimelineSpan] = []
    for span in kept:
        if found and (span.seconds < least_s or len(found) >= most):
            found[-1] = found[-1]._replace(end_s=span.end_s)
        else:
            found.append(span)
    return found


# The nodes' part in a job over time, as a limited number of rows.

LANE_ROWS_MAX = 256
NAMES_MAX = 8  # nodes named per row


class Bar(NamedTuple):
    """An attempt in which the row's nodes took part: begin, end, and number of nodes."""

    attempt_id: str
    attempt: int
    start_s: float
    end_s: float
    nodes: int


class LaneRow(NamedTuple):
    """One node, or ``size`` neighbours in the order of their names; ``incidents`` are ids of those concerning them.

    ``ranks`` are the lowest and highest rank there in the newest report, None if unknown.
    """

    label: str
    nodes: tuple[str, ...]
    size: int
    ranks: tuple[int, int] | None
    bars: tuple[Bar, ...]
    incidents: tuple[str, ...]


def lane_rows(
    attempts: Sequence[Attempt],
    members: Mapping[str, Sequence[str]],
    ranks: Iterable[MemberRank],
    incidents: Sequence[Incident],
    now_s: float,
    most: int = LANE_ROWS_MAX,
) -> list[LaneRow]:
    """Return at most ``most`` rows in the order of the nodes' names.

    ``members`` are the nodes of each attempt by its id. A node that an incident accuses gets a row of its own, while
    there is room; the others share rows if there are too many.
    """
    taking_part: dict[str, set[str]] = defaultdict(set)
    for attempt in attempts:
        for node in members.get(attempt.id, ()):
            taking_part[node].add(attempt.id)
    concerned: dict[str, list[str]] = defaultdict(list)
    accused: dict[str, None] = {}
    for incident in incidents:
        for node in incident.nodes:
            concerned[node].append(incident.id)
        if incident.node is not None:
            accused[incident.node] = None
    of_node: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        of_node[rank.node].append(rank.rank)
    names = sorted(taking_part, key=natural_order)
    alone = set(list(accused)[: (most - 1) // 2])
    return [_row(group, attempts, taking_part, of_node, concerned, now_s) for group in _groups(names, alone, most)]


def _groups(names: list[str], alone: set[str], most: int) -> list[list[str]]:
    """Return the names in order, in groups of neighbours; those in ``alone`` share no group."""
    if len(names) <= most:
        return [[name] for name in names]
    apart = [name for name in names if name in alone]
    # Each separate node splits the group around it, so that it costs two rows.
    room = max(1, most - 2 * len(apart))
    size = -(-(len(names) - len(apart)) // room)
    groups: list[list[str]] = []
    open_ = False
    for name in names:
        if name in alone:
            groups.append([name])
            open_ = False
        elif open_ and len(groups[-1]) < size:
            groups[-1].append(name)
        else:
            groups.append([name])
            open_ = True
    return groups


def _row(
    group: list[str],
    attempts: Sequence[Attempt],
    taking_part: Mapping[str, set[str]],
    ranks: Mapping[str, list[int]],
    concerned: Mapping[str, list[str]],
    now_s: float,
) -> LaneRow:
    bars = []
    for attempt in attempts:
        there = sum(attempt.id in taking_part[name] for name in group)
        if there:
            end_s = max(attempt.started_s, now_s if attempt.ended_s is None else attempt.ended_s)
            bars.append(Bar(attempt.id, attempt.attempt, attempt.started_s, end_s, there))
    numbers = [number for name in group for number in ranks.get(name, ())]
    label = group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}"
    return LaneRow(
        label,
        tuple(group[:NAMES_MAX]),
        len(group),
        (min(numbers), max(numbers)) if numbers else None,
        tuple(bars),
        tuple(dict.fromkeys(one for name in group for one in concerned.get(name, ()))),
    )
