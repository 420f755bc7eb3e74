"""Chooses the rank among the processes that inherited its environment.

Children inherit the environment: a launcher's helpers, data loaders and shells all name a rank. The rank is the process
that holds the GPU or whose hook reports. Where no process of the job does either, it is the topmost process that has
torch's libraries mapped and whose own children were not given another rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from eagle_eye.agent.training_hook.sender import Identity

ANCESTORS_MAX = 64  # a longer chain of parents is not one of launchers and workers

RankKey = tuple[str, int, int]  # job, attempt, rank


@dataclass(frozen=True)
class Candidate:
    """A process whose environment names a rank.

    ``parent`` is its parent's pid, ``started`` the kernel's start time in clock ticks since boot. ``launch`` is equal
    for a rank and its own children. ``certain``: it holds a GPU, or its hook reports. ``trains``: it has torch's
    libraries mapped and its command line is not a launcher's.
    """

    pid: int
    parent: int
    started: int
    identity: Identity
    launch: tuple[str, ...]
    certain: bool = False
    trains: bool = False

    @property
    def key(self) -> RankKey:
        """The rank, attempt and job that it names."""
        return self.identity.job, self.identity.attempt, self.identity.rank


@dataclass(frozen=True)
class ChosenRanks:
    """The ranks, by job, attempt and rank; and the processes that claim a rank already held by an older one."""

    ranks: dict[RankKey, Candidate]
    conflicts: tuple[Candidate, ...]


def choose(candidates: Mapping[int, Candidate], certain_jobs: Collection[str]) -> ChosenRanks:
    """Return which candidates, by pid, are ranks. The older of two that claim one rank gets it.

    In ``certain_jobs`` some process has held a GPU or reported: only such processes count there.
    """
    launchers = _launchers(candidates)
    ranks: dict[RankKey, Candidate] = {}
    conflicts: list[Candidate] = []
    for candidate in sorted(candidates.values(), key=lambda item: (item.started, item.pid)):
        if candidate.certain:
            chosen = not any(_same_work(above, candidate) for above in ancestors(candidate, candidates))
        elif candidate.trains and candidate.identity.job not in certain_jobs and candidate.pid not in launchers:
            chosen = not any(above.trains and _is_child(above, candidate) for above in ancestors(candidate, candidates))
        else:
            continue
        if chosen and ranks.setdefault(candidate.key, candidate) is not candidate:
            conflicts.append(candidate)
    return ChosenRanks(ranks, tuple(conflicts))


def ancestors(candidate: Candidate, candidates: Mapping[int, Candidate]) -> Iterable[Candidate]:
    """Yield the chain of parents, as long as they are candidates and older than their child."""
    for _ in range(ANCESTORS_MAX):
        above = candidates.get(candidate.parent)
        if above is None or above.started > candidate.started or above is candidate:
            return
        yield above
        candidate = above


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
