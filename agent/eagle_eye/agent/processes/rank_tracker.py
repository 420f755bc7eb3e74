"""Finds which of this host's processes are ranks, at low cost, and tracks them until they end; thread-safe.

Touches: /proc.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from eagle_eye.agent.collector import Drops, Observed
from eagle_eye.agent.processes.environment import (
    BadEnvironment,
    cohort,
    identity,
    is_elastic_worker,
    launch,
    may_name_a_rank,
    variables,
)
from eagle_eye.agent.processes.exit_watcher import Ended, ExitReporter
from eagle_eye.agent.processes.process_files import ENVIRON_BYTES_MAX, ProcessFiles, Stat
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.agent.training_hook.sender import Identity
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import RANKS_MAX, Rank

# Finds a process's owner from its cgroup: the Slurm job or Kubernetes pod that it runs in.
#
# Both managers write their own ids into the path: Slurm (cgroup.conf, cgroup_v2 documentation) as
# ``/slurm/uid_1000/job_7/step_0`` or ``/system.slice/slurmstepd.scope/job_7/step_0/user/task_0``, the kubelet as
# ``/kubepods/burstable/pod<uid>/<container>`` or ``/kubepods.slice/.../kubepods-burstable-pod<uid>.slice/...``. Inside
# a container paths begin elsewhere (``/../../pod<uid>/...``), so only their ends are matched.
# A node with several slurmds has its name in the path: slurm_<node>, <node>_slurmstepd.scope.
_SLURM = re.compile(
    r"/(?:slurm(?:_[^/]{1,253})?(?:/uid_\d{1,10})?|(?:[^/]{1,253}_)?slurmstepd\.scope)/job_(\d{1,10})(?:/|$)"
)
_POD = re.compile(r"[/-]pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?:[/:]|$)")


class Cgroup(NamedTuple):
    """The owners named in the path; "": none. ``pod_uid`` is written with hyphens, as in the API."""

    slurm_job: str = ""
    pod_uid: str = ""


def parse_cgroup(text: str) -> Cgroup:
    """Return the process's owner, from ``/proc/<pid>/cgroup`` of version 1 (a line per controller), 2 or both."""
    slurm_job = pod_uid = ""
    for line in text.splitlines():
        path = line.split(":", 2)[-1]  # hierarchy, controllers, path; a path may hold colons
        if not slurm_job and (found := _SLURM.search(path)):
            slurm_job = found[1]
        if not pod_uid and (found := _POD.search(path)):
            pod_uid = found[1].replace("_", "-")
    return Cgroup(slurm_job, pod_uid)


# Chooses the rank among the processes that inherited its environment.
#
# Children inherit the environment: a launcher's helpers, data loaders and shells all name a rank. The rank is the
# process that holds the GPU or whose hook reports. Until one does, it is the process that the launcher itself made
# this rank; where no process of the job has ever held a GPU, after a while, the topmost that has torch's libraries
# mapped. Neither may have children that were given another rank.
ANCESTORS_MAX = 64  # a longer chain of parents is not one of launchers and workers

RankKey = tuple[str, int, int]  # job, attempt, rank


@dataclass(frozen=True)
class Candidate:
    """A process whose environment names a rank.

    ``parent`` is its parent's pid, ``started`` the kernel's start time in clock ticks since boot. ``launch`` is equal
    for a rank and its own children, ``cohort`` for all ranks of a launch. ``elastic``: it has variables that only a
    launcher of torch's elastic kind sets. ``certain``: it holds a GPU, or its hook reports. ``trains``: it has torch's
    libraries mapped and its command line is not a launcher's. ``launched``: its cohort has a certain process or, while
    no cohort of its attempt has, it is elastic. ``waited``: it has lived for a while and no process of its job has ever
    been certain.
    """

    pid: int
    parent: int
    started: int
    identity: Identity
    launch: tuple[str, ...]
    cohort: tuple[str, ...] = ()
    elastic: bool = False
    certain: bool = False
    trains: bool = False
    launched: bool = False
    waited: bool = False

    @property
    def key(self) -> RankKey:
        """The rank, attempt and job that it names."""
        return self.identity.job, self.identity.attempt, self.identity.rank


@dataclass(frozen=True)
class ChosenRanks:
    """The ranks, by job, attempt and rank; and the processes that claim a rank already held by an older one."""

    ranks: dict[RankKey, Candidate]
    conflicts: tuple[Candidate, ...]


def choose(candidates: Mapping[int, Candidate]) -> ChosenRanks:
    """Return which candidates, by pid, are ranks. Of two that claim one, the certain one has it, or the older one."""
    launchers, launched = _launchers(candidates), ranks_by_launch(candidates)
    ranks: dict[RankKey, Candidate] = {}
    conflicts: list[Candidate] = []
    for candidate in sorted(candidates.values(), key=lambda item: (not item.certain, _age(item))):
        if candidate.certain:
            chosen = not any(_same_work(above, candidate) for above in ancestors(candidate, candidates))
        elif not candidate.trains or candidate.pid in launchers:
            continue
        elif candidate.waited:
            chosen = not any(above.trains and _is_child(above, candidate) for above in ancestors(candidate, candidates))
        else:
            chosen = candidate.key not in ranks and candidate.pid in launched
        if chosen and ranks.setdefault(candidate.key, candidate) is not candidate:
            conflicts.append(candidate)
    return ChosenRanks(ranks, tuple(conflicts))


def ranks_by_launch(candidates: Mapping[int, Candidate]) -> set[int]:
    """Return the processes that their launcher itself made ranks: they are ranks before they hold a GPU.

    Of those that inherited its variables that is the first, and none below another that was given a rank. What a rank
    starts, and what a script runs in its place, may end as it likes without ending the rank.
    """
    first: dict[tuple[str, ...], Candidate] = {}
    for candidate in sorted(candidates.values(), key=_age):
        first.setdefault(candidate.launch, candidate)
    return {
        candidate.pid
        for candidate in first.values()
        if candidate.launched and not any(_handed_on(above, candidate) for above in ancestors(candidate, candidates))
    }


def ancestors(candidate: Candidate, candidates: Mapping[int, Candidate]) -> Iterable[Candidate]:
    """Yield the chain of parents, as long as they are candidates and older than their child."""
    for _ in range(ANCESTORS_MAX):
        above = candidates.get(candidate.parent)
        if above is None or above.started > candidate.started or above is candidate:
            return
        yield above
        candidate = above


def _age(candidate: Candidate) -> tuple[int, int]:
    return candidate.started, candidate.pid


def _launchers(candidates: Mapping[int, Candidate]) -> set[int]:
    """Return the launchers: processes below which other ranks of the job train, and which are not ranks themselves."""
    return {
        above.pid
        for candidate in candidates.values()
        if candidate.trains or candidate.certain
        for above in ancestors(candidate, candidates)
        if not _is_child(above, candidate)
    }


def _same_work(above: Candidate, candidate: Candidate) -> bool:
    """Whether it is a helper of a rank above it, even one with a rank of its own, as in inference engines."""
    return above.certain and above.identity.job == candidate.identity.job


def _is_child(above: Candidate, candidate: Candidate) -> bool:
    return above.launch == candidate.launch


def _handed_on(above: Candidate, candidate: Candidate) -> bool:
    """Whether it has its rank from a process above it that was given one: restated or changed."""
    if above.elastic or above.certain or above.cohort == candidate.cohort:
        return True
    # torchrun's first rank may have the number of the task that torchrun is; scripts restate their task's.
    restated = above.key == candidate.key and above.identity.world_size == candidate.identity.world_size
    return restated and not candidate.elastic


# Tracks, at low cost, which of this host's processes name a rank in their environment, and which are ranks.
#
# Each process's environment is read when the process is new; again at the next scans while it is young, since between
# fork and exec a child shows its parent's; and from time to time, a few per scan, in case the process called exec or
# its pid was reused.
MEMBERS_MAX = 4_096  # 16 ranks with 64 data loaders each are 1,040
INSPECTED_MAX = 512  # new processes per scan: some 10 ms; a host's 5,000 are known after ten scans
AGAIN = 32  # old processes re-read per scan: 5,000 within a quarter of an hour
YOUNG_LOOKS = 2


@dataclass
class MemberProcess:
    """A process whose environment names a rank. Mutable: which GPU it holds and what it maps is learned over time.

    ``device`` is the row of the GPU that NVML saw it on, None: none yet. ``hooked``: it reports itself. ``trains``: it
    has torch mapped and is not a launcher; ``asked_s`` is when that is checked next. ``stale``: it outlived its rank.
    """

    pid: int
    parent: int
    started: int
    variables: dict[str, str]
    identity: Identity
    launch: tuple[str, ...]
    cohort: tuple[str, ...]
    elastic: bool
    cgroup: Cgroup
    met_s: float
    device: int | None = None
    hooked: bool = False
    trains: bool = False
    asked_s: float = 0.0
    stale: bool = False

    @property
    def certain(self) -> bool:
        """Whether it holds a GPU or reports itself."""
        return self.device is not None or self.hooked

    @property
    def key(self) -> RankKey:
        """The rank, attempt and job that it names."""
        return self.identity.job, self.identity.attempt, self.identity.rank


@dataclass
class Census:
    """The members by pid, as of the last scan.

    ``listed`` are all processes, ``unreadable`` those whose environment this agent may not read. ``refusal`` says what
    was wrong with the last rejected environment. ``changes`` grows whenever a member comes, goes or is reparented;
    ``whole``: every process has been scanned once.
    """

    files: ProcessFiles
    drops: Drops
    members: dict[int, MemberProcess] = field(default_factory=dict)
    unreadable: set[int] = field(default_factory=set)
    refusal: str = ""
    listed: set[int] = field(default_factory=set)
    changes: int = 0
    whole: bool = False
    _seen: set[int] = field(default_factory=set)
    _young: dict[int, int] = field(default_factory=dict)
    _again: deque[int] = field(default_factory=deque)
    _refused: set[int] = field(default_factory=set)

    def update_members(self, listed: set[int], urgent: Collection[int], now_s: float) -> None:
        """Update the members from the list of processes; ``urgent`` ones are read each time."""
        self.listed = listed
        self._seen &= listed
        self._refused &= listed
        self.unreadable &= listed
        for gone in [pid for pid in self.members if pid not in listed]:
            self._leave(gone)
        young = [pid for pid in self._young if pid in listed]
        new = listed - self._seen
        chosen = [pid for pid in urgent if pid in listed and pid not in self.members]
        chosen += [pid for pid in sorted(new)[:INSPECTED_MAX] if pid not in urgent]
        again = self._next_again()
        self._young = {
            **{pid: self._young[pid] - 1 for pid in young if self._young[pid] > 1},
            **{pid: YOUNG_LOOKS for pid in chosen if self.whole and pid in new},
        }
        self.whole = self.whole or len(new) <= INSPECTED_MAX
        for pid in dict.fromkeys([*chosen, *young, *again]):
            self._seen.add(pid)
            self._inspect(pid, now_s)

    def _next_again(self) -> list[int]:
        if not self._again:
            self._again.extend(sorted(self._seen))
        return [self._again.popleft() for _ in range(min(AGAIN, len(self._again)))]

    def _inspect(self, pid: int, now_s: float) -> None:
        try:
            found = self._read(pid, now_s)
        except PermissionError:
            if pid not in self.unreadable:
                self.unreadable.add(pid)
                self.drops.count("process_environment_unreadable")
            return
        except BadEnvironment as error:
            self.refusal = f"process {pid}: {error}"
            if pid not in self._refused:
                self._refused.add(pid)
                self.drops.count("process_environment_refused")
            found = None
        except OSError:
            self.drops.count("process_unread")
            return
        self.unreadable.discard(pid)
        known = self.members.get(pid)
        if found is None:
            self._leave(pid)
        elif known is None and len(self.members) >= MEMBERS_MAX:
            self.drops.count("processes_over_limit")
        elif known is None or (known.started, known.variables) != (found.started, found.variables):
            self.members[pid] = found
            self.changes += 1
        elif known.parent != found.parent:
            known.parent = found.parent
            self.changes += 1

    def _leave(self, pid: int) -> None:
        if self.members.pop(pid, None) is not None:
            self.changes += 1

    def _read(self, pid: int, now_s: float) -> MemberProcess | None:
        """Return the process as a member; None where it is not one. Raises BadEnvironment, OSError."""
        environ = self.files.environment(pid)
        if environ is not None and len(environ) > ENVIRON_BYTES_MAX:
            raise BadEnvironment(f"an environment of more than {ENVIRON_BYTES_MAX} bytes")
        if environ is None or not may_name_a_rank(environ):
            return None
        before = self.files.stat(pid)
        environ = self.files.environment(pid)
        stat = self.files.stat(pid)
        if environ is None or before is None or stat is None or before.started != stat.started or stat.ended:
            return None  # it exited, and perhaps another has its pid
        found = variables(environ)
        cgroup = parse_cgroup(self.files.cgroup(pid))
        who = identity(found, cgroup.slurm_job)
        if who is None:
            return None
        return MemberProcess(
            pid=pid,
            parent=stat.parent,
            started=stat.started,
            variables=found,
            identity=who,
            launch=launch(found),
            cohort=cohort(found),
            elastic=is_elastic_worker(found),
            cgroup=cgroup,
            met_s=now_s,
        )


# The ranks that were found: what they and their children do while they run, and how they ended.
FAMILY_MAX = 128  # processes per rank: data loaders, compile workers; larger families are not reported
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
HELD = "D"  # uninterruptible sleep: in a driver, or waiting for storage


def rank_rows(
    files: ProcessFiles, ranks: Iterable[TrainingProcess], members: Iterable[MemberProcess]
) -> dict[int, dict[str, float]]:
    """Return each rank's row by device: CPU time and bytes of its process and all descendants.

    Reaped children count in their parent's accounts. A counter is left out if any part of it cannot be read.
    """
    children: dict[int, list[int]] = {}
    for member in members:
        children.setdefault(member.parent, []).append(member.pid)
    found = {}
    for rank in ranks:
        if rank.starting:  # the GPU that it is expected on may be another's
            continue
        family = _family(rank.pid, children)
        stats = [_stat(files, pid) for pid in family[:FAMILY_MAX]]
        own = stats[0]
        if own is None or len(family) > FAMILY_MAX:
            continue
        row = {"rank_blocked_ratio": float(own.state == HELD)}
        row["rank_cpu_seconds_total"] = sum(stat.cpu_ticks for stat in stats if stat is not None) / TICKS_PER_S
        moved = [_moved(files, pid) for pid in family]
        known = [number for number in moved if number is not None]
        if len(known) == len(moved):
            row["rank_io_bytes_total"] = float(sum(known))
        found[rank.device] = row
    return found


def _family(pid: int, children: dict[int, list[int]]) -> Sequence[int]:
    """Return a process and its descendants, a little over FAMILY_MAX at most."""
    family = [pid]
    for member in family:
        if len(family) > FAMILY_MAX:
            break
        family += [child for child in children.get(member, ()) if child not in family]
    return family


def _stat(files: ProcessFiles, pid: int) -> Stat | None:
    try:
        return files.stat(pid)
    except OSError:
        return None


def _moved(files: ProcessFiles, pid: int) -> int | None:
    """Return the bytes a process has read and written; 0 for one that has exited, None if not readable."""
    try:
        return files.io_bytes(pid)
    except OSError:
        return None


EVENTS_QUEUED_MAX = 4_096


@dataclass
class _Running:
    """A process that is a rank, and whether its hook has ever reported."""

    process: TrainingProcess
    started: int
    hooked: bool = False


class Ranks:
    """Publishes the ranks to ``processes`` and watches them; those with a hook are published but not reported.

    Those that are starting are reported only if they fail: the server would keep the GPU that they are expected on.
    """

    def __init__(
        self,
        processes: TrainingProcesses,
        drops: Drops,
        files: ProcessFiles,
        hooked_pids: Callable[[], set[int]],
        wake: Callable[[], None],
        now_s: Callable[[], float],
        watch: Callable[[Ended], ExitReporter],
    ) -> None:
        self._processes = processes
        self._drops = drops
        self._files = files
        self._hooked_pids = hooked_pids
        self._wake = wake
        self._now_s = now_s
        self._watcher = watch(self._end)
        self._lock = threading.Lock()  # guards the following attributes
        self._running: dict[int, _Running] = {}
        self._ended: set[int] = set()  # pids, since the last scan
        self._departed: list[Rank] = []  # not yet included in a frame for the last time
        self._events: list[Event] = []

    def set_ranks(self, chosen: Sequence[tuple[TrainingProcess, int]], listed: Collection[int]) -> None:
        """Set the ranks: pids with their start times in clock ticks; ``listed`` are all existing pids."""
        started = {process.pid: started for process, started in chosen}
        with self._lock:
            left = [
                pid
                for pid, item in self._running.items()
                if started.get(pid) != item.started and pid in listed  # exits are reported by the watcher
            ]
            for pid in left:
                del self._running[pid]
            known = set(self._running)
        for pid in left:
            self._watcher.forget(pid)
            self._drops.count("ranks_reconsidered")
        for process, ticks in chosen:
            if process.pid not in known:
                self._follow(process, ticks)
        with self._lock:
            for process, _ in chosen:
                if process.pid in self._running:
                    self._running[process.pid].process = process
            self._publish()

    def notice(self) -> None:
        """Note which ranks' hooks report, and exits that no descriptor announced."""
        self._watcher.poll()
        hooked = self._hooked_pids()
        with self._lock:
            for pid in hooked & self._running.keys():
                self._running[pid].hooked = True

    def ended(self) -> set[int]:
        """Return the processes that exited since the last call."""
        with self._lock:
            ended, self._ended = self._ended, set()
        return ended

    def happened(self) -> Observed:
        """Return the ranks without a hook, those that exited since the last call once more, and their exits."""
        with self._lock:
            events, self._events = self._events, []
            ranks, self._departed = self._departed, []
            ranks += [
                _rank(item.process) for item in self._running.values() if not (item.hooked or item.process.starting)
            ]
        ranks.sort(key=lambda rank: (rank.job, rank.attempt, rank.rank, rank.pid))
        self._drops.count("ranks_over_limit", len(ranks) - RANKS_MAX)
        return Observed(ranks=ranks[:RANKS_MAX], events=events)

    def close(self) -> None:
        """Stop watching all processes."""
        self._watcher.close()

    def _follow(self, process: TrainingProcess, started: int) -> None:
        pid = process.pid
        stat = self._files.stat(pid)
        if stat is None or stat.started != started or stat.ended:
            return
        with self._lock:
            self._running[pid] = _Running(process, started)
        try:
            self._watcher.watch(pid)
        except ProcessLookupError:
            self._end(pid, None)
            return
        stat = self._files.stat(pid)
        if stat is not None and stat.started != started:  # another process has the pid, and is the one watched
            self._watcher.forget(pid)
            self._end(pid, None)

    def _end(self, pid: int, code: int | None) -> None:
        """Record a process's exit; also called from the watcher's thread."""
        hooked = pid in self._hooked_pids()
        with self._lock:
            item = self._running.pop(pid, None)
            if item is None:
                return
            self._ended.add(pid)
            self._publish()
            if item.hooked or hooked:
                return  # the hook's reader reports it
            if code is None:
                self._drops.count("exit_code_unread")
                return
            process = item.process
            if process.starting and code == 0:
                return
            attributes = {"exit_code": code, "pid": pid, "goodbye": False, **process.who()}
            self._events.append(Event(self._now_s(), "process_exit", process.device, attributes))
            if len(self._events) > EVENTS_QUEUED_MAX:
                del self._events[0]
                self._drops.count("events_over_limit")
            self._departed.append(_rank(process))
            self._drops.count("ranks_over_limit", len(self._departed) - RANKS_MAX)
            del self._departed[:-RANKS_MAX]
        self._wake()

    def _publish(self) -> None:
        running = [item.process for item in self._running.values()]
        self._processes.publish(sorted(running, key=lambda item: (item.job, item.attempt, item.rank)))


def _rank(process: TrainingProcess) -> Rank:
    return Rank(
        job=process.job,
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
        attempt=process.attempt,
        pid=process.pid,
        role=process.role,
    )
