"""A job that makes no step although it should, and the node that holds it up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.at_work import pausing_at_work
from eagle_eye.detectors.signs.collective_counts import WAITING_RATIO, behind, waiting_ratio
from eagle_eye.detectors.signs.exits import left_early, unplanned_exits
from eagle_eye.detectors.signs.gpu_activity import activity_outliers, waiting
from eagle_eye.detectors.signs.host_activity import most_busy_with_io
from eagle_eye.detectors.signs.peers import latest
from eagle_eye.detectors.signs.progress import PAUSE_FLOORS, PROMPT_S, STARTING, Patience, Progress, progress
from eagle_eye.detectors.signs.rank_activity import at_rest, uses_cpu, works
from eagle_eye.detectors.signs.under_load import lines_within
from eagle_eye.detectors.signs.unstarted import missing_nodes, missing_ranks
from eagle_eye.detectors.signs.without_hook import unused_devices, work
from eagle_eye.detectors.types import Blind, Evidence, Floats, Integers, Verdict, Window

CONFIDENCE_EARLY, CONFIDENCE_RIPE = 0.85, 0.97
CONFIDENCE_UNKNOWN = 0.8
RANKS_SAY = frozenset({"rank_silence", "collective_sequence", "rank_missing"})  # beyond what their GPUs show
UNSEEN_IO_FLOORS = 5.0  # where some do not wait and nobody reports what their hosts do


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Finds a standstill and its culprit.

    The culprit is the rank whose process says nothing although it exists (stopped, or stuck in the kernel), or the rank
    that has enqueued fewer collectives than its peers, who wait in one that it has not reached (C4D, Wu et al. HPCA
    2025; Aegis, Dong et al. NSDI 2025: "collective launch lower than the group"). Where the whole pipeline of the
    culprit lags with it, the node whose GPUs do something else than wait decides. One node must stand out; where none
    or several do, the verdict is a hang without a known culprit, which waits for the site's floor and asks for a
    restart only while the ranks are inside a collective: a job that stands still outside any is pausing, and so is one
    whose GPUs go on computing or most of whose hosts write. A known culprit is reported as soon as a step is overdue.
    One whose process says nothing any more is acted on once the standstill is ``prompt``. One that lags looks just like
    a rank that saves, evaluates or compiles for the others and has not announced it: it is acted on at the site's
    floor, and before it only once the job has stood still for longer than it ever did by itself and a process of the
    node is seen to do nothing at all. While its host, its GPU or its process works, it gets the start's deadline.
    Without the hook, or where ranks do not count collectives, the GPUs stand in: those that run a kernel and do no work
    wait in a collective, and the one node whose GPU runs none while all others wait is the culprit. It is reported at
    the floor, and acted on as above where its process is seen to do nothing; where nobody sees that it gets the start's
    deadline, for a compilation shows the same. A start without a first step is a hang after its deadline where steps
    were to be seen (``signs/unstarted.py``); the one node whose ranks were never heard of while the others' were is
    named, and restarted with at first. A job that lost a process is not hanging: ProcessExit speaks. Blind as
    ``progress`` is. Cannot see: which of two ends of a broken link is to blame when all ranks wait in the same
    collective; collectives that differ at the same sequence number (the flight recorder tells).
    """

    patience: Patience
    rank_silent_s: float
    silent_node_s: float
    name: str = "hang"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        state = progress(window, self.patience)
        if not state.accusable or unplanned_exits(window):
            return []
        if not state.reported and unused_devices(window):
            return []  # a process has ended: ProcessGone
        silent = self._silent_nodes(window)
        early = state.reported and not (silent or state.ripe or self._unheard(window))
        if early and not np.fmax.reduce(behind(window), initial=0.0) > 0:
            return []  # what most standstills are: nobody stands out, and it may end by itself
        if not silent and pausing_at_work(window, state):
            return []
        gone = left_early(window)
        if gone:
            return [self._left(window, state, gone)] if state.ripe else []
        if not state.stopped:
            return self._within_usual_pause(window, state, silent)
        if self._unheard(window):
            raise Blind("a node of the job has not been heard of since before the standstill became due")
        lag = behind(window)
        culprit, kinds = self._culprit(window, state, silent, lag)
        if culprit is not None:
            # Where GPUs alone accuse, one rank's write or evaluation that nobody announces is not reported.
            due = state.ripe or ("rank_process" in kinds and state.outlasts_pauses)
            raised = bool(kinds & RANKS_SAY) or (due and not works(window, culprit, state.advanced_s))
            return [self._verdict(window, state, culprit, kinds, silent, lag)] if raised else []
        return self._unknown(window, state, lag)

    def _within_usual_pause(self, window: Window, state: Progress, silent: set[int]) -> list[Verdict]:
        """Return the verdict on a node that stands out in two ways while the job has stood still for longer before."""
        if self._unheard(window):
            return []
        lag = behind(window)
        culprit, kinds = self._culprit(window, state, silent, lag)
        if culprit is None or len(kinds) < 2 or works(window, culprit, state.advanced_s) is not False:
            return []
        return [self._verdict(window, state, culprit, kinds, silent, lag)]

    def _culprit(self, window: Window, state: Progress, silent: set[int], lag: Floats) -> tuple[int | None, set[str]]:
        """Return the one node that stands out, as its index, and by which kinds of evidence; None where none does."""
        worst = np.fmax.reduce(lag, initial=0.0)
        lagging = {int(n) for n in np.unique(window.node_of[lag == worst])} if worst > 0 else set()
        missing = missing_nodes(window) if state.phase == STARTING else set()
        if _counts(state, lag) and not (silent or lagging or missing):
            return None, set()  # what GPUs do is no evidence of its own there
        odd = activity_outliers(window, state.advanced_s)
        evidence = [
            ("rank_silence", silent),
            ("collective_sequence", lagging),
            ("rank_missing", missing),
            ("gpu_activity", odd),
        ]
        suspects: set[int] | None = None
        kinds: set[str] = set()
        for kind, nodes in evidence:
            if nodes and (suspects is None or suspects & nodes):
                suspects = nodes if suspects is None else suspects & nodes
                kinds.add(kind)
        if suspects is None or len(suspects) != 1 or (kinds == {"gpu_activity"} and _counts(state, lag)):
            return None, set()
        culprit = next(iter(suspects))
        if kinds & {"collective_sequence", "gpu_activity"} and at_rest(window, culprit, state.advanced_s):
            kinds.add("rank_process")
        return culprit, kinds

    def _unheard(self, window: Window) -> bool:
        """Whether some node's silence may yet explain the standstill; NodeSilent decides that."""
        heard_s = np.maximum(window.heard_s, window.watching_since_s)
        missed_s = np.where(window.farewell, 0.0, window.now_s - heard_s)
        return bool((missed_s > max(0.5 * self.silent_node_s, 2 * window.interval_s)).any())

    def _silent_nodes(self, window: Window) -> set[int]:
        quiet = window.silent_s > self.rank_silent_s
        return set() if quiet.all() else {int(n) for n in np.unique(window.node_of[quiet])}

    def _unknown(self, window: Window, state: Progress, lag: Floats) -> list[Verdict]:
        """Return a hang whose culprit nobody can name, once it cannot be a pause or a write any more."""
        if not state.ripe:
            return []
        kind, elsewhere, share = "collective_sequence", lag > 0, waiting_ratio(window)
        if share is None and (spins := self._spinning(window, state)) is not None:
            kind, elsewhere = "gpu_activity", spins == 0
            share = float(np.nanmean(spins)) if np.isfinite(spins).any() else None
        inside = share is not None and share >= WAITING_RATIO
        patience_s = state.ripe_s
        if share is not None and not inside and state.phase != "start":
            patience_s *= PAUSE_FLOORS  # the program is doing something else than waiting for its peers
        elif most_busy_with_io(window, state.advanced_s):
            patience_s *= PAUSE_FLOORS  # nobody kills a checkpoint
        elif elsewhere.any():
            # Some do not wait: they may be at work for the others, a checkpoint that nobody announced.
            busy = [works(window, int(n), state.advanced_s) for n in np.unique(window.node_of[elsewhere])]
            if any(busy) or not (state.reported or self._seen_at_rest(window, state, elsewhere)):
                patience_s = self._at_work_s(state)
            elif None in busy:
                patience_s *= UNSEEN_IO_FLOORS
        if state.standstill_s < patience_s:
            return []
        seen = "most ranks wait in a collective" if inside else "whether ranks wait in a collective is not known"
        hard = state.standstill_s >= self.patience.start_deadline_s
        again = state.phase == STARTING and window.beginning.mute_starts > 0 and not inside
        return [
            Verdict(
                detector=self.name,
                fault="hang",
                job=window.job,
                nodes=(),
                node=None,
                device=None,
                confidence=CONFIDENCE_UNKNOWN,
                onset_s=state.advanced_s,
                summary=f"{state}; {seen}, culprit unknown: flight recorder dumps or stacks would tell",
                evidence=(state.evidence,),
                kinds=frozenset({"standstill", kind} if inside else {"standstill"}),
                asks=None if inside or (hard and not again) else "notify",
            )
        ]

    def _spinning(self, window: Window, state: Progress) -> Floats | None:
        """Return which GPUs run a kernel while the job does no work: (S,) as ``waiting``, None where that is not known.

        Raises Blind where the ranks say nothing either.
        """
        seen, spins = work(window), waiting(window, state.advanced_s)
        if spins is not None and seen is not None and seen.idle_s > 0 and not seen.by_wires:
            return spins
        if not state.reported:
            raise Blind("whether the job's GPUs wait for each other or compute is not observed")
        return None

    def _left(self, window: Window, state: Progress, gone: list[str]) -> Verdict:
        return Verdict(
            detector=self.name,
            fault="hang",
            job=window.job,
            nodes=(),
            node=None,
            device=None,
            confidence=CONFIDENCE_RIPE,
            onset_s=state.advanced_s,
            summary=f"{state}; {gone[0]} ended with exit code 0 while its peers wait for it: the program",
            evidence=(state.evidence, Evidence("process_exits", None, None, float(len(gone)), None, 0.0)),
            kinds=frozenset({"standstill", "exit"}),
            application=True,
        )

    def _verdict(
        self, window: Window, state: Progress, culprit: int, kinds: set[str], silent: set[int], lag: Floats
    ) -> Verdict:
        node = window.nodes[culprit]
        members: Integers = np.flatnonzero(window.node_of == culprit)
        evidence = [state.evidence]
        reasons: list[str] = []
        device = None
        if culprit in silent:
            worst = int(members[np.argmax(window.silent_s[members])])
            quiet_s, device = float(window.silent_s[worst]), window.series[worst].device
            evidence.append(Evidence("rank_silence_seconds", node, device, quiet_s, 0.0, self.rank_silent_s, "seconds"))
            reasons.append(f"rank {window.series[worst].rank} exists but has said nothing for {quiet_s:.1f} s")
        behind = np.where(np.isfinite(lag[members]), lag[members], 0.0)
        if behind.max(initial=0.0) > 0:
            worst = int(members[np.argmax(behind)])
            # Ranks of the node that lag alike wait for each other; only a single one can be named.
            device = window.series[worst].device if int((behind == behind.max()).sum()) == 1 else device
            evidence.append(Evidence("nccl_sequence_lag", node, device, float(behind.max()), 0.0, 0.0, "collectives"))
            many = f"{behind.max():.0f} collective{'' if behind.max() == 1 else 's'}"
            reasons.append(f"rank {window.series[worst].rank} is {many} behind its peers, who wait for it")
        if "rank_missing" in kinds:
            ranks = missing_ranks(window, culprit)
            evidence.append(Evidence("ranks_missing", node, None, float(len(ranks)), 0.0, 0.0, "ranks"))
            named = ", ".join(map(str, ranks))
            if window.beginning.held_up_by:
                which = f"ranks {named} are stopped, have not come or did not reach the others"
                reasons.append(f"its launcher says that {which}")
            else:
                which = f"of its ranks {named}" if ranks else "of it"
                reasons.append(f"{which} nothing was heard in this attempt, while the other nodes' ranks were heard")
        if "gpu_activity" in kinds:
            reasons.append("its GPUs do not wait as its peers' do")
        if "rank_process" in kinds:
            evidence.append(Evidence("rank_cpu_seconds_total", node, None, "at rest"))
            reasons.append("a process of it whose GPU runs nothing uses no CPU, reads and writes nothing")
        return Verdict(
            detector=self.name,
            fault="hang",
            job=window.job,
            nodes=(node,),
            node=node,
            device=device,
            confidence=CONFIDENCE_RIPE if self._sure(window, state, culprit, kinds) else CONFIDENCE_EARLY,
            onset_s=state.advanced_s,
            summary=f"{state}; {node} holds the job up: {'; '.join(reasons)}",
            evidence=tuple(evidence),
            kinds=frozenset({"standstill", *kinds}),
            # What is merely not seen may be its agent's fault: a second time the node is excluded.
            asks="restart_job"
            if "rank_missing" in kinds and not kinds & {"rank_silence", "collective_sequence"}
            else None,
        )

    def _sure(self, window: Window, state: Progress, culprit: int, kinds: set[str]) -> bool:
        if "rank_silence" in kinds:
            # A process that cannot even say that it lives is not writing a checkpoint, unless it is too busy to.
            mute = (window.node_of == culprit) & (window.silent_s > self.rank_silent_s)
            busy = uses_cpu(window, mute, state.advanced_s)
            return state.prompt and (not busy or state.standstill_s >= self._at_work_s(state))
        working = works(window, culprit, state.advanced_s)
        if working:  # nobody kills a write or an evaluation, nor the node whose storage is frozen
            return state.standstill_s >= self._at_work_s(state)
        if "collective_sequence" in kinds and not _at_rest(window):
            return False  # whoever is last for a moment after a stall that all shared holds nobody up
        if "rank_process" in kinds:
            return state.overstayed
        # A GPU that runs nothing is one kind of evidence, and a compilation: nobody saw what its process does.
        return state.ripe and (bool(kinds & RANKS_SAY) or state.standstill_s >= self._at_work_s(state))

    def _seen_at_rest(self, window: Window, state: Progress, columns: NDArray[np.bool_]) -> bool:
        nodes = np.unique(window.node_of[columns])
        return all(at_rest(window, int(node), state.advanced_s) for node in nodes)

    def _at_work_s(self, state: Progress) -> float:
        """Return how long one node may be at work for the others before that counts as a hang: the site's deadline."""
        return max(PAUSE_FLOORS * state.ripe_s, self.patience.start_deadline_s)


def _counts(state: Progress, lag: Floats) -> bool:
    """Whether ranks themselves tell who holds the job up: they report steps and how many collectives they have seen."""
    return state.reported and bool(np.isfinite(lag).any())


def _at_rest(window: Window) -> bool:
    """Whether no rank has enqueued a collective for as long as a prompt verdict takes, and two readings of each."""
    values = window.device.get("nccl_sequence")
    if values is None:
        return False
    # Where nodes report in turn there are more lines than intervals, and each has the readings of some nodes.
    rows = values[-(lines_within(window.times_s, max(PROMPT_S, 2 * window.interval_s)) + 1) :]
    return not ((rows != latest(rows, len(rows))) & np.isfinite(rows)).any()
