"""Which of our nodes a scheduler means: names that differ in case, or by their domain. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class NodeNames:
    """Our nodes' names, found by a scheduler's.

    Two names mean one node when they are equal but for case, or one is the other without its domain. Where that
    leaves several, none is meant.
    """

    def __init__(self, ours: Iterable[str]) -> None:
        self._whole: dict[str, str] = {}
        self._bare: dict[str, set[str]] = {}
        for name in ours:
            self._whole[name.casefold()] = name
            self._bare.setdefault(_bare(name), set()).add(name)

    def ours(self, theirs: str) -> str | None:
        """Return our name of the scheduler's node, None where no agent or exporter of it was ever heard."""
        name = self._whole.get(theirs.casefold())
        if name is not None:
            return name
        alike = self._bare.get(_bare(theirs), set())
        fitting = [one for one in alike if "." not in theirs or "." not in one]
        return fitting[0] if len(fitting) == 1 else None


def _bare(name: str) -> str:
    return name.casefold().partition(".")[0]
