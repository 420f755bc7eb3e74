"""Detects a job that stands still because one node's network does not carry its collectives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.collective_counts import COMPLETED, ENQUEUED, resting_count
from eagle_eye.detectors.signs.exits import unplanned_exits
from eagle_eye.detectors.signs.gpu_activity import activity_outliers
from eagle_eye.detectors.signs.host_activity import most_busy_with_io
from eagle_eye.detectors.signs.job_slowdown import overdue
from eagle_eye.detectors.signs.link_state import PortOutage, observed, outages, shared
from eagle_eye.detectors.signs.medians import median_of, quantile_over_rows
from eagle_eye.detectors.signs.nccl_warnings import nccl_warnings
from eagle_eye.detectors.signs.peers import latest, level, role_members
from eagle_eye.detectors.signs.progress import Patience, Progress, progress, typical_step_s
from eagle_eye.detectors.signs.recent_rows import middle
from eagle_eye.detectors.types import Blind, Evidence, Floats, Integers, Verdict, Window

SETTLED_INTERVALS = 3.0
LEAD_S, LEAD_STEPS = 10.0, 2.0  # a port that went down this long before the last step may still have stopped the next
RECENT_LINES = 4
PORT_ERRORS, RDMA_ERRORS = "link_errors_total", "node_rdma_errors_total"
ERRORS_MIN = 10.0  # since the standstill began, on one node, with less than a fifth of it on the others
OTHERS_RATIO = 0.2
SENT = "node_rdma_tx_bytes_per_second"
SENT_MIN_BYTES_PER_S = 1e5  # what waiting nodes still send each other: retried work requests
USED_MIN_BYTES_PER_S = 1e7  # a node that sent less before sends nothing by design
USED_QUANTILE = 0.99  # of the rows before: a step's traffic may come in one burst, seen in few of its rows
MUTE_RATIO = 0.01  # of what the others send
AGAIN_RATIO = 0.005  # of what a node sent before: more than this is other traffic, to storage or of a next step
OTHERS_MIN = 2
CONFIDENCE_EARLY, CONFIDENCE_RIPE = 0.85, 0.96
CONFIDENCE_ONE_SIGN = 0.9  # that a restart is right, not that the node is to blame
RANK_SILENT_S = 5.0  # a process that reports nothing for this long may be the culprit
OFFSET_LINES, OFFSET_LINES_MIN = 16, 3  # rows before the standstill that show the ranks' counting offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkHang:
    """Names the node whose network holds the job up: ``network_hang``.

    All ranks wait in the same collective (equal ``nccl_sequence`` since the last step, or unknown; C4D, Wu et al. HPCA
    2025: a communication hang) and one node's port is down, or went down as the standstill began, while the others' are
    up. Reported when a step is overdue, whatever pauses the job had while all ports were up; acted on once the
    standstill is ``prompt`` or, in a job of short steps, longer than its known pauses; also when the ranks have died of
    it, each reporting a lost peer. A port that came back asks only for a restart, since one flap does not justify an
    exclusion; so does one of which nobody can tell whether the job uses it. While ports are up, errors
    counted by one node's ports alone name that node once the standstill is ripe. RDMA errors that grow on one node
    alone, or one node alone that has not completed a collective that its peers have (Aegis, Dong et al. NSDI 2025: more
    work requests than completions), may be the other end's fault: each asks for a restart when the standstill is ripe.
    Both together name the node, as does either one together with a third sign, that the node alone sends nothing while
    the others retry; where every other node retries and sends hardly anything else, the third sign suffices once the
    standstill is ripe. No verdict if several nodes' ports are down at once (SwitchDown); if all ports of the only node
    of the job on a switch went down at once; if no link or RDMA evidence stands out; or if a rank lags, its process is
    silent or, without the hook and with all ports up again, its GPU alone does not wait (Hang). Blind as ``progress``
    is, and if neither port states nor errors are observed. Cannot see: a path that drops packets in the fabric; the end
    of a broken cable that counts no errors.
    """

    patience: Patience
    name: str = "network_hang"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        if not observed(window) and not {PORT_ERRORS, RDMA_ERRORS} & {*window.link, *window.node}:
            raise Blind("neither port states nor RDMA errors are observed")
        if len(window.nodes) < 2:
            return []  # its collectives cross no port
        exits = unplanned_exits(window)
        if exits:
            died_s = exits[0].time_s
            return [] if any(item.cause for item in exits) else self._died(window, died_s, len(exits))
        if np.isfinite(window.last_step) and not overdue(window, self.patience):
            return []
        state = progress(window, self.patience)
        if not state.accusable:
            return []
        # One that went down much later is no cause, unless the job has never made a step.
        fallen = _ports_fallen(window, state.advanced_s, state.advanced_s + _lead_s(window, state.typical_step_s))
        fell = {item.node for item in fallen}
        if len(fell) == 1 and shared(window, fallen) is not None:
            return []
        late, unfinished = _lagging(window, state)
        if len(fell) > 1 or late - fell or _awaited(window, state, fallen) - fell:
            return []
        if not (state.stopped or state.outlasts_pauses or any(item.down for item in fallen)):
            return []  # the job has paused for longer by itself
        if fell:
            kinds = {"standstill", "link_state"} | ({"collective_completion"} if unfinished == fell else set())
            return [self._fallen(window, state, fallen, frozenset(kinds))]
        silent = bool((window.silent_s > RANK_SILENT_S).any())
        return [] if silent else self._unseen(window, state, unfinished)

    def _died(self, window: Window, died_s: float, count: int) -> list[Verdict]:
        """Return the verdict on ranks that all died of a lost peer while one node's port is down."""
        fallen = [item for item in _ports_fallen(window, window.advanced_s, died_s + window.interval_s) if item.down]
        if len({item.node for item in fallen}) != 1 or shared(window, fallen) is not None:
            return []
        confidence = CONFIDENCE_RIPE if _settled(window, fallen) else CONFIDENCE_EARLY
        ends = Evidence("process_exits", None, None, float(count), None, 0.0, "processes")
        story = f"{count} ranks ended, each of a lost peer"
        return [self._verdict(window, fallen, ends, story, died_s, confidence, frozenset({"exit", "link_state"}))]

    def _fallen(self, window: Window, state: Progress, fallen: list[PortOutage], kinds: frozenset[str]) -> Verdict:
        down = any(item.down for item in fallen)
        # Only the sum of the ports' downs is known: whether the port came back is not.
        prompt = state.prompt or (state.past_own_pauses and any(item.down and item.used for item in fallen))
        sure = _settled(window, fallen) and (prompt if down else state.ripe)
        return self._verdict(
            window,
            fallen,
            state.evidence,
            str(state),
            state.advanced_s,
            CONFIDENCE_RIPE if sure else CONFIDENCE_EARLY,
            kinds,
        )

    def _verdict(
        self,
        window: Window,
        fallen: list[PortOutage],
        stopped: Evidence,
        story: str,
        since_s: float,
        confidence: float,
        kinds: frozenset[str],
    ) -> Verdict:
        node = window.nodes[fallen[0].node]
        worst = next((item for item in fallen if item.down), fallen[0])
        port = worst.link or "a port"
        metric = "link_up" if worst.down else "link_downed_total" if worst.link else "node_rdma_link_downed_total"
        unsure = "" if worst.used else " (whether the job uses it is not known)"
        value, usual = (0.0, 1.0) if worst.down else (float(worst.downs), 0.0)
        return Verdict(
            detector=self.name,
            fault="network_hang",
            job=window.job,
            nodes=(node,),
            node=node,
            device=None,
            confidence=confidence,
            onset_s=min(since_s, worst.since_s),
            summary=f"{story}; {port} of {node} {'is' if worst.down else 'went'} down{unsure} and no other node's is",
            evidence=(stopped, Evidence(metric, node, None, value, usual, usual, "bool" if worst.down else "events")),
            kinds=kinds,
            asks=None if worst.down and worst.used else "restart_job",
        )

    def _unseen(self, window: Window, state: Progress, unfinished: set[int]) -> list[Verdict]:
        """Return the verdict on one node whose ports are up but whose errors grow or whose collective alone is open."""
        metric, errors = _errors_since(window, state.advanced_s)
        worst = int(np.argmax(errors))
        most = float(np.delete(errors, worst).max(initial=0.0))
        erring = {worst} if errors[worst] >= ERRORS_MIN and most <= OTHERS_RATIO * errors[worst] else set()
        mute, all_try = _mute(window, state.advanced_s)
        suspects = erring & unfinished if erring and unfinished else erring | unfinished
        if not suspects and all_try and state.ripe:
            suspects = mute
        if len(suspects) != 1 or _forgotten(window, state, next(iter(suspects))):
            return []
        mute = suspects & mute
        signs = sum((bool(erring), len(unfinished) == 1, bool(mute)))
        both = signs > 1
        if not both and not state.ripe and not (erring and metric == PORT_ERRORS and state.outlasts_pauses):
            return []
        # Errors that a port counts are of its own link; RDMA errors may be the other end's.
        certain = both or (bool(erring) and metric == PORT_ERRORS) or (bool(mute) and signs == 1)
        if not both and not (erring and certain) and most_busy_with_io(window, state.advanced_s):
            return []  # do not kill a checkpoint
        node = window.nodes[next(iter(suspects))]
        evidence, story, kinds = [state.evidence], [], {"standstill"}
        if erring:
            evidence.append(Evidence(metric, node, None, float(errors[worst]), most, ERRORS_MIN, "errors"))
            what = "port" if metric == PORT_ERRORS else "RDMA"
            story.append(f"{errors[worst]:.0f} {what} errors on {node} and at most {most:.0f} elsewhere")
            kinds.add("nic_errors")
        if mute:
            evidence.append(Evidence(SENT, node, None, 0.0, None, SENT_MIN_BYTES_PER_S, "bytes_per_second"))
            story.append(f"{node} alone sends nothing while the others still try")
            kinds.add("traffic")
        if unfinished:
            # Outstanding collectives, in excess of the others'.
            evidence.append(Evidence("nccl_completed_sequence", node, None, "behind its peers"))
            story.append(f"{node} has not completed a collective that its peers have")
            kinds.add("collective_completion")
        sure = (both and (state.prompt or state.past_own_pauses)) or (certain and state.overstayed)
        return [
            Verdict(
                detector=self.name,
                fault="network_hang",
                job=window.job,
                nodes=(node,),
                node=node,
                device=None,
                confidence=CONFIDENCE_RIPE if sure else CONFIDENCE_EARLY if certain else CONFIDENCE_ONE_SIGN,
                onset_s=state.advanced_s,
                summary=f"{state}; {'; '.join(story)}" + ("" if certain else ": it, or the one it talks to"),
                evidence=(*evidence, *nccl_warnings(window)),
                kinds=frozenset(kinds),
                asks=None if certain else "restart_job",
            )
        ]


def _ports_fallen(window: Window, advanced_s: float, until_s: float) -> list[PortOutage]:
    """Return the ports that went down from about the last step on: the job made steps with those that were down."""
    since_s = advanced_s - _lead_s(window, typical_step_s(window))
    return [item for item in outages(window) if since_s <= item.since_s <= until_s]


def _lead_s(window: Window, step_s: float) -> float:
    return LEAD_S + LEAD_STEPS * max(step_s, window.interval_s)


def _awaited(window: Window, state: Progress, fallen: list[PortOutage]) -> set[int]:
    """Return the nodes whose GPUs do not wait as their peers' do, where ports are up again and ranks report nothing."""
    if state.reported or not fallen or any(item.down for item in fallen):
        return set()
    return activity_outliers(window, state.advanced_s)


def _forgotten(window: Window, state: Progress, node: int) -> bool:
    """Whether a port of the node has been down since before the window, and the standstill is older than the window.

    The port may have failed alone or with its switch; when that happened, and what failed with it, is no longer
    visible.
    """
    up = window.link.get("link_up")
    if up is None or len(up) == 0 or state.advanced_s >= window.link_times_s[0]:
        return False
    own = [port for port, link in enumerate(window.links) if link.node == window.nodes[node]]
    return bool(((up[:, own] == 0).any(axis=0) & ~(up[:, own] > 0).any(axis=0)).any())


def _settled(window: Window, fallen: list[PortOutage]) -> bool:
    """Whether a failed switch would have shown by now on other nodes, whose rows arrive at other times."""
    return window.now_s - max(item.since_s for item in fallen) >= SETTLED_INTERVALS * window.interval_s


def _lagging(window: Window, state: Progress) -> tuple[set[int], set[int]]:
    """Return the nodes with a rank that has enqueued fewer collectives than its peers, and those that completed fewer.

    Only completions at rest are compared: when a pause ends, the first node whose row arrives has more outstanding.
    Ranks of a role that count from different offsets differ by the same number in every row before the standstill.
    """
    sequence = window.device.get(ENQUEUED)
    if sequence is None:
        return set(), set()
    enqueued = latest(sequence, RECENT_LINES)
    end = int(np.searchsorted(window.times_s, state.advanced_s, side="left"))
    before = sequence[max(end - OFFSET_LINES, 0) : end]
    late: set[int] = set()
    for members in role_members(window):
        own = enqueued[members] - _offsets(before[:, members])
        late |= _below(own, window.node_of[members])
    resting = resting_count(window, ENQUEUED)
    if (np.isfinite(enqueued) & np.isnan(resting)).any():
        return late, set()
    # Outstanding counts need no offset and no role: when all ranks wait in one collective they are equal.
    return late, _below(resting_count(window, COMPLETED) - resting, window.node_of)


def _offsets(before: Floats) -> Floats:
    """Return each rank's constant counting offset from its peers: (members,), 0 if not constant."""
    if len(before) < OFFSET_LINES_MIN or before.shape[1] <= 1:
        return np.zeros(before.shape[1])
    apart = before - np.array([[middle(row)] for row in before])
    constant = np.fmax.reduce(apart, axis=0) - np.fmin.reduce(apart, axis=0) == 0
    return np.where(constant, apart[-1], 0.0)


def _below(values: Floats, node_of: Integers) -> set[int]:
    """Return the nodes with a value below the highest that at least two ranks share; NaN is not observed."""
    known = np.isfinite(values)
    levels, counts = np.unique(values[known], return_counts=True)
    shared_by_two = levels[counts > 1]
    if len(shared_by_two) == 0:
        return set()
    return {int(node) for node in np.unique(node_of[known & (values < shared_by_two[-1])])}


def _mute(window: Window, since_s: float) -> tuple[set[int], bool]:
    """Return the one node that has sent nothing since ``since_s`` while most others send, and whether all others do.

    {} if there is none or more than one. A node whose peer is dead visibly retries, with a tiny fraction of its earlier
    traffic; a dead adapter sends nothing.
    """
    values = window.node.get(SENT)
    first = int(np.searchsorted(window.node_times_s, since_s, side="right"))
    if values is None or first == 0 or len(values) - first <= SETTLED_INTERVALS:
        return set(), False
    # A checkpoint just before the standstill sends little: a node's network use is measured by its peak.
    sent, usual = level(values[first + 1 :], RECENT_LINES), quantile_over_rows(values[:first], USED_QUANTILE)
    with np.errstate(invalid="ignore"):
        trying = sent >= SENT_MIN_BYTES_PER_S
        if 2 * np.count_nonzero(trying) <= len(sent):
            return set(), False
        mute = (sent <= MUTE_RATIO * median_of(sent[trying])) & (usual >= USED_MIN_BYTES_PER_S)
        again = trying & (sent <= AGAIN_RATIO * usual)
    if np.count_nonzero(mute) != 1:
        return set(), False
    return {int(node) for node in np.flatnonzero(mute)}, bool((mute | again).all()) and len(sent) > OTHERS_MIN


def _errors_since(window: Window, since_s: float) -> tuple[str, Floats]:
    """Return how much each node's errors grew since ``since_s``, and the metric: (N,), 0 where not counted.

    Ports' own counters take precedence: they identify the link.
    """
    by_link = PORT_ERRORS in window.link
    values = window.link[PORT_ERRORS] if by_link else window.node.get(RDMA_ERRORS)
    times_s = window.link_times_s if by_link else window.node_times_s
    metric = PORT_ERRORS if by_link else RDMA_ERRORS
    start = int(np.searchsorted(times_s, since_s, side="right"))
    if values is None or start == 0 or start >= len(times_s):
        return metric, np.zeros(len(window.nodes))
    grown: Floats = latest(values[start:], RECENT_LINES) - latest(values[:start], RECENT_LINES)
    grown = np.where(np.isfinite(grown), np.maximum(grown, 0.0), 0.0)
    if not by_link:
        return metric, grown
    place = {node: index for index, node in enumerate(window.nodes)}
    owners = np.array([place.get(link.node, -1) for link in window.links], dtype=np.intp)
    total = np.zeros(len(window.nodes))
    np.add.at(total, owners[owners >= 0], grown[owners >= 0])
    return metric, total
