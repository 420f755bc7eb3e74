"""Chooses the rank among the processes that inherited its environment.

Children inherit the environment: a launcher's helpers, data loaders and shells all name a rank. The rank is the process
that holds the GPU or whose hook reports. Until one does, it is the process that the launcher itself made this rank;
where no process of the job has ever held a GPU, after a while, the topmost that has torch's libraries mapped. Neither
may have children that were given another rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from eagle_eye.agent.training_hook.sender import Identity

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
