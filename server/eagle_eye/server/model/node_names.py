"""Maps a scheduler's node names to ours, which may differ in case or domain. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class NodeNames:
    """Our nodes' names, looked up by a scheduler's.

    Two names match when they are equal except for case, or one is the other without its domain. If several match, the
    result is ambiguous and none is returned.
    """

    def __init__(self, ours: Iterable[str]) -> None:
        self._whole: dict[str, str] = {}
        self._bare: dict[str, set[str]] = {}
        for name in ours:
            self._whole[name.casefold()] = name
            self._bare.setdefault(_bare(name), set()).add(name)

    def ours(self, theirs: str) -> str | None:
        """Return our name of the scheduler's node, None if no agent or exporter of it was ever heard."""
        name = self._whole.get(theirs.casefold())
        if name is not None:
            return name
        alike = self._bare.get(_bare(theirs), set())
        fitting = [one for one in alike if "." not in theirs or "." not in one]
        return fitting[0] if len(fitting) == 1 else None


def _bare(name: str) -> str:
    return name.casefold().partition(".")[0]
