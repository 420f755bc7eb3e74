"""Which slot of a shard may be written next, and which step is whole on all. Pure.

A rank writes each step into another slot. A slot may be written again once what it holds is not needed: it is older
than the steps that are kept, or will never be whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from eagle_eye.checkpoint.messages import Agreed, CopyInfo


@dataclass
class Slots:
    """The slots of one rank's shards in one store: what each holds. ``granted`` is the one that is written now."""

    holds: list[CopyInfo | None]
    granted: int | None = None

    def copy_of(self, step: int, plan: str | None = None) -> int | None:
        """Return the slot that holds a whole copy of the step, None where none does."""
        for number, copy in enumerate(self.holds):
            if copy is not None and copy.step == step and (plan is None or copy.plan == plan):
                return number
        return None

    @property
    def copies(self) -> list[CopyInfo]:
        """The whole copies, oldest step first."""
        return sorted((copy for copy in self.holds if copy is not None), key=lambda copy: copy.step)

    def grant(self, needed: Collection[int]) -> int | None:
        """Return the slot that is to be written next, None while one is or while all hold ``needed`` steps.

        Its copy is gone from then on. Empty slots go first, then the oldest step.
        """
        if self.granted is None:
            self.granted = self.take(needed)
        else:
            return None
        return self.granted

    def take(self, needed: Collection[int]) -> int | None:
        """Return a slot that may be written besides the granted one, None where all hold ``needed`` steps.

        Its copy is gone from then on.
        """
        free = [number for number, copy in enumerate(self.holds) if copy is None and number != self.granted]
        old = [n for n, copy in enumerate(self.holds) if copy is not None and copy.step not in needed]
        old.sort(key=self._step)
        chosen = next(iter(free + old), None)
        if chosen is not None:
            self.holds[chosen] = None
        return chosen

    def written(self, slot: int, copy: CopyInfo) -> None:
        """The granted slot holds a whole copy. Raises ValueError where another slot was granted, or none."""
        if slot != self.granted:
            raise ValueError(f"slot {slot} was written, and slot {self.granted} was to be")
        self.granted = None
        self.holds[slot] = copy

    def give_back(self) -> None:
        """The granted slot was not written after all."""
        self.granted = None

    def drop(self, steps: Iterable[int]) -> None:
        """The copies of these steps are gone."""
        gone = set(steps)
        self.holds = [None if copy is not None and copy.step in gone else copy for copy in self.holds]

    def _step(self, number: int) -> int:
        copy = self.holds[number]
        return -1 if copy is None else copy.step


@dataclass
class Needed:
    """Which steps of a job a store must not overwrite, by what the coordinator said of them."""

    keep: int
    whole: set[int] = field(default_factory=set)
    void: set[int] = field(default_factory=set)
    persisting: int | None = None

    @property
    def newest_whole(self) -> int | None:
        """The newest step that is whole on all, None before the first."""
        return max(self.whole, default=None)

    def agree(self, word: Agreed) -> None:
        """Take in what the coordinator said."""
        if word.whole is not None:
            self.whole.add(word.whole)
            self.whole = set(sorted(self.whole)[-self.keep :])
            self.void = {step for step in self.void if step > word.whole}
        if word.void is not None:
            self.void.add(word.void)
        if word.persist is not None:
            self.persisting = word.persist
        if word.persisted is not None and word.persisted == self.persisting:
            self.persisting = None

    def awaits(self, step: int) -> bool:
        """Whether a step may still become the newest one that is whole."""
        return step not in self.void and (self.newest_whole is None or step > self.newest_whole)

    def among(self, steps: Iterable[int]) -> set[int]:
        """Return those of the steps that are needed: kept, on their way to storage, or not yet known to be whole."""
        newest = -1 if self.newest_whole is None else self.newest_whole
        return {
            step
            for step in steps
            if step in self.whole or step == self.persisting or (step > newest and step not in self.void)
        }


@dataclass
class Agreement:
    """The coordinator's knowledge of one attempt: whose shards of which step are whole in all copies."""

    ranks: frozenset[int]
    persist_every: int = 0
    persisted: int = 0
    persisting: int | None = None
    whole: int = -1
    copies: dict[int, dict[int, CopyInfo]] = field(default_factory=dict)
    _void: set[int] = field(default_factory=set)

    def copied(self, copy: CopyInfo) -> list[Agreed]:
        """Return what to tell all stores now that all copies of a shard are whole.

        A rank that has come to a later step without an earlier one will not bring that any more.
        """
        if copy.step <= self.whole or copy.step in self._void:
            return []
        mine = self.copies.setdefault(copy.step, {})
        mine[copy.rank] = copy
        if self.ranks - mine.keys():
            late = [step for step, ranks in self.copies.items() if step < copy.step and copy.rank not in ranks]
            return [word for step in late for word in self.missed(step)]
        self.whole = copy.step
        self._void = {step for step in self._void if step > copy.step}
        persist = copy.step if self._due(copy.step) else None
        kept = {copy.step, self.persisting}
        if persist is not None:
            self.persisting = persist
        self.copies = {step: ranks for step, ranks in self.copies.items() if step > copy.step or step in kept}
        return [Agreed(0, whole=copy.step, persist=persist)]

    def missed(self, step: int) -> list[Agreed]:
        """Return what to tell all stores now that a shard of the step will never come."""
        if step <= self.whole or step in self._void:
            return []
        self._void.add(step)
        self.copies.pop(step, None)
        return [Agreed(0, void=step)]

    def finished_persisting(self, step: int) -> None:
        """A step is on storage, or will not be; the next one may go there."""
        if self.persisting == step:
            self.persisted, self.persisting = max(step, self.persisted), None
            self.copies = {number: ranks for number, ranks in self.copies.items() if number > self.whole}

    def _due(self, step: int) -> bool:
        every = self.persist_every
        return every > 0 and self.persisting is None and step // every > self.persisted // every
