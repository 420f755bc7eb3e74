"""Detects an NVSwitch that stopped traffic between a node's GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_eye.detectors.signs.exits import unplanned_exits
from eagle_eye.detectors.signs.gpu_errors import BEFORE_START_S, exit_near, gpu_errors, soon_known, went_on
from eagle_eye.detectors.signs.progress import Patience, progress
from eagle_eye.detectors.types import Blind, Evidence, Verdict, Window, WindowEvent
from eagle_eye.schema.driver_facts import code_of, sxid_severity

NVLINK_XID = 74  # how a port's fatal error shows at the GPU behind it (Fabric Manager User Guide, D.5)
NEAR_S = 30.0
CONFIDENCE = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class NvSwitch:
    """Finds fatal SXIDs: ``gpu_hang`` if they stopped the job, ``nvlink_degraded`` (drain) if it goes on.

    Source: NVIDIA, Fabric Manager User Guide, appendix D: errors that the switch corrects mean nothing, errors fatal to
    a port stop the GPU behind it and show there as XID 74, errors fatal to the fabric stop all GPUs of the node. A link
    that goes down during a GPU reset logs one too, so a port's error alone proves nothing: it counts with XID 74, an
    exit on the node or a job that stands still. XID 74 alone is left to NvlinkDegraded. Reads events only. Cannot see:
    which side of a link failed.
    """

    patience: Patience
    name: str = "nvswitch"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node with a fatal NVSwitch error."""
        fatal: dict[str, list[WindowEvent]] = {}
        for event in window.events:
            if event.kind != "sxid" or event.node is None or event.time_s < window.started_s - BEFORE_START_S:
                continue
            if event.node in window.nodes and sxid_severity(event.attributes) in ("port", "all"):
                fatal.setdefault(event.node, []).append(event)
        return [verdict for node, events in fatal.items() for verdict in self._judge(window, node, events)]

    def _judge(self, window: Window, node: str, events: list[WindowEvent]) -> list[Verdict]:
        first = min(events, key=lambda event: event.time_s)
        all_hurt = any(sxid_severity(event.attributes) == "all" for event in events)
        links = [
            error
            for error in gpu_errors(window)
            if error.node == node and error.fact.code == NVLINK_XID and abs(error.first_s - first.time_s) <= NEAR_S
        ]
        exits = unplanned_exits(window)
        ended = exit_near(exits, node, first.time_s)
        if ended is None and soon_known(window, first.time_s):
            return []
        goes_on = ended is None and went_on(window, first.time_s)
        proven = all_hurt or bool(links)
        if not goes_on and not proven and ended is None and not self._stopped(window):
            return []
        code = code_of(first.attributes)
        evidence = [Evidence("sxid", node, None, str(code)), *(error.evidence for error in links[:3])]
        if ended is not None:
            evidence.append(Evidence("process_exit", node, ended.device, ended.how))
        tail = "the job goes on" if goes_on else "its GPUs cannot reach each other"
        return [
            Verdict(
                detector=self.name,
                fault="nvlink_degraded" if goes_on else "gpu_hang",
                job=window.job,
                nodes=(node,),
                node=node,
                device=links[0].device if len({error.device for error in links}) == 1 else None,
                confidence=CONFIDENCE,
                onset_s=min(first.time_s, window.now_s),
                summary=f"{node}: fatal NVSwitch error (SXID {code}); {tail}",
                evidence=tuple(evidence),
                kinds=frozenset({"sxid"} | ({"xid"} if links else set()) | ({"exit"} if ended else set())),
                fact=True,
                asks="drain_node" if goes_on else None,
            )
        ]

    def _stopped(self, window: Window) -> bool:
        try:
            return progress(window, self.patience).stopped
        except Blind:
            return False
