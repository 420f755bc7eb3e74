"""Detects storage that does not deliver while the job waits for data or checkpoints and stalls or slows down."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.exits import unplanned_exits
from eagle_eye.detectors.signs.job_slowdown import QuantityChange, changed_lately, overdue, slower
from eagle_eye.detectors.signs.medians import quantile_over_rows
from eagle_eye.detectors.signs.progress import Patience, Progress, hooked, progress
from eagle_eye.detectors.signs.recent_rows import held, lines_for, middle, past
from eagle_eye.detectors.signs.topology import named
from eagle_eye.detectors.signs.under_load import standby_nodes
from eagle_eye.detectors.types import Blind, Evidence, Floats, Verdict, Window

# Metric, minimum value, unit. Healthy training nodes show a few hundredths and no blocked tasks; a fifth of a host's
# time (pressure stall information) and three stuck tasks are more than page caches and log files cause.
SIGNS = (
    ("node_iowait_ratio", 0.10, "ratio"),
    ("node_io_pressure_ratio", 0.20, "ratio"),
    ("node_blocked_tasks", 3.0, "tasks"),
)
PAST_FACTOR = 3.0  # times the node's own past
MANY_RATIO = 0.5  # of the nodes: the storage; fewer: undecidable; one: its host
NEARLY_ALL_RATIO = 0.8  # of the nodes, above which listing them is pointless
HELD_QUANTILE = 0.3  # of the rows of HOLD_S, which must be high: pressure comes in bursts
HOLD_S = 15.0  # ordinary flushes take less
ROWS_MIN = 3
FLOWING_BYTES_PER_S = 1e8  # a host that moves this much is writing, not stuck
FLOWS = (
    "node_disk_write_bytes_per_second", "node_disk_read_bytes_per_second",
    "node_network_tx_bytes_per_second", "node_network_rx_bytes_per_second",
)  # fmt: skip
UNFELT_S = 60.0  # where nothing reports how the job is doing
SLOWER_RATIO = 0.05  # a smaller slowdown is not worth reporting
WAIT_EXCESS_RATIO = 0.05  # of a step, by which the wait for data must have grown
CONFIDENCE_MANY, CONFIDENCE_HINT, CONFIDENCE_HOST = 0.93, 0.75, 0.7

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStall:
    """Finds ``storage_stall``: I/O wait, I/O pressure or blocked tasks on at least half of the nodes, felt by the job.

    Felt means that no step finishes although one is due, or that steps are longer along with the waits for data. A
    standstill while data flows is judged, in a checkpoint, by the job's own history of checkpoints; outside any phase
    it must be ripe, since it may be an unannounced checkpoint; where nothing flows, a first checkpoint gets the site's
    floor. The signs must hold for ``HOLD_S`` and be ``PAST_FACTOR`` times each node's own past. The verdict on a
    standstill carries "standstill": it explains a hang without a culprit, so that nothing restarts a job that is
    writing. Nodes that stand by do not count. If the job reports no progress, I/O that most hosts have waited on for a
    minute while hardly any data flows is reported anyway. If only one node is affected, its host is suspect and
    reported; whether it slows the job enough to be excluded is up to Straggler. Blind without these metrics. Cannot
    see: storage that is slow from the start; direct or remote I/O that shows in none of the three.
    """

    patience: Patience
    name: str = "storage_stall"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        rows = [(metric, window.node[metric], least, unit) for metric, least, unit in SIGNS if metric in window.node]
        if not rows:
            raise Blind("no I/O wait, I/O pressure or blocked tasks are observed")
        if not any((values[-ROWS_MIN:] >= least).any() for _, values, least, _ in rows):
            return []
        if len(window.node_times_s) < ROWS_MIN or unplanned_exits(window):
            return []
        if overdue(window, self.patience):
            return self._standing(window, rows)
        return self._slower(window, rows)

    def _standing(self, window: Window, rows: list[tuple[str, Floats, float, str]]) -> list[Verdict]:
        state = progress(window, self.patience)
        struck, found = _struck(window, rows, state.advanced_s)
        flowing = _flowing(window, struck)
        due_s = self._due_s(window, state, flowing)
        if state.standstill_s < due_s:
            return []
        count = int(struck.sum())
        if count == 1 and (not state.ripe or not _waits_for_io(found)):
            return []
        what = f"no step for {state.standstill_s:.1f} s" if state.reported else str(state)
        if state.phase:
            what += f" in {state.phase}"
        what += ", while data still flows" if flowing else ", and hardly any data flows"
        evidence = replace(state.evidence, threshold=due_s)
        return self._verdict(window, struck, [*found, evidence], what, state.advanced_s, "standstill", 0.0, sure=True)

    def _due_s(self, window: Window, state: Progress, flowing: bool) -> float:
        """Return how long a standstill must last: while data flows it may be a checkpoint, announced or not."""
        if flowing:
            return state.due_s if state.phase else state.ripe_s
        if any(pause.phase == state.phase for pause in window.pauses) or not state.phase:
            return max(state.due_s, HOLD_S)
        return min(state.due_s, self.patience.floor_s)  # its first checkpoint, but nothing is being written

    def _slower(self, window: Window, rows: list[tuple[str, Floats, float, str]]) -> list[Verdict]:
        steps = slower(window)
        if steps is None and not hooked(window):
            return self._unfelt(window, rows)
        if steps is None or not steps.sure or steps.ratio < SLOWER_RATIO:
            return []
        if window.now_s - steps.since_s < HOLD_S:
            return []
        waits = changed_lately(window, "train_data_wait_seconds")
        waiting = waits is not None and waits.now - waits.before > WAIT_EXCESS_RATIO * steps.before
        if steps.since_s <= window.node_times_s[ROWS_MIN - 1]:
            return []  # the period before is no longer in the window
        struck, found = _struck(window, rows, steps.since_s)
        if int(struck.sum()) > 1 and not waiting and (waits is not None or _others_work(window, steps)):
            return []
        if int(struck.sum()) == 1 and not _waits_for_data(window, struck, steps):
            return []
        what, kind = str(steps), "step_time" if steps.metric else "job_activity"
        if waits is not None and waiting:
            what, kind = f"{what}, of which {waits.now:.2f} s wait for data ({waits.before:.2f} s before)", "data_wait"
            found = [*found, waits.evidence]
        found = [*found, steps.evidence]
        return self._verdict(window, struck, found, what, steps.since_s, kind, steps.ratio, sure=waiting)

    def _unfelt(self, window: Window, rows: list[tuple[str, Floats, float, str]]) -> list[Verdict]:
        """Return the verdict on I/O that most hosts have long waited on, where the job's progress is not reported."""
        since_s = float(window.node_times_s[-1]) - UNFELT_S
        if since_s <= window.node_times_s[ROWS_MIN - 1]:
            return []
        struck, found = _struck(window, rows, since_s)
        if int(struck.sum()) == 1 or _flowing(window, struck):
            return []
        what = f"whether the job does is not known; for {UNFELT_S:.0f} s hardly any data flows"
        return self._verdict(window, struck, found, what, since_s, "io_wait", 0.0, sure=False)

    def _verdict(
        self,
        window: Window,
        struck: Flags,
        found: list[Evidence],
        what: str,
        since_s: float,
        kind: str,
        slowdown: float,
        sure: bool,
    ) -> list[Verdict]:
        count, total = int(struck.sum()), int((struck | ~standby_nodes(window)).sum())
        hit = tuple(window.nodes[i] for i in np.flatnonzero(struck).tolist())
        many = count > 1 and count >= MANY_RATIO * total
        if not many and count != 1:
            return []
        if many:
            confidence = CONFIDENCE_MANY if sure else CONFIDENCE_HINT
            who = f"{count} of {total} nodes wait for I/O"
        else:
            confidence, who = CONFIDENCE_HOST, f"{named(hit)} alone waits for I/O: its host or its disks"
        return [
            Verdict(
                detector=self.name,
                fault="storage_stall",
                job=window.job,
                nodes=() if many and count >= NEARLY_ALL_RATIO * total else hit,
                node=hit[0] if count == 1 else None,
                device=None,
                confidence=confidence,
                onset_s=since_s,
                summary=f"{who}; {what}",
                evidence=tuple(found),
                kinds=frozenset({"io", kind}),
                slowdown_ratio=slowdown,
                asks="notify",
            )
        ]


def _struck(window: Window, rows: list[tuple[str, Floats, float, str]], since_s: float) -> tuple[Flags, list[Evidence]]:
    """Return the nodes on which some sign has been high since ``since_s``, (N,), and the evidence."""
    before = int(np.searchsorted(window.node_times_s, since_s, side="left"))
    struck = np.zeros(len(window.nodes), dtype=np.bool_)
    found = []
    newest = lines_for(window.node_times_s, window.interval_s, HOLD_S)
    lines = max(min(newest, len(window.node_times_s) - before), ROWS_MIN)
    for metric, values, least, unit in rows:
        usual = past(values, before)
        now = quantile_over_rows(values[-lines:], HELD_QUANTILE)
        up = now >= np.fmax(least, PAST_FACTOR * usual)
        if up.any():
            struck |= up
            node = window.nodes[int(np.flatnonzero(up)[0])] if int(up.sum()) == 1 else None
            level = middle(usual)
            threshold = max(least, PAST_FACTOR * level) if math.isfinite(level) else least
            found.append(
                Evidence(metric, node, None, middle(now[up]), level if math.isfinite(level) else None, threshold, unit)
            )
    return struck, found


def _flowing(window: Window, struck: Flags) -> bool:
    """Whether the affected nodes move much data, or it is unknown whether they do."""
    flows = [held(window.node[metric][:, struck]) for metric in FLOWS if metric in window.node]
    return not flows or any((flow >= FLOWING_BYTES_PER_S).any() for flow in flows)


def _waits_for_io(found: list[Evidence]) -> bool:
    """Whether more than blocked tasks is seen: on a single node those may be waiting for its GPU driver."""
    return any(item.metric != "node_blocked_tasks" for item in found)


def _waits_for_data(window: Window, struck: Flags, steps: QuantityChange) -> bool:
    """Whether the affected node's ranks waited far longer for data than the others in each of the newest steps."""
    waits = window.steps.values.get("train_data_wait_seconds")
    if waits is None or len(waits) < ROWS_MIN:
        return False
    least = np.fmin.reduce(waits[-ROWS_MIN:], axis=0)
    own = struck[window.node_of]
    excess = np.fmax.reduce(least[own], initial=-np.inf) - middle(least[~own])
    return bool(excess > WAIT_EXCESS_RATIO * steps.before)


def _others_work(window: Window, steps: QuantityChange) -> bool:
    """Whether longer compute or collectives explain the longer steps: then the job does not wait for the I/O."""
    for metric in ("train_compute_seconds", "nccl_collective_seconds"):
        own = changed_lately(window, metric)
        if own is not None and own.now - own.before > 0.5 * (steps.now - steps.before):
            return True
    return False
