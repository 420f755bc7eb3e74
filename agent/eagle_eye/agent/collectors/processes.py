"""Discovers this node's training processes without their cooperation. Touches: /proc, pidfds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from eagle_eye.agent.collector import CollectFailed, Drops, Observed, Unsupported
from eagle_eye.agent.processes import rank_tracker
from eagle_eye.agent.processes.environment import Gpus, gpus, listed_device, name_conflicts, named_device, node_names
from eagle_eye.agent.processes.exit_watcher import Ended, Ends, ExitReporter
from eagle_eye.agent.processes.process_files import ProcessFiles
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.agent.processes.rank_tracker import (
    Candidate,
    Census,
    MemberProcess,
    Ranks,
    ancestors,
    choose,
    ranks_by_launch,
)

LOOK_S = 5.0  # between scans of all processes; in between only exits are noticed
LOOK_S_MAX = 60.0
LOOK_COST_RATIO = 0.0006  # fraction of one core that listing processes may take: scans are rarer on crowded hosts
# How long a process without a GPU must have lived before it may count as a rank that its launcher does not prove to be
# one. A launcher waiting for its peers looks like one; where there are GPUs, ranks take a while to open them.
SETTLE_S = 10.0
SETTLE_WITH_GPUS_S = 60.0
MAPS_LOOKS_MAX = 32  # processes whose mappings are read per scan; some 0.3 ms each
MAPS_S_MIN, MAPS_S_MAX = 5.0, 60.0  # a process that has not loaded torch is checked again at growing intervals
UNSEEN_LOOKS = 2  # scans in which NVML must name a missing process: one may just have exited
TEXTS_MAX = 3  # of one kind in a problem; the rest is given as a count


@dataclass(frozen=True)
class GpuDriver:
    """What the driver tells of this host's GPUs; the maps may be filled later.

    ``processes`` returns GPU rows by pid and must not wait for the driver; empty: unknown.
    """

    processes: Callable[[], dict[int, int]] = dict
    devices_by_uuid: Mapping[str, int] = field(default_factory=dict)
    devices_by_bus_id: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HookedProcesses:
    """The processes that report themselves, and their attempts.

    A process that continued into the next attempt still has its first one's environment.
    """

    pids: Callable[[], set[int]] = set
    attempts: Callable[[], Mapping[int, int]] = dict


@dataclass(frozen=True)
class ProcessHost:
    """Where a host shows its processes, its clocks, and what watches a process for its exit."""

    proc: Path = Path("/proc")
    monotonic_s: Callable[[], float] = time.monotonic
    now_s: Callable[[], float] = time.time
    cpu_s: Callable[[], float] = time.thread_time
    watch: Callable[[Ended], ExitReporter] = Ends


NO_DRIVER = GpuDriver()
NO_HOOKS = HookedProcesses()
THIS_HOST = ProcessHost()


class ProcessesCollector:
    """Publishes the node's training processes; reports those without our hook as ranks, and their exits.

    Each scan also reports what all ranks' processes do: CPU time, bytes, whether one is blocked in the kernel.

    A rank is a process that holds a GPU and whose environment names a rank; ``docs/explanation/who-runs-here.md`` says
    what counts before and where there is no GPU, and how jobs are named. A process once found to hold a GPU stays a
    rank until it exits, even if NVML loses the GPU.

    An exit whose code cannot be read reliably is not an event, only counted as ``exit_code_unread``: such a process
    sends no goodbye, so the normal end of the job would look like a crash.

    Cannot see: ranks assigned to processes after their start (``torch.multiprocessing.spawn``, Ray): the kernel shows
    the initial environment.
    """

    name = "processes"

    def __init__(
        self,
        processes: TrainingProcesses,
        drops: Drops,
        *,
        driver: GpuDriver = NO_DRIVER,
        hooks: HookedProcesses = NO_HOOKS,
        node: str = "",
        shared_host: bool = False,
        wake: Callable[[], None] = lambda: None,
        host: ProcessHost = THIS_HOST,
    ) -> None:
        """``node`` is this agent's name for the node, "" disables the name check.

        On a ``shared_host`` only processes whose EAGLE_EYE_NODE is that name count. ``wake`` is called when a process
        exits.
        """
        self._processes = processes
        self._drops = drops
        self._gpu_processes = driver.processes
        self._hooked_pids = hooks.pids
        self._hooked_attempts = hooks.attempts
        self._attempts: Mapping[int, int] = {}
        self._devices_by_uuid = driver.devices_by_uuid
        self._devices_by_bus_id = driver.devices_by_bus_id
        self._node = node
        self._shared_host = shared_host
        self._proc = host.proc
        self._monotonic_s = host.monotonic_s
        self._cpu_s = host.cpu_s
        self._files = ProcessFiles(host.proc)
        self._census = Census(self._files, drops)
        self._ranks = Ranks(processes, drops, self._files, hooks.pids, wake, host.now_s, host.watch)
        self._look_s = -LOOK_S_MAX  # when the last scan was
        self._look_every_s = 0.0
        self._holders: dict[int, int] = {}
        self._cohorts: dict[tuple[str, int], set[tuple[str, ...]]] = {}  # of certain processes, by job and attempt
        self._unseen: dict[int, int] = {}  # processes that NVML names and /proc lacks: for how many scans
        self._changed = True  # the inputs to the selection, since it was made
        self._chosen_for: tuple[int, dict[str, int], dict[str, int]] = (0, {}, {})
        self._chosen: list[MemberProcess] = []
        self._starting: list[MemberProcess] = []  # those of them that only their launch makes ranks
        self._conflicts: tuple[Candidate, ...] = ()
        self._reported: set[str] = set()
        self._problem = ""
        self._rows: dict[int, dict[str, float]] = {}  # of the last scan, until reported

    def collect(self, now_s: float) -> Observed:  # noqa: ARG002 - an end has the time at which it was noticed
        """Return the ranks without a hook and the exits since the last call. Raises Unsupported, CollectFailed."""
        monotonic_s = self._monotonic_s()
        if monotonic_s - self._look_s >= self._look_every_s:
            self._look(monotonic_s)
        self._ranks.notice()
        observed = self.happened()
        observed.problem = self._problem
        observed.devices, self._rows = self._rows, {}
        return observed

    def happened(self) -> Observed:
        """Return ranks and events without rows, for frames between the ticks."""
        return self._ranks.happened()

    def close(self) -> None:
        """Stop following processes."""
        self._ranks.close()

    def _look(self, monotonic_s: float) -> None:
        ended = self._leave_orphans()
        begin_s = self._cpu_s()
        try:
            listed = self._files.pids()
        except FileNotFoundError:
            raise Unsupported(f"no {self._proc}: not Linux") from None
        except OSError as error:
            raise CollectFailed(f"{self._proc}: {error.strerror or error}") from None
        listing_s = self._cpu_s() - begin_s
        self._look_s = monotonic_s
        self._holders = self._gpu_processes()
        hooked = self._hooked_pids()
        self._census.update_members(listed, self._holders.keys() | hooked, monotonic_s)
        self._pass_over_survivors(ended)
        self._unseen = {pid: self._unseen.get(pid, 0) + 1 for pid in self._holders.keys() - listed}
        self._look_every_s = LOOK_S
        if self._census.whole:
            self._look_every_s = min(LOOK_S_MAX, max(LOOK_S, listing_s / LOOK_COST_RATIO))
        self._note_certain(hooked)
        attempts = self._hooked_attempts()
        self._changed |= attempts != self._attempts
        self._attempts = attempts
        self._look_for_torch(monotonic_s)
        self._changed |= any(self._has_waited(member, monotonic_s) for member in self._starting)
        # Copies: the GPU collector changes the maps meanwhile.
        known = self._census.changes, dict(self._devices_by_uuid), dict(self._devices_by_bus_id)
        if self._changed or known != self._chosen_for:
            self._choose(listed, gpus(known[1], known[2]), monotonic_s)
            self._changed, self._chosen_for = False, known
        self._rows = rank_tracker.rank_rows(self._files, self._processes.all(), self._census.members.values())
        self._problem = self._problems()

    def _choose(self, listed: set[int], node: Gpus, monotonic_s: float) -> None:
        members = self._census.members
        candidates = {
            pid: self._candidate(member, monotonic_s)
            for pid, member in members.items()
            if not self._shared_host or member.variables.get("EAGLE_EYE_NODE") == self._node
        }
        choice = choose(candidates)
        self._drops.count("process_rank_conflicts", len(set(choice.conflicts) - set(self._conflicts)))
        self._conflicts = choice.conflicts
        self._chosen = [members[candidate.pid] for candidate in choice.ranks.values()]
        self._starting = [m for m in self._chosen if not (m.certain or candidates[m.pid].waited)]
        starting = {member.pid for member in self._starting}
        found = [
            (_process(m, node, self._attempts.get(m.pid), starting=m.pid in starting), m.started) for m in self._chosen
        ]
        self._ranks.set_ranks(found, listed)

    def _note_certain(self, hooked: set[int]) -> None:
        """Record which processes hold a GPU or report, and their cohorts for as long as a process of the job lives."""
        members = self._census.members
        for pid in self._holders.keys() & members.keys():
            self._changed |= members[pid].device != self._holders[pid]
            members[pid].device = self._holders[pid]
        for pid in hooked & members.keys():
            self._changed |= not members[pid].hooked
            members[pid].hooked = True
        jobs = {member.identity.job for member in members.values()}
        self._cohorts = {name: cohorts for name, cohorts in self._cohorts.items() if name[0] in jobs}
        for member in members.values():
            if member.certain:
                who = member.identity
                self._cohorts.setdefault((who.job, who.attempt), set()).add(member.cohort)

    def _leave_orphans(self) -> set[tuple[str, ...]]:
        """Keep processes that outlive a rank, above all data loaders, from being taken for it; return what ended."""
        ended = self._ranks.ended()
        members = self._census.members  # as of the last scan: the orphans still have their parents
        candidates = {pid: self._candidate(member) for pid, member in members.items()} if ended else {}
        for pid, candidate in candidates.items():
            if pid in ended or any(above.pid in ended for above in ancestors(candidate, candidates)):
                members[pid].stale = True
        self._changed |= bool(ended)
        return {members[pid].launch for pid in ended & members.keys()}

    def _pass_over_survivors(self, ended: set[tuple[str, ...]]) -> None:
        """Keep processes of an ended rank's launch from being taken for it unless they come to hold a GPU.

        Among them are those that it started since the last scan: their parent is not known any more.
        """
        for member in self._census.members.values() if ended else ():
            if member.launch in ended:
                member.trains, member.asked_s = False, math.inf

    def _is_launched(self, member: MemberProcess) -> bool:
        known = self._cohorts.get((member.identity.job, member.identity.attempt))
        return member.elastic if known is None else member.cohort in known

    def _has_waited(self, member: MemberProcess, monotonic_s: float) -> bool:
        """Whether a process without a GPU has lived long enough, in a job of which none has held one."""
        settle_s = SETTLE_WITH_GPUS_S if self._devices_by_uuid or self._holders else SETTLE_S
        return monotonic_s >= member.met_s + settle_s and all(job != member.identity.job for job, _ in self._cohorts)

    def _candidate(self, member: MemberProcess, monotonic_s: float = 0.0) -> Candidate:
        """Return it as it may be chosen; a process that outlived its rank is never one, and may have children."""
        return Candidate(
            pid=member.pid,
            parent=member.parent,
            started=member.started,
            identity=member.identity,
            launch=member.launch,
            cohort=member.cohort,
            elastic=member.elastic,
            certain=member.certain and not member.stale,
            trains=member.trains and not member.stale,
            launched=self._is_launched(member),
            waited=self._has_waited(member, monotonic_s),
        )

    def _look_for_torch(self, monotonic_s: float) -> None:
        """Find which processes without a GPU have torch's libraries mapped, parents first, a few per scan."""
        members = self._census.members
        held = {member.key for member in members.values() if member.certain}
        asked = [
            member
            for member in members.values()
            if monotonic_s >= member.asked_s
            and not (member.trains or member.stale or member.key in held)
            and (self._is_launched(member) or self._has_waited(member, monotonic_s))
        ]
        candidates = {pid: self._candidate(member, monotonic_s) for pid, member in members.items()} if asked else {}
        launched = ranks_by_launch(candidates)
        looks = 0
        for member in sorted(asked, key=lambda item: (item.started, item.pid)):
            if looks >= MAPS_LOOKS_MAX:
                return
            member.asked_s = monotonic_s + min(MAPS_S_MAX, max(MAPS_S_MIN, (monotonic_s - member.met_s) / 2))
            candidate = candidates[member.pid]
            if not candidate.waited and member.pid not in launched:
                continue
            above = ancestors(candidate, candidates)
            if any(members[item.pid].trains and item.launch == member.launch for item in above):
                continue  # a worker: its rank is already known
            looks += 1
            self._changed = True
            member.trains = self._files.has_torch(member.pid) and not self._files.is_launcher(member.pid)

    def _problems(self) -> str:
        """Return what is missing but should be visible; permanent limitations are reported once."""
        census = self._census
        problems: list[str] = []
        hidden = sorted(self._holders.keys() & census.unreadable)
        if hidden:
            problems.append(
                f"processes {_some(hidden)} use GPUs and their environment may not be read: run the agent as root or"
                " grant it CAP_SYS_PTRACE"
            )
        unseen = sorted(pid for pid, looks in self._unseen.items() if looks >= UNSEEN_LOOKS)
        if unseen:
            problems.append(
                f"NVML names processes {_some(unseen)} that {self._proc} does not show: the agent needs the host's"
                " process namespace, and a /proc without hidepid"
            )
        if self._conflicts:
            clashes = [f"{c.pid} (rank {c.identity.rank} of {c.identity.job!r})" for c in self._conflicts]
            problems.append(
                f"processes {_some(clashes)} claim ranks that older processes have: name each job with EAGLE_EYE_JOB"
            )
        if 1 not in census.listed:
            problems += self._said_once(
                "hidden",
                f"{self._proc} hides processes of other users (hidepid), and ranks among them: run the agent as root or"
                " in the group that the mount's gid= names",
            )
        problems += self._said_once("unreadable", self._unreadable())
        problems += self._said_once("refused", census.refusal)
        problems += self._said_once("names", self._names())
        return "; ".join(problems)

    def _unreadable(self) -> str:
        if not self._census.unreadable:
            return ""
        return (
            f"the environment of {len(self._census.unreadable)} processes of other users may not be read: ranks among"
            " them are not seen; run the agent as root or grant it CAP_SYS_PTRACE"
        )

    def _names(self) -> str:
        """Return the names given to ranks for this node that disagree with the agent's."""
        found: dict[str, None] = {}
        for member in self._chosen if self._node else ():
            names = node_names(self._node, "", "", member.variables, pod=bool(member.cgroup.pod_uid))
            found.update(dict.fromkeys(name_conflicts(names)))
        remedy = "; orchestrators act on the agent's: set node to the name that they know" if found else ""
        return _some(list(found)) + remedy

    def _said_once(self, about: str, text: str) -> list[str]:
        if not text or about in self._reported:
            return []
        self._reported.add(about)
        return [text]


def _process(member: MemberProcess, node: Gpus, attempt: int | None, *, starting: bool) -> TrainingProcess:
    """``attempt`` is what the process's hook reports, None: nothing."""
    who = member.identity
    device = named_device(member.variables, node)  # before NVML, which does not know MIG instances' rows
    if device is None:
        device = member.device
    if device is None:
        device = listed_device(member.variables, who.local_rank, node)
    return TrainingProcess(
        pid=member.pid,
        job=who.job,
        rank=who.rank,
        world_size=who.world_size,
        device=who.local_rank if device is None else device,
        local_rank=who.local_rank,
        attempt=who.attempt if attempt is None else attempt,
        role=who.role,
        starting=starting,
    )


def _some(items: list[int] | list[str]) -> str:
    shown = ", ".join(str(item) for item in items[:TEXTS_MAX])
    return f"{shown} and {len(items) - TEXTS_MAX} more" if len(items) > TEXTS_MAX else shown
