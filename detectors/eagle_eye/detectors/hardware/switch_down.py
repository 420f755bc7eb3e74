"""Detects a switch or rail that is down: everything connected to it is cut off at one moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.link_state import PortOutage, outages, shared, together_s
from eagle_eye.detectors.signs.progress import Patience
from eagle_eye.detectors.signs.silence import Silence, job_stopped, passed_silences_s, silence, silent_together
from eagle_eye.detectors.signs.topology import SharedTrouble, named
from eagle_eye.detectors.types import Evidence, Verdict, Window

EVIDENCE_NODES_MAX = 6
CONFIDENCE_PORTS, CONFIDENCE_SILENCE, CONFIDENCE_LOOSE, CONFIDENCE_LONE = 0.95, 0.9, 0.7, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchDown:
    """Finds ``switch_down``: most of one switch's ports or nodes, and few others, down or silent from the same moment.

    "Most" is ``topology.SHARED_RATIO`` of the job's ports or nodes on the switch, on at least two nodes. Ports that are
    down suffice; nodes that fell silent together count only if the job has stopped with them (while it goes on it is
    the management network: NodeSilent reports it). If the topology is unknown, three nodes at one moment (or two that
    are over a tenth of the job) count, with less confidence: at 2 to 7 failures in 1,000 node-days (Llama 3, RSC-1)
    independent ones do not coincide within seconds. One verdict, no node accused, no action beyond notification. If the
    job has only one node on a switch, all its ports, at least two, must go down at one moment: no other node can tell
    the switch from the node's own network, and the summary names both. A port that was never up is unused by design.
    Cannot see: a switch that forwards nothing while its links stay up and the job has no other traffic to compare with;
    one on which the job has a single node with a single port, or a single node that falls silent.
    """

    patience: Patience
    intervals: float
    floor_s: float
    name: str = "switch_down"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for everything that is cut off, [] if nothing is."""
        by_ports = self._ports(window)
        return [by_ports] if by_ports is not None else self._silent(window)

    def _ports(self, window: Window) -> Verdict | None:
        # A node's sum over its ports shows that one went down, not whether it came back: that counts if the job
        # stopped.
        down = [item for item in outages(window) if item.down or not item.link]
        if len(down) <= 1:
            return None
        middle_s = float(np.median([item.since_s for item in down]))
        at_once = [item for item in down if abs(item.since_s - middle_s) <= together_s(window)]
        group = shared(window, at_once)
        if group is None:
            return None
        fell = [item for item in at_once if item.node in group.nodes]
        evidence = tuple(_fall(window, item) for item in fell[:EVIDENCE_NODES_MAX])
        onset_s = min(item.since_s for item in fell)
        story = f"{len(fell)} ports of {named([window.nodes[i] for i in group.nodes])} went down together"
        _, stopped = job_stopped(window, self.patience)
        if stopped is None and not all(item.down for item in fell):
            return None
        kinds = {"link_state"} if stopped is None else {"link_state", "standstill"}
        if stopped is not None:
            evidence = (*evidence, stopped)
        lone = len(group.nodes) == 1
        confidence = CONFIDENCE_LONE if lone else CONFIDENCE_PORTS if group.switches else CONFIDENCE_LOOSE
        return self._verdict(window, group, confidence, onset_s, story, evidence, frozenset(kinds))

    def _silent(self, window: Window) -> list[Verdict]:
        found = silence(window, self.intervals, self.floor_s)
        if len(found.nodes) == 0:
            return []
        groups = silent_together(window, self.intervals, self.floor_s)
        # If most nodes are silent, only a switch that explains all of them rules out the path to the server.
        groups = [group for group in groups if len(group.nodes) < len(window.nodes)]
        if found.most:
            groups = [group for group in groups if group.switches]
        if not groups:
            return []
        _, stopped = job_stopped(window, self.patience)
        if stopped is None:
            return []
        unusual = found.seconds > passed_silences_s(window)  # agents that often say nothing for as long do so at once
        groups = [group for group in groups if group.switches or unusual[[*group.nodes]].all()]
        return [self._silent_verdict(window, group, found, stopped) for group in groups]

    def _silent_verdict(self, window: Window, group: SharedTrouble, found: Silence, stopped: Evidence) -> Verdict:
        seconds = [float(found.seconds[i]) for i in group.nodes]
        evidence = tuple(
            Evidence("node_silence_seconds", window.nodes[i], None, silence_s, 0.0, found.limit_s, "seconds")
            for i, silence_s in zip(group.nodes[:EVIDENCE_NODES_MAX], seconds, strict=False)
        )
        story = (
            f"{named([window.nodes[i] for i in group.nodes])} fell silent together {max(seconds):.1f} s ago"
            " and the job has stopped"
        )
        return self._verdict(
            window,
            group,
            CONFIDENCE_SILENCE if group.switches else CONFIDENCE_LOOSE,
            window.now_s - max(seconds),
            story,
            (*evidence, stopped),
            frozenset({"silence", "standstill"}),
        )

    def _verdict(
        self,
        window: Window,
        group: SharedTrouble,
        confidence: float,
        onset_s: float,
        story: str,
        evidence: tuple[Evidence, ...],
        kinds: frozenset[str],
    ) -> Verdict:
        where = f"{', '.join(group.switches)} is down" if group.switches else "what they share is down (switch unknown)"
        if len(group.nodes) == 1:
            where += ", or all of the node's network: no other node of the job hangs there"
        return Verdict(
            detector=self.name,
            fault="switch_down",
            job=window.job,
            nodes=tuple(window.nodes[i] for i in group.nodes),
            node=None,
            device=None,
            confidence=confidence,
            onset_s=onset_s,
            summary=f"{story}: {where}",
            evidence=evidence,
            kinds=kinds,
            asks="notify",
        )


def _fall(window: Window, item: PortOutage) -> Evidence:
    node = window.nodes[item.node]
    if item.down:
        return Evidence("link_up", node, None, 0.0, 1.0, 1.0, "bool")
    return Evidence("node_rdma_link_downed_total", node, None, float(item.downs), 0.0, 0.0, "events")
