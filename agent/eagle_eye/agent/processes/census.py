"""Tracks, at low cost, which of this host's processes name a rank in their environment, and which are ranks.

Each process's environment is read when the process is new; again at the next scans while it is young, since between
fork and exec a child shows its parent's; and from time to time, a few per scan, in case the process called exec or its
pid was reused. Touches: /proc.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from eagle_eye.agent.loop.collector import Drops
from eagle_eye.agent.processes.environment import (
    BadEnvironment,
    cohort,
    identity,
    is_elastic_worker,
    launch,
    may_name_a_rank,
    variables,
)
from eagle_eye.agent.processes.process_files import ENVIRON_BYTES_MAX, ProcessFiles
from eagle_eye.agent.training_hook.sender import Identity

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


def parse(text: str) -> Cgroup:
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

    def look(self, listed: set[int], urgent: Collection[int], now_s: float) -> None:
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
        cgroup = parse(self.files.cgroup(pid))
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
