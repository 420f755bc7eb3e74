"""One simulated run in memory, in columns, before a site's instruments omit anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from eagle_eye.simulator.arrays import Booleans, Floats
from eagle_eye.simulator.layout import ClusterLayout
from eagle_eye.simulator.scenario import Scenario


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
