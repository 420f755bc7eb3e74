"""Decides which slot of a shard to write next, which steps are whole on all ranks, and which of them to keep. Pure.

A rank writes each step into another slot. A slot may be reused once its step is not needed: it is not kept, or will
never be whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from statistics import median_low

from eagle_eye.checkpoint.messages import Agreed, CopyInfo, KeptStep
from eagle_eye.checkpoint.shared_memory import SPACED
from eagle_eye.schema.checkpoint_files import has_all_ranks

# Chooses how often ranks capture a step, alike on all, by how many recent captures became whole.
#
# A step is whole only where every rank has captured it. Where copies take longer than a step, a rank without a free
# slot skips one, and ranks may skip different steps, so that none ever becomes whole. Fewer captures, made by all
# ranks, become whole more often.
LOOK_BACK = 8
SHRINK_AFTER = 32  # captures that all became whole
SETTLING = 4  # captures that were in progress when the interval changed
HEARD_WITHIN = 4  # missed steps, within which every rank has reported whether it missed the one before them
EVERY_MAX = 256


@dataclass
class CaptureInterval:
    """A rank makes the last of each ``every`` captures. Doubles when fewer than half of them become whole.

    Steps that all ranks skip do not count as lost: they capture the next one together. Nor do steps while a rank's
    store is unavailable. It is a power of two: captures due at the longer of two intervals are also due at the shorter
    one, so ranks that switch at different steps still share some.
    """

    ranks: frozenset[int]
    every: int = 1
    _unsettled: int = 0
    _judged_step: int = -1
    _missed_by: dict[int, set[int]] = field(default_factory=dict)
    _heard: dict[int, int] = field(default_factory=dict)
    _outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=SHRINK_AFTER))

    def heard(self, rank: int, step: int) -> None:
        """Record that a rank's store has reported on a step."""
        self._heard[rank] = max(step, self._heard.get(rank, -1))

    def whole(self) -> None:
        """Record that a captured step has become whole."""
        self._came_out(whole=True)

    def missed(self, step: int, rank: int | None) -> None:
        """Record that a step will not become whole: the rank has not captured it, or an unknown one (None)."""
        if rank is not None:
            self.heard(rank, step)
        if step <= self._judged_step:
            return
        self._missed_by.setdefault(step, set()).update(() if rank is None else (rank,))
        if len(self._missed_by) > HEARD_WITHIN:
            judged = self._judged_step = min(self._missed_by)
            missed_by_all = self._missed_by.pop(judged) >= self.ranks
            if not missed_by_all and all(self._heard.get(one, -1) >= judged for one in self.ranks):
                self._came_out(whole=False)

    def _came_out(self, *, whole: bool) -> None:
        if self._unsettled:
            self._unsettled -= 1
            return
        self._outcomes.append(whole)
        recent = list(self._outcomes)[-LOOK_BACK:]
        if len(recent) == LOOK_BACK and 2 * sum(recent) < LOOK_BACK and self.every < EVERY_MAX:
            self._change(2 * self.every)
        elif len(self._outcomes) == SHRINK_AFTER and all(self._outcomes) and self.every > 1:
            self._change(self.every // 2)

    def _change(self, every: int) -> None:
        self.every, self._unsettled = every, SETTLING
        self._outcomes.clear()


# Chooses which whole steps to keep: the newest, and some older ones.
#
# Most faults are detected at once, so the newest step is good to resume from. A diverging loss or silent corruption is
# detected after minutes: by then every step since the onset may be damaged.
def kept_of(whole: Iterable[int], captured_s: Mapping[int, float], keep: int, reach_s: float) -> set[int]:
    """Return those of the whole steps that are kept: the ``keep`` newest, and with a ``reach_s`` at most two more.

    These are the newest step that is ``reach_s`` older than the newest of all, and the one after it, which will take
    its place. That was among the newest when the other one had just become old enough: so what reaches back is less
    than twice ``reach_s`` old, where two newest are kept and training did not pause for longer.
    A step without a time in ``captured_s`` is none of the two.
    """
    steps = sorted(whole)
    dated = [step for step in steps if step in captured_s]
    newest = set(steps[-keep:])
    if reach_s <= 0 or not dated:
        return newest
    until_s = captured_s[dated[-1]] - reach_s
    reaching = max((place for place, step in enumerate(dated) if captured_s[step] <= until_s), default=0)
    return newest | set(dated[reaching : reaching + SPACED])


def kept_from_before(
    plan: str,
    copies: Iterable[CopyInfo],
    known: Collection[int],
    resumed: tuple[int, int],
    reach_s: float,
) -> tuple[KeptStep, ...]:
    """Return what an attempt of this plan keeps of earlier ones, oldest first: the resumed step and what reaches back.

    ``copies`` are those of all nodes, ``resumed`` is the step with the attempt that captured it. Of the steps before,
    those count that stores of the last attempt keep (``known``): a node that was away may hold some of a course of
    training that nobody went on with.
    """
    last, attempt = resumed
    attempt_of = {last: attempt}
    ranks_s: dict[tuple[int, int], dict[int, float]] = {}
    for copy in copies:
        if copy.plan != plan or copy.step > last or (copy.step < last and copy.step not in known):
            continue
        if copy.step < last:
            attempt_of[copy.step] = max(copy.attempt, attempt_of.get(copy.step, copy.attempt))
        ranks_s.setdefault((copy.step, copy.attempt), {})[copy.rank] = copy.captured_s
    captured_s = {
        step: median_low(ranks_s[step, attempt].values())
        for step, attempt in attempt_of.items()
        if has_all_ranks(plan, ranks_s.get((step, attempt), ()))
    }
    kept = sorted(kept_of(captured_s, captured_s, 1, reach_s))
    return tuple(KeptStep(step, attempt_of[step], captured_s[step]) for step in kept)


VOID_SAID_MAX = 64  # far more than a store holds copies of


@dataclass
class Slots:
    """The slots of one rank's shards in one store, and their contents.

    ``granted`` is the one that its rank, or another store, writes now; ``filling`` are those that this store fills.
    """

    holds: list[CopyInfo | None]
    granted: int | None = None
    filling: set[int] = field(default_factory=set)

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
        """Return the slot to write next, None while one is being written or all hold ``needed`` steps.

        Its copy is dropped. Empty slots go first, then the oldest step.
        """
        if self.granted is not None:
            return None
        self.granted = self._chosen(needed)
        return self.granted

    def take_slot(self, needed: Collection[int]) -> int | None:
        """Return a slot to fill besides the granted one, None where all hold ``needed`` steps.

        Its copy is dropped, and it is reserved until it is ``filled``.
        """
        chosen = self._chosen(needed)
        if chosen is not None:
            self.filling.add(chosen)
        return chosen

    def written(self, slot: int, copy: CopyInfo) -> None:
        """Record that the granted slot holds a whole copy. Raises ValueError if another slot was granted, or none."""
        if slot != self.granted:
            raise ValueError(f"slot {slot} was written, and slot {self.granted} was to be")
        self.granted = None
        self.holds[slot] = copy

    def filled(self, slot: int, copy: CopyInfo | None) -> None:
        """Record that a taken slot holds a whole copy; None: it holds nothing."""
        self.filling.discard(slot)
        self.holds[slot] = copy

    def give_back(self) -> None:
        """Return the granted slot unwritten."""
        self.granted = None

    def remove(self, slot: int) -> None:
        """Remove a slot; those after it are renumbered."""
        del self.holds[slot]
        if self.granted is not None:
            self.granted = None if self.granted == slot else self.granted - (self.granted > slot)
        self.filling = {number - (number > slot) for number in self.filling if number != slot}

    def drop(self, steps: Iterable[int]) -> None:
        """Drop the copies of these steps."""
        gone = set(steps)
        self.holds = [None if copy is not None and copy.step in gone else copy for copy in self.holds]

    def available(self, needed: Collection[int]) -> list[int]:
        """Return the slots that are not being written and hold none of the ``needed`` steps."""
        free = [number for number in range(len(self.holds)) if number != self.granted and number not in self.filling]
        return [number for number in free if (copy := self.holds[number]) is None or copy.step not in needed]

    def _chosen(self, needed: Collection[int]) -> int | None:
        chosen = min(self.available(needed), key=lambda number: (self._step(number), number), default=None)
        if chosen is not None:
            self.holds[chosen] = None
        return chosen

    def _step(self, number: int) -> int:
        copy = self.holds[number]
        return -1 if copy is None else copy.step


@dataclass
class Needed:
    """The steps of a job that a store must not overwrite, from the coordinator's messages in any order.

    ``whole`` are the ``keep`` newest, and up to ``spaced`` older ones that reach further back.
    """

    keep: int
    whole: set[int] = field(default_factory=set)
    void: set[int] = field(default_factory=set)
    persisting: int | None = None
    persisted: int = -1
    spaced: int = 0

    @property
    def newest_whole(self) -> int | None:
        """The newest step that is whole on all, None before the first."""
        return max(self.whole, default=None)

    @property
    def known(self) -> tuple[int, ...]:
        """The steps that are whole on all and kept, oldest first."""
        return tuple(sorted(self.whole))

    @property
    def older(self) -> tuple[int, ...]:
        """Those of them that reach further back than the newest, oldest first."""
        return self.known[: -self.keep]

    @property
    def known_void(self) -> tuple[int, ...]:
        """The newest steps that never will be whole."""
        return tuple(sorted(self.void)[-VOID_SAID_MAX:])

    def agree(self, word: Agreed) -> None:
        """Apply the coordinator's message."""
        self.know(word.whole, () if word.void is None else (word.void,))
        if word.persist is not None and word.persist > max(self.persisted, self.persisting or -1):
            self.persisting = word.persist
        if word.persisted is not None:
            self.persisted = max(self.persisted, word.persisted)
            if self.persisting is not None and self.persisting <= self.persisted:
                self.persisting = None

    def know(self, whole: Iterable[int], void: Iterable[int] = ()) -> None:
        """Some steps are whole on all and kept, and some never will be.

        Which older ones are kept is said anew with each newer step: who says none does not know.
        """
        reported = sorted(whole)
        older = reported[: -self.keep] if reported and not self.passed(reported[-1]) else []
        self.whole = {*sorted(self.whole.union(reported))[-self.keep :], *(older or self.older)}
        self.void = {step for step in self.void | set(void) if not self.passed(step)}

    def among(self, steps: Iterable[int], *, persists: bool, slots_missing: int = 0) -> set[int]:
        """Return those of the steps that are needed: kept, or not yet known to be whole.

        And the one that is on its way to storage, where it goes there from here (``persists``). Where slots are missing
        so many fewer are kept, but one: no later step could be captured.
        """
        on_its_way = self.persisting if persists else None
        kept = set(self.known[-max(self.keep + self.spaced - slots_missing, 1) :])
        return {step for step in steps if step in kept or step == on_its_way or self.unresolved(step)}

    def unresolved(self, step: int) -> bool:
        """Whether the step may still become whole."""
        return not self.passed(step) and step not in self.void

    def passed(self, step: int) -> bool:
        """Whether a step as late as this one is whole: then it is, or never will be."""
        newest = self.newest_whole
        return newest is not None and step <= newest


@dataclass
class Agreement:
    """The coordinator's knowledge of one attempt: whose shards of which step are whole in all copies.

    ``whole`` are the steps that are whole on all and kept: the ``keep`` newest, and some that reach ``reach_s`` back by
    when they were captured (``captured_s``). ``interval`` says of how many captures ranks make one.
    A coordinator that was started anew does not know what its predecessor said to be whole: until it has heard every
    rank's store (``unheard``) it calls no step void.
    """

    ranks: frozenset[int]
    keep: int = 1
    persist_every: int = 0
    persisted: int = 0
    persisting: int | None = None
    whole: set[int] = field(default_factory=set)
    void: set[int] = field(default_factory=set)
    unheard: set[int] = field(default_factory=set)
    copies: dict[int, dict[int, CopyInfo]] = field(default_factory=dict)
    reach_s: float = 0.0
    captured_s: dict[int, float] = field(default_factory=dict)
    capture_every: InitVar[int] = 1
    interval: CaptureInterval = field(init=False)
    _passed_by: set[int] = field(default_factory=set)

    def __post_init__(self, capture_every: int) -> None:
        self.interval = CaptureInterval(self.ranks, capture_every)

    @property
    def newest_whole(self) -> int:
        """The newest step that is whole on all, -1 before the first."""
        return max(self.whole, default=-1)

    def word(self, *, void: int | None = None) -> Agreed:
        """Return how things stand, with a step that has just become void. Its attempt is not known here."""
        whole, every = tuple(sorted(self.whole)), self.interval.every
        return Agreed(0, whole, void, self.persisting, self.persisted, capture_every=every)

    def date(self, step: int, captured_s: float) -> None:
        """A step was captured then. Where clocks were set back since earlier ones, so are the times of those."""
        before_s = {one: at_s for one, at_s in self.captured_s.items() if one < step}
        back_s = max(max(before_s.values(), default=captured_s) - captured_s, 0.0)
        self.captured_s.update({one: at_s - back_s for one, at_s in before_s.items()})
        self.captured_s[step] = captured_s

    def heard(self, rank: int, whole: Iterable[int]) -> list[Agreed]:
        """Return what to tell all stores now that one, a rank's, has said which steps it knows to be whole."""
        before = self.newest_whole
        self._know(whole)
        words = [self.word()] if self.newest_whole > before else []
        if self.unheard:
            self.unheard.discard(rank)
            if not self.unheard:
                passed_by, self._passed_by = sorted(self._passed_by), set()
                words += [word for step in passed_by for word in self.missed(step)]
        return words

    def gave_up(self, steps: Iterable[int]) -> None:
        """A store that lacks slots has dropped copies of these steps: they are kept no longer. The newest always is."""
        gone = set(steps) - {self.newest_whole}
        self.whole -= gone
        self.captured_s = {step: at_s for step, at_s in self.captured_s.items() if step not in gone}

    def copied(self, copy: CopyInfo, *, again: bool = False) -> list[Agreed]:
        """Return what to tell all stores now that all copies of a shard are whole.

        A rank that has come to a later step without an earlier one will not bring that any more. ``again``: its store
        has missed what was said of the step.
        """
        self.interval.heard(copy.rank, copy.step)
        if copy.step <= self.newest_whole or copy.step in self.void:
            return self._passed(copy) + (self._repeated(copy.step) if again else [])
        mine = self.copies.setdefault(copy.step, {})
        mine[copy.rank] = copy
        if self.ranks - mine.keys():
            return self._passed(copy)
        if self._due(copy.step):
            self.persisting = copy.step
        for step in sorted(self.copies):
            if self.newest_whole < step < copy.step:
                self.interval.missed(step, None)
        self.interval.whole()
        # Of half the ranks the clocks may be wrong.
        self.date(copy.step, median_low(one.captured_s for one in mine.values()))
        self._know([copy.step])
        return [self.word()]

    def missed(self, step: int, rank: int | None = None, *, again: bool = False) -> list[Agreed]:
        """Return what to tell all stores now that a shard of the step will never come; ``again`` as for ``copied``.

        ``rank`` is the one that said so, None where a later step of one did.
        """
        if step not in self.whole:
            self.interval.missed(step, rank)
        if step <= self.newest_whole or step in self.void:
            return self._repeated(step) if again else []
        if self.unheard:
            self._passed_by.add(step)
            return []
        self.void.add(step)
        self.copies.pop(step, None)
        return [self.word(void=step)]

    def finished_persisting(self, step: int) -> None:
        """A step is on storage, or will not be; the next one may go there."""
        if self.persisting == step:
            self.persisted, self.persisting = max(step, self.persisted), None
            self.copies = {number: ranks for number, ranks in self.copies.items() if number > self.newest_whole}

    def _passed(self, copy: CopyInfo) -> list[Agreed]:
        late = [step for step, ranks in self.copies.items() if step < copy.step and copy.rank not in ranks]
        return [word for step in sorted(late) for word in self.missed(step)]

    def _repeated(self, step: int) -> list[Agreed]:
        return [self.word(void=step if step in self.void else None)]

    def _know(self, whole: Iterable[int]) -> None:
        self.whole = kept_of(self.whole | set(whole), self.captured_s, self.keep, self.reach_s)
        newest = self.newest_whole
        self.captured_s = {step: at for step, at in self.captured_s.items() if step in self.whole or step > newest}
        self.void = {step for step in self.void if step > newest}
        self.copies = {step: ranks for step, ranks in self.copies.items() if step > newest or step == self.persisting}

    def _due(self, step: int) -> bool:
        every = self.persist_every
        return every > 0 and self.persisting is None and step // every > self.persisted // every
