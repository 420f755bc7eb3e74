"""Detects a failed host from its kernel log: a panic, or a processor, memory or device that no longer works."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eagle_eye.detectors.faults import DefaultAction
from eagle_eye.detectors.signs.exits import unplanned_exits
from eagle_eye.detectors.signs.gpu_errors import BEFORE_START_S, at_once, went_on
from eagle_eye.detectors.signs.kernel_facts import NETWORK, KernelFact, host_errors, may_have_stopped
from eagle_eye.detectors.signs.progress import Patience, progress
from eagle_eye.detectors.signs.stop import Standstill, stop_of
from eagle_eye.detectors.types import Blind, Evidence, Verdict, Window, WindowEvent
from eagle_eye.schema.attributes import text
from eagle_eye.schema.driver_facts import BY_NAME, MACHINE_CHECK, judged

SILENT_INTERVALS = 1.5  # missed: after a panic, which is certain, silence need not last longer
SILENT_S = 1.5  # at least
NEAR_S = 60.0  # a panic's record may carry the time of the crash or of the boot after it
CONFIDENCE = 0.99
CONFIDENCE_REPORTED = 0.5  # lower than that of a more specific detector, whose finding it then joins
EVIDENCE_MAX = 4
MANY_RATIO = 0.5  # of the nodes: what they all wait for is no single node's fault


@dataclass(frozen=True, slots=True, kw_only=True)
class HostErrors:
    """Finds host failures in kernel logs: ``node_unreachable`` with its cause, ``host_errors``, failed adapters.

    A panic is a fact once the node is silent or the job makes no more steps; a machine check is one if both are seen. A
    failed part (an uncorrected machine check, a fatal PCIe error, a device gone, a stuck CPU, a dead disk; a network
    adapter, which is ``network_hang``) excludes its node if the job stopped just after it: of several nodes the first,
    and none if a fourth of the job reports the same at one moment. A port known to carry none of the job's traffic
    accuses no node. What needs a repair before the next job (an uncorrected machine check, a GPU not brought up) asks
    for a drain of a live node. Everything else is only reported: ``nic_degraded`` for adapters, ``storage_stall`` for
    storage that does not answer (if half of the nodes report it at a standstill, they wait for it and none hangs),
    ``host_errors`` for the rest, a task that is blocked inside a GPU's driver with its module and the lock's holder.
    Corrected errors are ignored (every
    fleet has them daily). Reads events; ``heard_s`` (N,) and the job's progress supply the rest. Sources: Linux, x86
    MCE handling, AER, watchdog; ByteRobust (SOSP 2025): kernel faults known within 2 s. Cannot see: panics that are not
    recorded (NodeSilent then finds the silence); whether a harmless line will matter later.
    """

    patience: Patience
    name: str = "host_errors"

    def detect(self, window: Window) -> list[Verdict]:
        """Return one verdict for each node whose host failed, and one for each that is only reported."""
        if not window.events:
            return []
        checked = self._checked(window)
        facts = [
            *host_errors(window),
            *(_as_fact(event) for event in checked.values() if event.kind == "machine_check"),
        ]
        found = [verdict for node, event in checked.items() for verdict in self._dead(window, node, event)]
        dead = {verdict.node for verdict in found}
        facts = [fact for fact in facts if fact.node not in dead]
        if not facts:
            return found
        stop = stop_of(window, self.patience)
        beside = [fact for fact in facts if stop is not None and may_have_stopped(window, stop, fact)]
        beside.sort(key=lambda fact: (fact.began_s, fact.node))
        times_s = {fact.node: fact.began_s for fact in reversed(beside)}
        if stop is not None and beside and not at_once(window, times_s, beside[0].began_s):
            own = [fact for fact in beside if fact.node == beside[0].node]
            found.append(self._stopped(window, stop, own))
            facts = [fact for fact in facts if fact not in own]
        return [*found, *self._reported(window, facts, stop)]

    def _checked(self, window: Window) -> dict[str, WindowEvent]:
        """Return each node's first panic, or its first uncorrected machine check."""
        found: dict[str, WindowEvent] = {}
        for event in window.events:
            if (
                event.kind not in ("kernel_panic", "machine_check")
                or event.node is None
                or event.node not in window.nodes
            ):
                continue
            if event.time_s < window.started_s - BEFORE_START_S or not _serious(event):
                continue
            known = found.get(event.node)
            if known is None or (known.kind == "machine_check" and event.kind == "kernel_panic"):
                found[event.node] = event
        return found

    def _dead(self, window: Window, node: str, event: WindowEvent) -> list[Verdict]:
        """Return the verdict on a node that went down with its panic or machine check."""
        silence_s = self._silence_s(window, node)
        limit_s = max(SILENT_S, SILENT_INTERVALS * window.interval_s)
        silent = silence_s > limit_s
        stopped = self._stopped_since(window, event)
        evidence = [Evidence(event.kind, node, None, text(event.attributes, "text")[:160] or event.kind)]
        kinds = {event.kind}
        if silent:
            evidence.append(Evidence("node_silence_seconds", node, None, silence_s, 0.0, limit_s, "seconds"))
            kinds.add("silence")
        if stopped:
            evidence.append(Evidence("train_step", None, None, "none since"))
            kinds.add("standstill")
        what = "the kernel panicked" if event.kind == "kernel_panic" else "a machine check was not corrected"
        if event.kind == "kernel_panic" and (silent or stopped):
            tail = "the node is silent" if silent else "the job has stopped"
        elif event.kind == "machine_check" and silent and stopped:
            tail = "the node is silent and the job has stopped"
        else:
            return []
        summary = f"{what} on {node}: {tail}"
        return [self._fact(window, "node_unreachable", node, None, event.time_s, summary, evidence, kinds)]

    def _stopped(self, window: Window, stop: Standstill, own: list[KernelFact]) -> Verdict:
        first = own[0]
        fault = "network_hang" if all(fact.what in NETWORK for fact in own) else "host_errors"
        how = "the job's ranks ended after it" if stop.exits else "no step has finished since"
        kinds = {_kind(fact) for fact in own} | {stop.kind}
        evidence = [*(fact.evidence for fact in own[:EVIDENCE_MAX]), stop.evidence]
        summary = f"{'; '.join(dict.fromkeys(fact.named for fact in own[:2]))}: {how}"
        return self._fact(window, fault, first.node, _device(own), first.began_s, summary, evidence, kinds)

    def _fact(
        self,
        window: Window,
        fault: str,
        node: str,
        device: int | None,
        onset_s: float,
        summary: str,
        evidence: Iterable[Evidence],
        kinds: Iterable[str],
        asks: DefaultAction | None = None,
    ) -> Verdict:
        return Verdict(
            detector=self.name,
            fault=fault,
            job=window.job,
            nodes=(node,),
            node=node,
            device=device,
            confidence=CONFIDENCE,
            onset_s=min(onset_s, window.now_s),
            summary=summary,
            evidence=tuple(evidence),
            kinds=frozenset(kinds),
            fact=True,
            asks=asks,
        )

    def _reported(self, window: Window, facts: list[KernelFact], stop: Standstill | None) -> list[Verdict]:
        """Return what did not stop the job, one verdict per node and fault; what asks for a repair drains a node."""
        found: list[Verdict] = []
        storage = [fact for fact in facts if fact.of_storage]
        if storage:
            found += self._storage(window, storage, stop)
        groups: dict[tuple[str, str, bool], list[KernelFact]] = {}
        for fact in facts:
            if not fact.of_storage:
                known = BY_NAME.get(fact.what)
                fault = known.fault if known is not None else "host_errors"
                groups.setdefault((fact.node, fault, fact.repair != "none"), []).append(fact)
        for (node, fault, drains), own in groups.items():
            if not drains:
                found.append(self._news(window, fault, (node,), own))
            elif self._silence_s(window, node) <= max(SILENT_S, SILENT_INTERVALS * window.interval_s):
                named = "; ".join(dict.fromkeys(fact.named for fact in own[:2]))
                summary = f"{named}: the node lives and the job may go on"
                evidence, kinds = [fact.evidence for fact in own[:EVIDENCE_MAX]], {_kind(fact) for fact in own}
                began_s, device = min(fact.time_s for fact in own), _device(own)
                found.append(self._fact(window, fault, node, device, began_s, summary, evidence, kinds, "drain_node"))
        return found

    def _storage(self, window: Window, facts: list[KernelFact], stop: Standstill | None) -> list[Verdict]:
        """Return the verdicts on storage that does not answer: one for many nodes together, or one per node."""
        nodes = tuple(sorted({fact.node for fact in facts}))
        if len(nodes) > 1 and len(nodes) >= MANY_RATIO * len(window.nodes):
            newest_s = max(fact.time_s for fact in facts)  # mounts time out a minute or more after the servers stopped
            stands = stop is not None and not stop.exits and newest_s >= stop.since_s - stop.lead_s
            return [self._news(window, "storage_stall", nodes, facts, {"standstill"} if stands else set())]
        return [self._news(window, "storage_stall", (n,), [fact for fact in facts if fact.node == n]) for n in nodes]

    def _news(
        self,
        window: Window,
        fault: str,
        nodes: tuple[str, ...],
        own: list[KernelFact],
        kinds: Iterable[str] = (),
    ) -> Verdict:
        alone = len(nodes) == 1
        named = "; ".join(dict.fromkeys(fact.named for fact in own[:2]))
        return Verdict(
            detector=self.name,
            fault=fault,
            job=window.job,
            nodes=nodes,
            node=nodes[0] if alone else None,
            device=_device(own) if alone else None,
            confidence=CONFIDENCE_REPORTED,
            onset_s=min(*(fact.began_s for fact in own), window.now_s),
            summary=named if alone else f"{len(nodes)} of {len(window.nodes)} nodes: {named}",
            evidence=tuple(fact.evidence for fact in own[:EVIDENCE_MAX]),
            kinds=frozenset({*(_kind(fact) for fact in own), *kinds}),
            asks="notify",
        )

    def _silence_s(self, window: Window, node: str) -> float:
        index = window.nodes.index(node)
        if window.farewell[index]:
            return 0.0
        return window.now_s - max(float(window.heard_s[index]), window.watching_since_s)

    def _stopped_since(self, window: Window, event: WindowEvent) -> bool:
        if any(item.time_s >= event.time_s - NEAR_S for item in unplanned_exits(window)):
            return True
        try:
            state = progress(window, self.patience)
        except Blind:
            return False
        return state.stopped and not went_on(window, event.time_s)


def _serious(event: WindowEvent) -> bool:
    """Whether the event is a panic, or a machine check not marked as corrected: exceptions are raised for no less."""
    judgement = judged(event.kind, event.attributes)
    return event.kind == "kernel_panic" or (judgement is not None and judgement.fatal)


def _as_fact(event: WindowEvent) -> KernelFact:
    said = text(event.attributes, "text")
    return KernelFact(event.node or "", -1, MACHINE_CHECK, "", "", said, event.time_s, BY_NAME[MACHINE_CHECK].repair)


def _kind(fact: KernelFact) -> str:
    return MACHINE_CHECK if fact.what == MACHINE_CHECK else "host_error"


def _device(own: list[KernelFact]) -> int | None:
    devices = {fact.device for fact in own}
    return devices.pop() if len(devices) == 1 and min(devices) >= 0 else None
