"""Detects silent nodes: the agent sends nothing and did not say goodbye."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from eagle_eye.detectors.signs.collective_counts import behind
from eagle_eye.detectors.signs.exits import unplanned_exits
from eagle_eye.detectors.signs.gpu_activity import activity_outliers, waiting
from eagle_eye.detectors.signs.progress import Patience, Progress, first_steps, progress, warms_up
from eagle_eye.detectors.signs.silence import (
    Silence,
    fell_with_the_job,
    job_stopped,
    passed_silences_s,
    silence,
    silent_together,
)
from eagle_eye.detectors.signs.topology import SharedTrouble, named
from eagle_eye.detectors.signs.waited_for import harmless_silences_s, outlasts_floor, quorums, waited_for
from eagle_eye.detectors.types import Blind, Evidence, Verdict, Window

EVIDENCE_NODES_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent:
    """Names nodes that have fallen silent, and decides whether the job stopped with them.

    Silence alone is not guilt: upgrades, expired tokens and a reconverging management network cause it too. The verdict
    carries a second kind of evidence only if the job has stopped as well (no step although one is due, or ranks
    elsewhere died). It does not if the job made steps after the node fell silent, since a synchronous job cannot make a
    step without one of its nodes; nor if the node fell silent long after the stop, unless the others have entered a
    collective since and stay in it; nor before ``alone_s`` while a reporting rank has not entered the collective that
    the others wait in, since that rank may be the culprit (unless its GPU spins as theirs do); nor while equally long
    silences have just passed (``passed_silences_s``). A node of torchft's replica groups is acted on once the
    standstill has lasted the floor, whatever the job's own pauses, if all ranks of its quorum elsewhere wait in a
    collective. In an attempt's first steps the job counts as stopped once the standstill has lasted the floor and the
    job's own pauses, and all ranks elsewhere wait in a collective. While the job goes on, silence is reported after
    ``alone_s``, since most of it passes by itself. Nodes that fell silent at the same moment and share a switch, or are
    too many for coincidence, are reported together and none is accused; if the job stopped with them, SwitchDown
    reports instead. If most of a job's nodes are silent, the fault is likelier between them and the server: Blind.
    Cannot see: a node whose agent lives on while its GPUs are gone.
    """

    patience: Patience
    intervals: float
    floor_s: float
    alone_s: float
    name: str = "node_silent"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each silent node or group of nodes, [] if all report."""
        found = silence(window, self.intervals, self.floor_s)
        if len(found.nodes) == 0:
            return []
        if found.most:
            raise Blind(
                f"{len(found.nodes)} of {len(window.nodes)} nodes are silent: likelier the way to them than they"
            )
        groups = silent_together(window, self.intervals, self.floor_s)
        together = {node for group in groups for node in group.nodes}
        if len(together) == len(window.nodes):
            raise Blind("all nodes of the job are falling silent: likelier the way to them than they")
        state, why = job_stopped(window, self.patience)
        if state is None and why is None:
            state, why = self._stopped_in_first_steps(window, found)
        missed, standstill = self._missed_by_replicas(window, found)
        verdicts = [
            self._group_verdict(window, group, found)
            for group in groups
            if why is None and max(float(found.seconds[node]) for node in group.nodes) >= self.alone_s
        ]
        prompt = state is None or state.prompt
        elsewhere = why is not None and _held_up_elsewhere(window, found, state)
        for node in found.nodes.tolist():
            if node in missed:
                verdict = self._verdict(window, node, found, True, True, standstill)
                verdicts.append(replace(verdict, kinds=verdict.kinds | {"quorum"}))
                continue
            suspect = why is not None and fell_with_the_job(window, node, state)
            seconds = float(found.seconds[node])
            suspect &= seconds >= self.alone_s or (not elsewhere and seconds > passed_silences_s(window)[node])
            if node not in together and (suspect or float(found.seconds[node]) >= self.alone_s):
                verdicts.append(self._verdict(window, node, found, suspect, suspect and prompt, why))
        return verdicts

    def _stopped_in_first_steps(self, window: Window, found: Silence) -> tuple[Progress | None, Evidence | None]:
        """Return the progress of an attempt that stopped after a few steps, and the standstill; None, None if unsure.

        Programs compile and fill caches then, so a standstill alone shows nothing.
        """
        try:
            if not warms_up(window, self.patience):
                return None, None
            state = first_steps(window, self.patience)
        except Blind:
            return None, None
        sure = state.stopped and not state.phase and waited_for(window, found.nodes.tolist())
        return (state, state.evidence) if sure else (None, None)

    def _missed_by_replicas(self, window: Window, found: Silence) -> tuple[set[int], Evidence | None]:
        """Return the silent nodes that all other replica groups of their quorum wait for, and the standstill."""
        if quorums(window) is None:
            return set(), None
        try:
            state = progress(window, self.patience)
        except Blind:
            return set(), None
        if not outlasts_floor(window, state, self.patience) or unplanned_exits(window):
            return set(), None
        passed_s = harmless_silences_s(window)
        return {
            node
            for node in waited_for(window, found.nodes.tolist())
            if fell_with_the_job(window, node, state) and found.seconds[node] > passed_s[node]
        }, state.evidence

    def _verdict(
        self, window: Window, index: int, found: Silence, suspect: bool, sure: bool, why: Evidence | None
    ) -> Verdict:
        """Return the verdict on a silent node; ``why`` shows that the job has stopped, ``suspect``: with the node."""
        node, silence_s = window.nodes[index], float(found.seconds[index])
        evidence = [Evidence("node_silence_seconds", node, None, silence_s, 0.0, found.limit_s, "seconds")]
        tail = "while the job goes on"
        if why is not None:
            evidence.append(why)
            tail = "but the job stopped at another time"
        if suspect:
            tail = "and the job has stopped" if sure else "and the job makes no step"
        return Verdict(
            detector=self.name,
            fault="node_unreachable",
            job=window.job,
            nodes=(node,),
            node=node,
            device=None,
            confidence=0.97 if sure else 0.5,
            onset_s=window.now_s - silence_s,
            summary=f"{node} has been silent for {silence_s:.1f} s without a goodbye, {tail}",
            evidence=tuple(evidence),
            kinds=frozenset({"silence", "standstill"} if suspect else {"silence"}),
        )

    def _group_verdict(self, window: Window, group: SharedTrouble, found: Silence) -> Verdict:
        nodes = tuple(window.nodes[i] for i in group.nodes)
        silence_s = max(float(found.seconds[i]) for i in group.nodes)
        where = f"on {', '.join(group.switches)} " if group.switches else ""
        return Verdict(
            detector=self.name,
            fault="node_unreachable",
            job=window.job,
            nodes=nodes,
            node=None,
            device=None,
            confidence=0.5,
            onset_s=window.now_s - silence_s,
            summary=(
                f"{named(nodes)} {where}fell silent together {silence_s:.1f} s ago while the job goes on:"
                " likelier the way to them than they"
            ),
            evidence=tuple(
                Evidence(
                    "node_silence_seconds",
                    window.nodes[i],
                    None,
                    float(found.seconds[i]),
                    0.0,
                    found.limit_s,
                    "seconds",
                )
                for i in group.nodes[:EVIDENCE_NODES_MAX]
            ),
            kinds=frozenset({"silence"}),
            asks="notify",
        )


def _held_up_elsewhere(window: Window, found: Silence, state: Progress | None) -> bool:
    """Whether a reporting node has a rank that the others wait for; where no collectives are counted, by its GPU.

    Excludes a node whose GPU spins as the others' do: a pipeline stage that waits for the silent node lags as well.
    """
    lag = behind(window)
    late = lag > 0
    spins = None if state is None else waiting(window, state.advanced_s)
    if state is not None and spins is not None:
        odd = np.isin(window.node_of, [*activity_outliers(window, state.advanced_s)])
        late = late & ((spins != 1.0) | odd) if np.isfinite(lag).any() else odd & (spins == 0.0)
    lagging = window.node_of[late]
    return bool(len(lagging)) and not set(lagging.tolist()) <= set(found.nodes.tolist())
