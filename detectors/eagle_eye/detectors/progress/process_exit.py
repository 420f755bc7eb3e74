"""Detects training processes that ended by themselves, and which of several exits came first."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from eagle_eye.detectors.signs.counters import grown
from eagle_eye.detectors.signs.exceptions import TRACEBACK_CHARS_MAX, shared_exception
from eagle_eye.detectors.signs.exits import Exit, unplanned_exits
from eagle_eye.detectors.signs.gpu_errors import UNKNOWN_DEVICE, GpuError, counter_word_s, gpu_errors, kernel_word_s
from eagle_eye.detectors.signs.memory_kills import MemoryKill, killed_rank, memory_kills
from eagle_eye.detectors.signs.nccl_warnings import nccl_warnings
from eagle_eye.detectors.signs.progress import typical_step_s
from eagle_eye.detectors.signs.vanished import MISSED, may_vanish
from eagle_eye.detectors.types import Evidence, Verdict, Window
from eagle_eye.schema.last_words import headline

# An exit this much earlier than all others was the first; clock skew and the echo of a death are shorter.
ORDER_S = 2.0
STOOD_STEPS = 3.0  # a job idle for this many steps before its first exit hung: which rank times out first is chance
XID_NEAR_S = 30.0  # between a GPU's error and the exit of the process that hit it
# Errors that a program leaves in the kernel log (NVIDIA, XID Errors: restart the application); the rest is hardware.
PROGRAM_KINDS = ("application",)
HARDWARE_KINDS = ("memory", "contained", "hang", "lost")
HARDWARE_S = 2.0  # how long a crash verdict waits while a GPU error behind it is examined
WITNESS_KINDS = ("application", "restart")  # errors that identify the process that ended first
CONFIDENCE_KNOWN, CONFIDENCE_ORDER, CONFIDENCE_UNKNOWN = 0.99, 0.9, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """Names the node whose process ended first: ``process_crash``, or ``out_of_memory`` if the kernel killed it.

    One rank's death kills its peers within milliseconds, so clocks cannot order the exits. But the peers die of a
    communication error that says so, while the first dies of a signal or an error of its own, of the kernel's OOM kill,
    or with an XID of its own GPU. If no exit has text, one that came ``ORDER_S`` before all others, in a job that was
    making steps, was the first. The same error on every node, an exception that only the program can raise, or an XID
    that programs cause (13, 31, 43; NVIDIA, XID Errors) make it the program's fault: no node is excluded for it. The
    verdict waits ``settle_s`` for the other exits to arrive, and ``silent_s`` to recognise a node that has fallen
    silent. An exception that most ranks raised at one place is kept in the evidence, with the step, to compare with the
    exit of the next attempt. If no exit stands out, the crash is reported without a culprit. Cannot see: an exit that
    no agent watched.
    """

    settle_s: float
    silent_s: float
    name: str = "process_exit"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict: the crash of this attempt."""
        exits = unplanned_exits(window)
        if not exits:
            return []
        since_s = window.now_s - exits[0].time_s
        if since_s < self.settle_s or since_s < self.settle_s + _hardware_s(window, exits):
            return []
        kills = [kill for kill in memory_kills(window) if any(killed_rank(kill, item) for item in exits)]
        witnesses = _witnesses(window, exits)
        causes = [i for i in exits if i.cause or i in witnesses or any(killed_rank(kill, i) for kill in kills)]
        if not causes and since_s < self.silent_s + self.settle_s and self._someone_unheard(window, exits):
            return []  # its silence may be the cause; the next seconds will show
        if not kills and _stopped_from_outside(causes):
            return []
        by_order = False
        if not causes:
            if since_s < ORDER_S and len({item.node for item in exits}) == 1:
                return []  # the only exit so far: whether it stays the only one decides which was first
            causes = _clearly_first(window, exits)
            by_order = bool(causes)
        first = (causes or exits)[0]
        nodes = {item.node for item in causes}
        known = (first.node,) if len(nodes) == 1 else ()
        kill = next((kill for kill in kills if known and kill.node == first.node), None)
        return [self._verdict(window, exits, first, known, kill, witnesses.get(first), by_order)]

    def _someone_unheard(self, window: Window, exits: list[Exit]) -> bool:
        gone = {item.node for item in exits}
        return any(
            node not in gone and heard_s < exits[0].time_s + window.interval_s
            for node, heard_s in zip(window.nodes, window.heard_s, strict=True)
        )

    def _verdict(
        self,
        window: Window,
        exits: list[Exit],
        first: Exit,
        nodes: tuple[str, ...],
        kill: MemoryKill | None,
        error: GpuError | None,
        by_order: bool,
    ) -> Verdict:
        exception, reported = ("", []) if kill is not None or error is not None else shared_exception(window, exits)
        word = next((item.of_device for item in exits if item.node in nodes and item.of_device is not None), None)
        application = kill is None and word is None and (bool(exception) or _application(window, exits, error))
        if nodes:
            others = f"; {len(exits) - 1} other ranks followed" if len(exits) > 1 else ""
            summary = f"{first.who} {first.how}{_quoted(first)}{others}"
        else:
            summary = f"{len(exits)} ranks ended and none stands out as the first{_quoted(first)}"
        evidence = [
            Evidence("process_exit", first.node, first.device, first.how),
            Evidence("process_exits", None, None, float(len(exits)), None, 0.0, "processes"),
        ]
        kinds = {"exit"}
        if exception:
            # These identify it if it also ends the next attempt; the traceback is for the job's owner.
            evidence.append(Evidence("exception", None, None, exception))
            evidence.append(Evidence("train_step", None, None, window.last_step, None, None, "steps"))
            fullest = max(reported, key=lambda item: len(item.error))  # a log keeps less of it than the hook does
            evidence.append(Evidence("traceback", fullest.node, fullest.device, fullest.error[-TRACEBACK_CHARS_MAX:]))
        for kind, extra in (("oom_kill", kill), ("xid", error)):
            if extra is not None:
                evidence.append(extra.evidence)
                kinds.add(kind)
        if word is not None:
            summary += f": {word.said}"
        elif application:
            summary += f"; {error.named}: the program" if error is not None else "; the program's own error"
        return Verdict(
            detector=self.name,
            fault="out_of_memory" if kill is not None or (nodes and first.out_of_memory) else "process_crash",
            job=window.job,
            nodes=nodes,
            node=nodes[0] if nodes else None,
            device=first.device if nodes and first.device >= 0 else None,
            confidence=CONFIDENCE_ORDER if by_order else CONFIDENCE_KNOWN if nodes else CONFIDENCE_UNKNOWN,
            onset_s=min(first.time_s, window.now_s),
            summary=summary,
            evidence=(*evidence, *nccl_warnings(window)),
            kinds=frozenset(kinds),
            fact=True,
            application=application,
        )


def _witnesses(window: Window, exits: list[Exit]) -> dict[Exit, GpuError]:
    """Return the exits for which the process's own GPU logged an error that a program or its data causes."""
    errors = [error for error in gpu_errors(window) if error.fact.kind in WITNESS_KINDS] if window.events else []
    found: dict[Exit, GpuError] = {}
    for item in exits:
        for error in errors:
            same = error.node == item.node and (
                error.device == item.device or UNKNOWN_DEVICE in (error.device, item.device)
            )
            if same and error.first_s - XID_NEAR_S <= item.time_s <= error.last_s + XID_NEAR_S:
                found.setdefault(item, error)
    return found


def _hardware_s(window: Window, exits: list[Exit]) -> float:
    """Return how long the hardware detectors may need to name the cause of these exits: 0 if there is no such evidence.

    Whether to restart on failing memory is decided once the kernel log has arrived.
    """
    nodes = {item.node for item in exits}
    counter = window.device.get("gpu_ecc_uncorrected_total")
    counted = [] if counter is None else [window.series[column].node for column in grown(counter).tolist()]
    if any(item.of_failing_memory for item in exits):
        return kernel_word_s(window) + HARDWARE_S
    if nodes & set(counted):
        return counter_word_s(window) + HARDWARE_S
    if any(may_vanish(window, item.node, item.device, item.time_s) for item in exits):
        return (MISSED + 1) * window.interval_s + HARDWARE_S
    speaks = any(error.node in nodes and error.fact.kind in HARDWARE_KINDS for error in gpu_errors(window))
    return HARDWARE_S if speaks else 0.0


def _application(window: Window, exits: list[Exit], error: GpuError | None) -> bool:
    """Whether the user's program is to blame, not a node: the error is the same everywhere, or the GPU's log says so.

    An exception on one node alone may be its memory or file system, and counts against the node if it recurs.
    """
    if error is not None:
        return error.fact.kind in PROGRAM_KINDS
    reported = [item for item in exits if item.error and item.cause]
    if any(item.of_device is not None for item in reported):
        return False  # also where fabric or driver fail the same on each node
    everywhere = len({item.node for item in reported}) == len(window.nodes) and 2 * len(reported) > len(exits) > 1
    return everywhere and len({item.error_kind for item in reported}) == 1


def _clearly_first(window: Window, exits: list[Exit]) -> list[Exit]:
    """Return the exits of the node that clearly ended before all others; [] if there is none, or it was an echo."""
    first = exits[0]
    mine = [item for item in exits if item.node == first.node]
    if len(window.nodes) < 2 or any(item.error for item in mine):
        return []
    if len(mine) < len(exits) and next(e.time_s for e in exits if e.node != first.node) - first.time_s < ORDER_S:
        return []
    stood_s = first.time_s - window.advanced_s
    return mine if stood_s <= STOOD_STEPS * typical_step_s(window) + 2 * window.interval_s + ORDER_S else []


def _stopped_from_outside(causes: list[Exit]) -> bool:
    """Whether ranks of several nodes died of SIGKILL and nothing else: schedulers end jobs that way, faults do not."""
    return len({item.node for item in causes}) > 1 and all(item.exit_code == -signal.SIGKILL for item in causes)


def _quoted(item: Exit) -> str:
    line = headline(item.error)[:160]
    return f" ({line})" if line else ""
