"""Detects a job that should make steps but does not, and the node that holds it up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.at_work import pausing_at_work
from eagle_eye.detectors.signs.collective_counts import WAITING_RATIO, behind, waiting_ratio
from eagle_eye.detectors.signs.exits import left_early, unplanned_exits
from eagle_eye.detectors.signs.gpu_activity import activity_outliers, odd_devices, waiting
from eagle_eye.detectors.signs.host_activity import MOUNTS, cut_off_from_storage, most_busy_with_io, no_busier
from eagle_eye.detectors.signs.nccl_warnings import nccl_warnings
from eagle_eye.detectors.signs.peers import latest
from eagle_eye.detectors.signs.progress import (
    PAUSE_FLOORS,
    PROMPT_S,
    STARTING,
    Patience,
    Progress,
    at_work_s,
    first_steps,
    progress,
    warms_up,
)
from eagle_eye.detectors.signs.rank_activity import at_rest, computing_devices, processes_seen, uses_cpu, works
from eagle_eye.detectors.signs.under_load import lines_within, spare_devices
from eagle_eye.detectors.signs.unstarted import missing_nodes, missing_ranks
from eagle_eye.detectors.signs.waited_for import STOPPED, outlasts_floor, quorums, stopped_ranks, waited_for
from eagle_eye.detectors.signs.without_hook import idle_since_s, unused_devices, work
from eagle_eye.detectors.types import Blind, Evidence, Floats, Integers, Verdict, Window

MUTE = frozenset({"rank_silence", "collective_sequence"})  # a process says nothing, and others wait for it
BY_SIGNAL = frozenset({"process_stopped", *MUTE})
CONFIDENCE_EARLY, CONFIDENCE_RIPE = 0.85, 0.97
CONFIDENCE_UNKNOWN = 0.8
RANKS_SAY = frozenset({"rank_silence", "collective_sequence", "rank_missing"})  # reported by ranks, not seen on GPUs
HELD = frozenset({"rank_process", "mount"})  # its process does nothing, or waits for what does not come
UNSEEN_FLOORS = 5.0  # where some ranks do not wait and host activity is not reported, or nothing but steps is
REPORTS_MIN = 6  # of progress before a silence means anything where nothing else is seen
UNSEEN_RANK_FLOORS = 3.0  # where ranks are seen by their GPU and host alone: a retried request takes less
DEVICES_MIN = 3  # of a node, to tell ranks that only train from the first and the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Finds a standstill and its culprit.

    The culprit is a rank whose process exists but reports nothing (stopped, or stuck in the kernel), or a rank that has
    enqueued fewer collectives than its peers, which wait in one that it has not reached (C4D, Wu et al. HPCA 2025;
    Aegis, Dong et al. NSDI 2025: "collective launch lower than the group"). Where the culprit's whole pipeline lags
    with it, the node whose GPUs do something other than wait decides. Exactly one node must stand out. Otherwise the
    verdict is a hang without a known culprit; it waits for the site's floor and asks for a restart only while the ranks
    are inside a collective, since a job that stands still outside of collectives is pausing, as is one whose GPUs still
    compute or most of whose hosts write. A known culprit is reported as soon as a step is overdue. If its process
    reports nothing, action follows once the standstill is ``prompt``. A lagging rank looks like one that saves,
    evaluates or compiles without announcing it: action waits for the site's floor, or comes earlier only if the
    standstill exceeds all the job's own pauses and a process of the node is seen to be idle, or a network filesystem
    answers all nodes but this one. While its host, GPU or process works otherwise, it gets the start deadline. Without
    the hook, or where ranks do not count collectives, GPU activity substitutes: a GPU that runs a kernel but does no
    work waits in a collective, and the one node with a GPU that runs none while all others wait is the culprit. It is
    reported at the floor and acted on as above if its process is seen to be idle. If process activity is not observed
    it gets the start deadline, since compilation looks the same; three floors if it is neither its node's first GPU nor
    its last, so that its rank has nothing to do but train, and its host is seen to do no more than the others. Nodes
    that stand by hide no culprit and are none. A start without a first step is a hang after its deadline where steps
    would have been seen (``signs/unstarted.py``); a single node whose ranks never reported while the others' did is
    named, and the first verdict asks for a restart. If a process has ended, ProcessExit reports instead. A rank that
    says nothing and that its peers wait for is named also in the attempt's first steps, at the floor, and beside a node
    that is silent; one that a signal has stopped while all others wait is named and acted on at the floor, whatever the
    job's own pauses, from the first step on. Otherwise Blind while one is, and as ``progress`` is. Cannot see: which
    end of a broken link is to blame when all ranks wait in the same collective; mismatched collectives at the same
    sequence number (the flight recorder shows these).
    """

    patience: Patience
    rank_silent_s: float
    silent_node_s: float
    name: str = "hang"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        if stopped := self._in_first_steps(window):
            return stopped
        state = progress(window, self.patience)
        if stopped := self._stopped_by_signal(window, state):
            return stopped
        self._require_senses(window, state)
        if not state.accusable or unplanned_exits(window):
            return []
        if not state.reported and _process_ended(window):
            return []  # ProcessGone reports it
        silent = self._silent_nodes(window)
        early = state.reported and not (silent or state.ripe or self._unheard(window))
        if early and not np.fmax.reduce(behind(window), initial=0.0) > 0:
            return []  # the most common standstill: no node stands out, and it may end by itself
        if not silent and pausing_at_work(window, state):
            return []
        gone = left_early(window)
        if gone:
            return [self._left(window, state, gone)] if state.ripe else []
        if not state.stopped:
            return self._within_usual_pause(window, state, silent)
        lag = self._lag(window)
        culprit, kinds = self._heard_culprit(window, state, silent, lag)
        if culprit is not None:
            # If only GPUs accuse a node, do not report it: one rank may be writing or evaluating without announcing it.
            due = state.ripe or (bool(kinds & HELD) and state.outlasts_pauses)
            excused = "mount" not in kinds and works(window, culprit, state.advanced_s)
            raised = bool(kinds & RANKS_SAY) or (due and not excused)
            return [self._verdict(window, state, culprit, kinds, silent, lag)] if raised else []
        return self._unknown(window, state, lag)

    def _require_senses(self, window: Window, state: Progress) -> None:
        """Raise Blind if neither ranks nor any counter says whether GPUs that draw little power wait."""
        seen = None if state.reported else work(window)
        if seen is not None and seen.unclear:
            raise Blind("the GPUs draw far less than before, and no counter that training alone moves is observed")

    def _lag(self, window: Window) -> Floats:
        """Return ``behind`` of the nodes that are heard: what others last said is old."""
        return np.where(self._unheard_nodes(window)[window.node_of], np.nan, behind(window))

    def _heard_culprit(
        self, window: Window, state: Progress, silent: set[int], lag: Floats
    ) -> tuple[int | None, set[str]]:
        """Return ``_culprit``; beside a silent node only a rank that stopped. Raises Blind if there is none."""
        culprit, kinds = self._culprit(window, state, silent, lag)
        if self._unheard(window) and not kinds >= MUTE:
            raise Blind("a node of the job has not been heard of since before the standstill became due")
        return culprit, kinds

    def _in_first_steps(self, window: Window) -> list[Verdict]:
        """Return the verdict on a rank that stopped when the attempt had made a few steps; [] if none is sure."""
        silent = self._silent_nodes(window)
        if not (silent and warms_up(window, self.patience)) or unplanned_exits(window) or left_early(window):
            return []
        state, lag = first_steps(window, self.patience), behind(window)
        if stopped := self._stopped_by_signal(window, state):
            return stopped
        if not state.stopped or self._unheard(window) or pausing_at_work(window, state):
            return []
        culprit, kinds = self._culprit(window, state, silent, lag)
        if culprit is None or not kinds >= MUTE or not self._sure(window, state, culprit, kinds):
            return []
        return [self._verdict(window, state, culprit, kinds, silent, lag)]

    def _stopped_by_signal(self, window: Window, state: Progress) -> list[Verdict]:
        """Return the verdict on a node whose process a signal has stopped, and that all other ranks wait for.

        No pause of the program explains that, however long its pauses are.
        """
        stopped = stopped_ranks(window, self.rank_silent_s)
        if not stopped.any() or not outlasts_floor(window, state, self.patience):
            return []
        silent = waited_for(window, {int(n) for n in np.unique(window.node_of[stopped])})
        if not silent:
            return []
        longest = [float(window.silent_s[stopped & (window.node_of == node)].max()) for node in sorted(silent)]
        culprit = sorted(silent)[int(np.argmax(longest))]
        kinds = {*BY_SIGNAL} if quorums(window) is None else {"quorum", *BY_SIGNAL}
        return [self._verdict(window, state, culprit, kinds, silent, behind(window))]

    def _within_usual_pause(self, window: Window, state: Progress, silent: set[int]) -> list[Verdict]:
        """Return the verdict on a node that two kinds of evidence single out within the job's usual pauses."""
        if self._unheard(window):
            return []
        lag = behind(window)
        culprit, kinds = self._culprit(window, state, silent, lag)
        if culprit is None or len(kinds) < 2 or works(window, culprit, state.advanced_s) is not False:
            return []
        return [self._verdict(window, state, culprit, kinds, silent, lag)]

    def _culprit(self, window: Window, state: Progress, silent: set[int], lag: Floats) -> tuple[int | None, set[str]]:
        """Return the index of the one node that stands out and its kinds of evidence; None if there is none."""
        worst = np.fmax.reduce(lag, initial=0.0)
        lagging = {int(n) for n in np.unique(window.node_of[lag == worst])} if worst > 0 else set()
        missing = missing_nodes(window) if state.phase == STARTING else set()
        if _counts(state, lag) and not (silent or lagging or missing):
            return None, set()  # GPU activity is not independent evidence there
        odd = activity_outliers(window, state.advanced_s)
        evidence = [
            ("rank_silence", silent),
            ("collective_sequence", lagging),
            ("rank_missing", missing),
            ("gpu_activity", odd),
            ("mount", cut_off_from_storage(window)),
        ]
        suspects: set[int] | None = None
        kinds: set[str] = set()
        for kind, nodes in evidence:
            if nodes and (suspects is None or suspects & nodes):
                suspects = nodes if suspects is None else suspects & nodes
                kinds.add(kind)
        if suspects is None or len(suspects) != 1 or kinds == {"mount"}:
            return None, set()
        if kinds <= {"gpu_activity", "mount"} and _counts(state, lag):
            return None, set()
        culprit = next(iter(suspects))
        if kinds & {"collective_sequence", "gpu_activity"} and at_rest(window, culprit, state.advanced_s):
            kinds.add("rank_process")
        return culprit, kinds

    def _unheard(self, window: Window) -> bool:
        return bool(self._unheard_nodes(window).any())

    def _unheard_nodes(self, window: Window) -> NDArray[np.bool_]:
        """Return which nodes' silence may still explain the standstill (N,); NodeSilent decides that."""
        heard_s = np.maximum(window.heard_s, window.watching_since_s)
        missed_s = np.where(window.farewell, 0.0, window.now_s - heard_s)
        unheard: NDArray[np.bool_] = missed_s > max(0.5 * self.silent_node_s, 2 * window.interval_s)
        return unheard

    def _silent_nodes(self, window: Window) -> set[int]:
        quiet = window.silent_s > self.rank_silent_s
        return set() if quiet.all() else {int(n) for n in np.unique(window.node_of[quiet])}

    def _unknown(self, window: Window, state: Progress, lag: Floats) -> list[Verdict]:
        """Return a hang without a known culprit, once it can no longer be a pause or a write."""
        if not state.ripe:
            return []
        kind, elsewhere, share = "collective_sequence", lag > 0, waiting_ratio(window)
        if share is None and (spins := self._spinning(window, state)) is not None:
            kind, elsewhere = "gpu_activity", (spins == 0) | computing_devices(window, state.advanced_s)
            share = float(np.nanmean(spins)) if np.isfinite(spins).any() else None
        inside = share is not None and share >= WAITING_RATIO
        patience_s = state.ripe_s
        if share is None and state.phase != STARTING and idle_since_s(window) is None:
            patience_s = self._by_reports_alone_s(window, state)
        elif share is not None and not inside and state.phase != "start":
            patience_s *= PAUSE_FLOORS  # the program does something other than wait for its peers
        elif most_busy_with_io(window, state.advanced_s):
            patience_s *= PAUSE_FLOORS  # do not kill a checkpoint
        elif elsewhere.any():
            # Some ranks do not wait: they may be working for the others, such as on an unannounced checkpoint.
            busy = [works(window, int(n), state.advanced_s) for n in np.unique(window.node_of[elsewhere])]
            if any(busy) or not (state.reported or self._seen_at_rest(window, state, elsewhere)):
                patience_s = self._at_work_s(state)
            elif None in busy:
                patience_s *= UNSEEN_FLOORS
        if state.standstill_s < patience_s:
            return []
        seen = "most ranks wait in a collective" if inside else "whether ranks wait in a collective is not known"
        hard = state.standstill_s >= self.patience.start_deadline_s
        again = state.phase == STARTING and window.beginning.mute_starts > 0 and not inside
        given_up = bool(window.beginning.held_up_by)  # by the launcher: nothing is lost by a restart
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
                evidence=(state.evidence, *nccl_warnings(window)),
                kinds=frozenset({"standstill", kind} if inside else {"standstill"}),
                asks=None if inside or given_up or (hard and not again) else "notify",
            )
        ]

    def _by_reports_alone_s(self, window: Window, state: Progress) -> float:
        """Return how long the job may say nothing where nothing else is seen of it: a log may pause unannounced.

        Raises Blind while too few reports have come to know how far apart they are.
        """
        if window.reports.count < REPORTS_MIN:
            raise Blind(
                f"progress was heard of {window.reports.count} times in this attempt, and nothing else is seen of the"
                f" job: how long it says nothing is known after {REPORTS_MIN} times"
            )
        return max(state.ripe_s, UNSEEN_FLOORS * self.patience.floor_s)

    def _spinning(self, window: Window, state: Progress) -> Floats | None:
        """Return which GPUs run a kernel while the job does no work: (S,) as ``waiting``, None if unknown.

        Raises Blind if the ranks report nothing either.
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
        if "process_stopped" in kinds:
            evidence.append(Evidence(STOPPED, node, device, 1.0, 0.0, 1.0, "ratio"))
            reasons.append("a signal has stopped its process; all other ranks wait in a collective")
        behind = np.where(np.isfinite(lag[members]), lag[members], 0.0)
        if behind.max(initial=0.0) > 0:
            worst = int(members[np.argmax(behind)])
            # Ranks of a node that lag equally wait for each other; only a single one can be named.
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
        if "mount" in kinds:
            evidence.append(Evidence(MOUNTS, node, None, 1.0, 0.0, 0.0, "filesystems"))
            reasons.append("a network filesystem does not answer there, and does on the other nodes")
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
            evidence=(*evidence, *nccl_warnings(window)),
            kinds=frozenset({"standstill", *kinds}),
            # A missing report may be the agent's fault: only the second occurrence excludes the node.
            asks="restart_job"
            if "rank_missing" in kinds and not kinds & {"rank_silence", "collective_sequence"}
            else None,
        )

    def _sure(self, window: Window, state: Progress, culprit: int, kinds: set[str]) -> bool:
        if "process_stopped" in kinds:
            return True
        if "rank_silence" in kinds:
            # A process that cannot even send heartbeats is not writing a checkpoint, unless it is too busy to send
            # them.
            mute = (window.node_of == culprit) & (window.silent_s > self.rank_silent_s)
            busy = uses_cpu(window, mute, state.advanced_s)
            return state.prompt and (not busy or state.standstill_s >= self._at_work_s(state))
        if "mount" in kinds:  # what its processes wait for does not come, and the others are seen to get it
            return state.overstayed
        working = works(window, culprit, state.advanced_s)
        if working:  # do not kill a write or an evaluation, nor exclude a node because its storage is frozen
            return state.standstill_s >= self._at_work_s(state)
        if "collective_sequence" in kinds and not _at_rest(window):
            return False  # a rank that is briefly last after a shared stall holds nothing up
        if "rank_process" in kinds:
            return state.overstayed
        if not state.ripe or kinds & RANKS_SAY:
            return state.ripe
        # An idle GPU is one kind of evidence, and also what compilation looks like; its process was not seen at rest.
        unseen = not processes_seen(window, culprit)
        rests = unseen and self._only_trains(window, state, culprit) and no_busier(window, culprit, state.advanced_s)
        patience_s = UNSEEN_RANK_FLOORS * self.patience.floor_s if rests else self._at_work_s(state)
        return state.standstill_s >= max(patience_s, state.ripe_s)

    def _only_trains(self, window: Window, state: Progress, culprit: int) -> bool:
        """Whether none of the node's odd GPUs is its first or last.

        Ranks that save, evaluate, compile or report for the others are a node's or the job's first, or the job's last.
        """
        mine = window.node_of == culprit
        devices = sorted(window.series[column].device for column in np.flatnonzero(mine))
        odd = {window.series[c].device for c in np.flatnonzero(mine & odd_devices(window, state.advanced_s))}
        return len(devices) >= DEVICES_MIN and bool(odd) and not odd & {devices[0], devices[-1]}

    def _seen_at_rest(self, window: Window, state: Progress, columns: NDArray[np.bool_]) -> bool:
        nodes = np.unique(window.node_of[columns])
        return all(at_rest(window, int(node), state.advanced_s) for node in nodes)

    def _at_work_s(self, state: Progress) -> float:
        return at_work_s(self.patience, state.ripe_s)


def _process_ended(window: Window) -> bool:
    """Whether no process holds the memory of a GPU that has worked, while most GPUs' memory is held."""
    spare = spare_devices(window)
    return any(spare is None or not spare[column] for column in unused_devices(window))


def _counts(state: Progress, lag: Floats) -> bool:
    """Whether ranks themselves show the culprit: they report steps and collective counts."""
    return state.reported and bool(np.isfinite(lag).any())


def _at_rest(window: Window) -> bool:
    """Whether no rank has enqueued a collective for as long as a prompt verdict takes, and two readings of each."""
    values = window.device.get("nccl_sequence")
    if values is None:
        return False
    # Where nodes report in turn there are more lines than intervals, and each has the readings of some nodes.
    rows = values[-(lines_within(window.times_s, max(PROMPT_S, 2 * window.interval_s)) + 1) :]
    return not ((rows != latest(rows, len(rows))) & np.isfinite(rows)).any()
