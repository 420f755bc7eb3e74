"""Recurrence score of a node: how much its four-week record suggests that it will fail again. Pure.

A few nodes make up most of a fleet's failures, and pass every test in between. The signals are those of Kokolis et al.,
"Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (HPCA 2025), where seven signals over 28 days
found 40 lemons, more than 85% of them correctly, and removing those reduced failures of jobs of 512 and more GPUs from
14% to 4%: ``excl_jobid_count``, ``xid_cnt``, ``tickets``, ``out_count``, ``multi_node_node_fails``,
``single_node_node_fails``, ``single_node_node_failure_rate``. Their thresholds are tuned to their fleet and not
published; the weights here are our own, given as data with the reason for each. An eighth signal is what the node's
GPUs did in other nodes, since repairs move parts.

The score is 1 - product(1 - weight x strength): independent signals support each other, and since no weight reaches
``RECURRENT_MIN`` no single kind of evidence makes a node recurrent. What half of the fleet's nodes have is attributed
to the fleet (a driver, a cooling failure), not to the node, and is subtracted first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

DAY_S = 86_400.0
WINDOW_S = 28 * DAY_S  # as in the paper
RECURRENT_MIN = 0.75  # from here on a node is called recurrent; the paper says lemon
KNOWN_MIN_S = 7 * DAY_S  # a node known for less time has too little history
CULPRIT_ENOUGH = 3  # unless it failed this often already
FLEET_MIN = 5  # minimum number of nodes for a meaningful median
SINGLE_ATTEMPTS_MIN = 5  # minimum number for a failure rate


class RecurrenceSignal(NamedTuple):
    """One kind of evidence: at ``full`` (count or rate) it adds its whole ``weight``; ``field`` is the counted field.

    ``source`` is the paper's name for it, "" for our own.
    """

    field: str
    weight: float
    full: float
    source: str
    why: str


SIGNALS: tuple[RecurrenceSignal, ...] = (
    RecurrenceSignal(
        "multi_node_failures",
        0.6,
        3,
        "multi_node_node_fails",
        "Stops a whole job, and the node was told from its peers; three in four weeks is more than chance.",
    ),
    RecurrenceSignal(
        "excluding_jobs",
        0.5,
        3,
        "excl_jobid_count",
        "Different jobs are independent witnesses; one job may dislike a node for its own reasons.",
    ),
    RecurrenceSignal(
        "single_node_failures",
        0.4,
        3,
        "single_node_node_fails",
        "No peers to compare with: the program is more often to blame than among many nodes.",
    ),
    RecurrenceSignal(
        "single_node_failure_ratio",
        0.3,
        0.5,
        "single_node_node_failure_rate",
        "A busy node fails more often; the share of failing jobs takes that out. It rests on the same failures.",
    ),
    RecurrenceSignal(
        "taken_out",
        0.4,
        3,
        "out_count",
        "Somebody saw a reason each time; planned work takes nodes out too, so it is worth less than a failure.",
    ),
    RecurrenceSignal(
        "driver_errors",
        0.4,
        3,
        "xid_cnt",
        "Different codes that speak of hardware; many lines of one code are one trouble.",
    ),
    RecurrenceSignal(
        "tickets", 0.4, 2, "tickets", "A repair that did not last; tickets are also opened for the rack or the room."
    ),
    RecurrenceSignal(
        "inherited_failures",
        0.3,
        2,
        "",
        "Its GPUs were the culprits in other nodes before they came; the slot or the host there may have been.",
    ),
)


@dataclass(slots=True)
class NodeRecord:
    """One node's record within the window. ``known_s`` is how long the node has been known in total."""

    known_s: float = 0.0
    multi_node_failures: int = 0
    single_node_failures: int = 0
    single_node_attempts: int = 0
    excluding_jobs: int = 0
    taken_out: int = 0
    driver_errors: int = 0
    tickets: int = 0
    inherited_failures: int = 0
    incidents: int = 0  # in which it was the only one accused, of any kind; shown to people, not a signal

    @property
    def single_node_failure_ratio(self) -> float:
        """The share of its single-node attempts that it caused to fail; 0 while there are too few to tell."""
        if self.single_node_attempts < SINGLE_ATTEMPTS_MIN:
            return 0.0
        return min(self.single_node_failures / self.single_node_attempts, 1.0)


class Contribution(NamedTuple):
    """One signal's contribution: its value, the fleet's usual value, and how much it adds to the score."""

    signal: str
    value: float
    usual: float
    adds: float


@dataclass(frozen=True, slots=True)
class RecurrenceScore:
    """A node's score, 0 (nothing on record) to below 1; None if unknown, with the ``reason``."""

    score: float | None
    contributions: tuple[Contribution, ...] = ()
    reason: str = ""

    @property
    def is_recurrent(self) -> bool:
        """Whether the score reaches RECURRENT_MIN; False without a score."""
        return self.score is not None and self.score >= RECURRENT_MIN


def usual(pasts: Iterable[NodeRecord]) -> Mapping[str, float]:
    """Return the value of each signal that at least half of the fleet's nodes have; empty for a small fleet."""
    fleet: Sequence[NodeRecord] = list(pasts)
    if len(fleet) < FLEET_MIN:
        return {signal.field: 0.0 for signal in SIGNALS}
    return {signal.field: float(median(getattr(past, signal.field) for past in fleet)) for signal in SIGNALS}


def score(past: NodeRecord, fleet: Mapping[str, float]) -> RecurrenceScore:
    """Return a node's score; ``fleet`` is the result of ``usual`` for all nodes."""
    culprit = past.multi_node_failures + past.single_node_failures
    if past.known_s < KNOWN_MIN_S and culprit < CULPRIT_ENOUGH:
        return RecurrenceScore(
            None,
            reason=(
                f"known for {past.known_s / DAY_S:.1f} days, failures: {culprit};"
                f" {KNOWN_MIN_S / DAY_S:.0f} days or {CULPRIT_ENOUGH} failures are needed"
            ),
        )
    weighed = []
    innocent = 1.0
    for signal in SIGNALS:
        value = float(getattr(past, signal.field))
        strength = min(max(value - fleet[signal.field], 0.0) / signal.full, 1.0)
        if strength > 0:
            innocent *= 1 - signal.weight * strength
            weighed.append((signal, value, signal.weight * strength))
    total = 1 - innocent
    contributions = [
        Contribution(signal.field, value, fleet[signal.field], total - (1 - innocent / (1 - part)))
        for signal, value, part in weighed
    ]
    return RecurrenceScore(total, tuple(sorted(contributions, key=lambda c: (-c.adds, c.signal))))


@dataclass(frozen=True, slots=True)
class Scores:
    """The whole fleet's scores, as of ``made_s``."""

    made_s: float
    by_node: Mapping[str, RecurrenceScore] = field(default_factory=dict)
    pasts: Mapping[str, NodeRecord] = field(default_factory=dict)

    def recurrent_by_score(self) -> list[tuple[str, float]]:
        """Return the recurrent nodes, the worst first."""
        found = [(node, one.score) for node, one in self.by_node.items() if one.is_recurrent and one.score is not None]
        return sorted(found, key=lambda item: (-item[1], item[0]))


def scores(pasts: Mapping[str, NodeRecord], now_s: float) -> Scores:
    """Return every node's score."""
    fleet = usual(pasts.values())
    return Scores(now_s, {node: score(past, fleet) for node, past in pasts.items()}, pasts)
