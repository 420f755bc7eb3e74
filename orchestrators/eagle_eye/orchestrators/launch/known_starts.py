"""Known start durations of this job, and the limit for the next one. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

KNOWN_MARGIN = 3.0  # times the longest known start


class KnownStarts(msgspec.Struct, frozen=True):
    """The longest start of this job that led to a step, from the beginning and from a checkpoint; None: none did.

    ``nodes`` are those that took part in one.
    """

    nodes: frozenset[str] = frozenset()
    fresh_s: float | None = None
    resumed_s: float | None = None

    @property
    def any_known(self) -> bool:
        """Whether a start of this job was ever seen to finish, so that another one's finish would be seen."""
        return self.fresh_s is not None or self.resumed_s is not None

    @property
    def longest_s(self) -> float:
        """Return the longest known start; 0 where there is none."""
        return max(self.fresh_s or 0.0, self.resumed_s or 0.0)

    def after(self, members: Iterable[str], took_s: float, *, resumed: bool) -> KnownStarts:
        """Return a copy with one more start added."""
        nodes = self.nodes | frozenset(members)
        if resumed:
            return KnownStarts(nodes, self.fresh_s, max(took_s, self.resumed_s or 0.0))
        return KnownStarts(nodes, max(took_s, self.fresh_s or 0.0), self.resumed_s)

    def took_s(self, members: Iterable[str], *, resumed: bool) -> float | None:
        """Return the longest known start; None where not all of these nodes have started the job in the same way.

        Loading a checkpoint may take longer than starting from scratch.
        """
        return (self.resumed_s if resumed else self.fresh_s) if self.nodes.issuperset(members) else None

    def limit_s(self, members: Iterable[str], least_s: float, most_s: float, *, resumed: bool) -> float:
        """Return after how long a start is checked: before ``most_s`` only where a similar one is known."""
        took_s = self.took_s(members, resumed=resumed)
        return most_s if took_s is None else min(most_s, max(least_s, KNOWN_MARGIN * took_s))
