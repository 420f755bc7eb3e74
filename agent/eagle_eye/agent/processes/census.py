"""Tracks, at low cost, which of this host's processes name a rank in their environment.

Each process's environment is read when the process is new; again at the next scans while it is young, since between
fork and exec a child shows its parent's; and from time to time, a few per scan, in case the process called exec or its
pid was reused. Touches: /proc.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.processes.cgroup import Cgroup, parse
from eagle_eye.agent.processes.choice import RankKey
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
