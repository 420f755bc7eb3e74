"""Finds the ranks that hold a job up from the flight-recorder dumps of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from eagle_eye.detectors.signs.flight_record import ReducedDump
from eagle_eye.detectors.signs.flight_waits import Wait, Waits, spelt
from eagle_eye.detectors.types import Blind

__all__ = ["Kind", "StuckRanks", "Wait", "analyse"]

Kind = Literal["behind", "missing", "desynchronised", "symmetric"]
WITHOUT_DUMP_RATIO = 0.5  # of the ranks: with more dumps missing, a missing dump does not identify a culprit


@dataclass(frozen=True, slots=True)
class StuckRanks:
    """The outcome of the analysis: which ranks hold the job up, and how.

    ``kind``: "behind", the culprits have enqueued fewer operations than the ranks that wait for them; "missing", the
    culprits left no dump, or none that shows the group; "desynchronised", ranks issued different operations at the same
    position, or wait for each other in a cycle: the user's program is to blame and no culprit is named; "symmetric",
    all ranks are in the same operation: network and NVLink evidence must decide. ``waits`` are the operations that show
    it, most ranks first (desynchronised and symmetric: one per operation that ranks disagree on or wait in).
    ``without_dump`` are ranks that some group expects but that left no dump.
    """

    kind: Kind
    culprits: tuple[int, ...]
    waits: tuple[Wait, ...]
    without_dump: tuple[int, ...]
    recordings: int
    summary: str

    @property
    def certain(self) -> bool:
        """Whether no missing dump could reveal another culprit."""
        return not self.without_dump

    @property
    def hidden(self) -> str:
        """What the dumps cannot show besides the culprits, and what would show it; "" where no culprit is named."""
        if not self.culprits:
            return ""
        waiting = sorted({rank for wait in self.waits for rank in wait.waiting} - set(self.culprits))
        return (
            f"these dumps can't tell a second culprit that went on enqueuing from the {len(waiting)} ranks that wait:"
            " XIDs, the GPUs' activity and power, link counters and stacks of the processes would"
        )

    @property
    def application(self) -> bool:
        """Whether the user's program is to blame rather than a node."""
        return self.kind == "desynchronised"


def analyse(recordings: Sequence[ReducedDump], unread: Collection[int] = ()) -> StuckRanks:
    """Return what holds the job up, given dumps taken at one moment, one per rank.

    ``unread`` are ranks that left a dump which cannot be used: it neither clears nor accuses them.

    Method: each rank numbers the collectives of a process group as it enqueues them; a rank waiting in number p waits
    for every member that has enqueued fewer than p (as in PyTorch's own analyser of these dumps, and "collective launch
    lower than the group" of Aegis, Dong et al. NSDI 2025). Ranks belong to many groups, and a victim in one is a
    suspect in the next, so wait chains are followed to their ends: a rank that others wait for and that waits for no
    rank is a culprit. An operation that every member has reached and none has completed can itself end a chain
    (symmetric), unless one of its members is held up elsewhere; a single rank that has not completed what its peers
    have is stuck by itself. Sends and receives are matched pair by pair: by number where both ends number alike (groups
    of two, or pairs whose numbers show it), else by how many of each are open. Collectives at the same number must
    agree in operation and types, and in size where the operation requires it. A rank without a dump is named only if no
    rank is seen to be behind.

    Linear in ranks, group members and open operations, except for one sort by position per group. Raises Blind if
    nothing was recorded, no operation is open, no dump says which ranks form a group, no rank waits for anything, or
    the chains lead to ranks whose dump cannot be used, or to ranks without a dump and more than half have none.

    Cannot see: a second culprit that went on enqueuing, for instance because only its GPU hangs (it looks like a
    waiting rank); what a rank does outside collectives (data loading, checkpoint and deadlock all look like "behind");
    which end of a broken link is to blame (symmetric). Dumps of different moments look like ranks that are behind. Old
    dumps that contain only open operations and no group status cannot tell a rank that completed its part from one that
    never came.
    """
    if not any(recording.collectives or recording.exchanges or recording.enqueued for recording in recordings):
        raise Blind("nothing was recorded: set TORCH_FR_BUFFER_SIZE (older: TORCH_NCCL_TRACE_BUFFER_SIZE) above 0")
    if not any(recording.unfinished for recording in recordings):
        raise Blind("no rank has an unfinished operation: nothing was waited for when the dumps were written")
    conclusion = _Conclusion(Waits(recordings), unread)
    finding = conclusion.finding()
    if finding is None:
        raise Blind(conclusion.unclear())
    return finding


class _Conclusion:
    """Interprets a wait graph."""

    def __init__(self, waits: Waits, unread: Collection[int]) -> None:
        self._waits = waits
        self._unread = frozenset(unread)
        self._leads_to: set[int] = set()  # ranks without a usable dump, as the wait chains end there

    def finding(self) -> StuckRanks | None:
        """Return where the wait chains end; None if no wait explains the stop."""
        culprits: set[int] = set()
        crossed: set[int] = set()
        split: list[Wait] = []
        shared: list[Wait] = []
        for end in self._waits.graph.ends():
            inside = set(end)
            ranks = [self._waits.rank_at[node] for node in end if node in self._waits.rank_at]
            # A wait from outside a cycle does not tell which member of the cycle is to blame.
            accused = [r for r in ranks if any(len(end) == 1 or node in inside for node in self._waits.accusers[r])]
            guilty = [rank for rank in accused if rank not in self._waits.blocked]
            split += [self._waits.split[node] for node in end if node in self._waits.split]
            if guilty:
                culprits.update(guilty)
            elif accused:
                crossed.update(accused)
            else:
                shared += [self._waits.shared[node] for node in end if node in self._waits.shared]
        if split or crossed:
            return self._desynchronised(split, crossed)
        # Prefer ranks seen to be behind; of ranks without a dump it is only known that others wait for them.
        if seen := culprits - self._waits.silent:
            return self._held_up(seen)
        if culprits:
            self._leads_to = culprits
            return self._held_up(culprits) if self._enough_dumps() and not culprits & self._unread else None
        return self._symmetric(shared) if shared else None

    def _enough_dumps(self) -> bool:
        return len(self._waits.silent) <= WITHOUT_DUMP_RATIO * len(self._waits.ranks)

    def _held_up(self, culprits: set[int]) -> StuckRanks:
        waits = {id(wait): wait for rank in culprits for wait in self._waits.absent_in[rank]}
        shown = _most_first(
            Wait(w.group, w.sequence, w.operation, w.waiting, tuple(r for r in w.absent if r in culprits))
            for w in waits.values()
        )
        unseen = culprits - self._waits.placed
        named = tuple(sorted(culprits))
        first = shown[0]
        how = (
            "enqueued less than the others" if not self._waits.silent else "enqueued less than others that left a dump"
        )
        if unseen:
            how = "left no dump" if unseen <= self._waits.silent else "never came to it"
        return self._found(
            "missing" if unseen else "behind",
            named,
            shown,
            f"{spelt(named)} {how}: {len(first.waiting)} ranks wait for {spelt(first.absent)} in {_place(first)}",
        )

    def _desynchronised(self, split: list[Wait], crossed: set[int]) -> StuckRanks:
        if split:
            shown = _most_first(split)
            first = shown[0]
            what = f"ranks disagree at number {first.sequence} of group {first.group}: {first.operation}"
        else:
            waits = {id(wait): wait for rank in crossed for wait in self._waits.absent_in[rank]}
            shown = _most_first(waits.values())
            what = f"{spelt(sorted(crossed))} wait for each other, each in another operation"
        return self._found("desynchronised", (), shown, f"{what}: the program's fault, no node's")

    def _symmetric(self, shared: list[Wait]) -> StuckRanks:
        heads = Counter(
            (recording.unfinished[0].group, recording.unfinished[0].sequence)
            for recording in self._waits.recordings.values()
            if recording.unfinished
        )
        # The operation at the head of most ranks' queues is the one that does not complete; the others queue behind it.
        shown = tuple(
            sorted(shared, key=lambda w: (-heads[w.group, w.sequence], -len(w.waiting), w.group.name, w.sequence))
        )
        where = f"all {len(shown[0].waiting)} ranks of {_place(shown[0])} are in it and none gets out"
        return self._found("symmetric", (), shown, f"{where}: nobody to name; network and NVLink evidence must decide")

    def _found(self, kind: Kind, culprits: tuple[int, ...], waits: tuple[Wait, ...], summary: str) -> StuckRanks:
        return StuckRanks(
            kind, culprits, waits, tuple(sorted(self._waits.silent)), len(self._waits.recordings), summary
        )

    def unclear(self) -> str:
        """Return why there is no finding."""
        if not self._waits.groups_known:
            return "no dump says which ranks form the groups in which operations are open"
        if unread := self._leads_to & self._unread:
            return f"what the others wait for leads to {spelt(sorted(unread))}, whose dump cannot be used"
        if not self._enough_dumps():
            silent = sorted(self._waits.silent)
            return (
                f"{len(silent)} of {len(self._waits.ranks)} ranks left no dump ({spelt(silent)}),"
                " and what the others wait for leads to them"
            )
        return "no rank waits for another: what is open on some has completed on the others"


def _most_first(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    return tuple(sorted(waits, key=lambda wait: (-len(wait.waiting), wait.group.name, wait.sequence)))


def _place(wait: Wait) -> str:
    return f"{wait.operation}, number {wait.sequence} of group {wait.group}"
