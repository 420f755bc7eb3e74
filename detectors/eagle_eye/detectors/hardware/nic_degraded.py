"""Detects a slow or failing network adapter, port or cable while the job goes on."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_eye.detectors.signs.job_slowdown import QuantityChange, overdue, slowed_by_network
from eagle_eye.detectors.signs.link_state import PortOutage, observed, outages, shared
from eagle_eye.detectors.signs.port_signs import (
    Sign,
    congested,
    error_signs,
    leaf_congested,
    load_signs,
    pause_signs,
    paused_by_others,
    retransmit_signs,
)
from eagle_eye.detectors.signs.progress import Patience, hooked
from eagle_eye.detectors.types import Blind, Evidence, Verdict, Window

DOWN_S = 10.0  # a port that comes back sooner has flapped
FLAPS_TOLERATED = 2  # within link_state.FLAP_WINDOW_S
LOUD_ERRORS_PER_S = 10.0  # reported even if nothing is slower: 25 times the specified bit error rate at 400 Gb/s
LOCAL_KINDS = frozenset({"nic_errors", "pfc", "link_state"})  # signs that only the node's own side causes
LAGGING_S = 60.0  # for low load alone: rare and faint, so it can wait
LAGGING_LASTS_S = 120.0  # before acting on low load: a path that is routed anew may carry less for a while
CONGESTION = frozenset({"node_congestion_notifications_total", "node_pfc_rx_pause_packets_per_second"})
LASTS_S = 15.0  # before acting on errors or flaps: retrains take less
CONFIDENCE_LONE, CONFIDENCE_CONGESTED, CONFIDENCE_EARLY = 0.6, 0.8, 0.8
CONFIDENCE_TWO, CONFIDENCE_MANY = 0.93, 0.97
SEEN = (
    "link_errors_total", "node_rdma_errors_total", "link_pfc_tx_pause_packets_per_second",
    "node_pfc_tx_pause_packets_per_second", "node_tcp_retransmits_per_second",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NicDegraded:
    """Finds the node whose port slows the job's collectives: ``nic_degraded``.

    In ring collectives a slow port lowers every node's rate alike, so rates accuse no node. These signs do: error
    counters that grow beyond the specified bit error rate; PFC pauses that the node sends because its buffers fill
    while the others only receive them (the most telling of 21 metrics in Minder, NSDI 2025); a port that stays down, or
    goes down for the third time in five minutes (ByteRobust, SOSP 2025, tolerates two); a port whose load falls behind
    its own past and all others. Each is compared with the other nodes and the node's own past, and must last
    ``port_signs.HOLD_S``. The second, independent kind is the job: collectives (the nodes' median, from ``curve``)
    longer than before the sign began, while no rank's own work is. ``slowdown_ratio`` is the median step since then
    over that before. Signs on many nodes are the network's, signs on one switch's ports are SwitchDown's. While
    congestion notifications flow, errors alone accuse no node, nor do pauses while the notifications go to all nodes of
    its switch and few others. A port that alone carries less since collectives became longer is accused after
    LAGGING_LASTS_S if congestion would be observed and is not. Blind without any network metric. Cannot see: a port
    that was slow from the job's first step without errors, pauses or flaps; which end of a cable is to blame when only
    one end counts errors.
    """

    patience: Patience
    ripe_s: float
    name: str = "nic_degraded"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node with a failing port."""
        if not observed(window) and not any(m in window.link or m in window.node for m in SEEN):
            raise Blind("no link, RDMA, PFC or retransmission counters are observed")
        signs = [*error_signs(window), *pause_signs(window), *retransmit_signs(window), *_outage_signs(window)]
        if overdue(window, self.patience):
            return []  # what stops a job is another fault
        if not signs:
            return self._lagging(window)
        by_node: dict[int, list[Sign]] = {}
        for sign in signs:
            by_node.setdefault(sign.node, []).append(sign)
        return [verdict for node, own in sorted(by_node.items()) if (verdict := self._judge(window, node, own))]

    def _lagging(self, window: Window) -> list[Verdict]:
        """Return the verdict on a port whose load falls behind and that shows no other sign, if the job is slower.

        Nothing else explains it if it lasts and congestion would be seen.
        """
        slow = slowed_by_network(window) if hooked(window) else None  # bursts of steps of unknown length mislead
        if slow is None or congested(window) or paused_by_others(window) or window.now_s - slow[0].since_s < LAGGING_S:
            return []
        signs = load_signs(window, slow[0].since_s)
        if len(signs) != 1:
            return []
        lasts = window.now_s - slow[0].since_s >= LAGGING_LASTS_S
        clear = slow[2] == "collective_time" and lasts and not CONGESTION.isdisjoint(window.node)
        return [self._verdict(window, signs[0].node, signs, slow, CONFIDENCE_TWO if clear else CONFIDENCE_LONE)]

    def _judge(self, window: Window, node: int, signs: list[Sign]) -> Verdict | None:
        since_s = min(sign.onset_s for sign in signs)
        slow = slowed_by_network(window, since_s)
        if slow is not None:
            signs = [*signs, *(sign for sign in load_signs(window, since_s) if sign.node == node)]
        kinds = {sign.kind for sign in signs}
        if slow is None and not _loud(signs):
            return None
        if slow is None or not kinds & LOCAL_KINDS:
            confidence = CONFIDENCE_LONE
        elif window.now_s - since_s < self._lasts_s(kinds):
            confidence = CONFIDENCE_EARLY
        elif "link_state" in kinds or not congested(window) or ("pfc" in kinds and not leaf_congested(window, node)):
            confidence = CONFIDENCE_TWO if len(kinds) == 1 else CONFIDENCE_MANY
        else:
            confidence = CONFIDENCE_CONGESTED
        return self._verdict(window, node, signs, slow, confidence)

    def _lasts_s(self, kinds: set[str]) -> float:
        """Return how long signs must have lasted: pauses alone are no hardware fact and may pass by themselves."""
        return LASTS_S if kinds & {"nic_errors", "link_state"} else self.ripe_s

    def _verdict(
        self,
        window: Window,
        node: int,
        signs: list[Sign],
        slow: tuple[QuantityChange, QuantityChange, str] | None,
        confidence: float,
    ) -> Verdict:
        name = window.nodes[node]
        evidence = [sign.evidence for sign in signs]
        kinds = {sign.kind for sign in signs}
        tail, slowdown = "; the job is not slower for it", 0.0
        if slow is not None:
            waits, steps, kind = slow
            kinds.add(kind)
            evidence.append(waits.evidence)
            slowdown = steps.ratio
            tail = f"; {waits}, the job's steps are {100 * slowdown:.0f}% longer"
        return Verdict(
            detector=self.name,
            fault="nic_degraded",
            job=window.job,
            nodes=(name,),
            node=name,
            device=None,
            confidence=confidence,
            onset_s=min(sign.onset_s for sign in signs),
            summary=f"{name}'s network port is failing: {', '.join(sign.text for sign in signs)}{tail}",
            evidence=tuple(evidence),
            kinds=frozenset(kinds),
            slowdown_ratio=slowdown,
        )


def _outage_signs(window: Window) -> list[Sign]:
    """Return the nodes with a port that stays down or has flapped too often, except where a switch explains it."""
    found = outages(window)
    if not found or shared(window, found) is not None:
        return []
    signs: dict[int, Sign] = {}
    for outage in found:
        sign = _outage_sign(window, outage)
        if sign is not None and (outage.node not in signs or sign.onset_s < signs[outage.node].onset_s):
            signs[outage.node] = sign
    return list(signs.values())


def _outage_sign(window: Window, outage: PortOutage) -> Sign | None:
    node = window.nodes[outage.node]
    port = outage.link or "a port"
    down_s = window.now_s - outage.since_s
    if outage.down and down_s > max(DOWN_S, 2 * window.interval_s):
        evidence = Evidence("link_up", node, None, 0.0, 1.0, 1.0, "bool")
        return Sign(
            outage.node, "link_state", outage.since_s, 0.0, f"{port} down for {down_s:.0f} s on {node}", evidence
        )
    if outage.downs > FLAPS_TOLERATED:
        metric = "link_downed_total" if outage.link else "node_rdma_link_downed_total"
        evidence = Evidence(metric, node, None, float(outage.downs), 0.0, float(FLAPS_TOLERATED), "events")
        text = f"{port} went down {outage.downs} times in five minutes on {node}"
        return Sign(outage.node, "link_state", outage.since_s, float(outage.downs), text, evidence)
    return None


def _loud(signs: list[Sign]) -> bool:
    """Whether the signs are worth reporting although nothing is slower."""
    return len({sign.kind for sign in signs}) > 1 or any(
        sign.kind == "link_state" or (sign.kind == "nic_errors" and sign.rate >= LOUD_ERRORS_PER_S) for sign in signs
    )
