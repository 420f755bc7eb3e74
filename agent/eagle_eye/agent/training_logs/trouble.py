"""Something that went wrong, named for a while after it was last seen. Pure."""

from __future__ import annotations

NAMED_S = 60.0  # long enough to be read, short enough to be gone when it is over


class LogTrouble:
    """What a collector's problem says of one kind of trouble; times are of the agent's monotonic clock."""

    def __init__(self) -> None:
        self._text = ""
        self._until_s = 0.0

    def note(self, text: str, now_s: float) -> None:
        """Name this from now on."""
        self._text, self._until_s = text, now_s + NAMED_S

    def text(self, now_s: float) -> str:
        """Return what is to be named; "" when it is over."""
        return self._text if now_s < self._until_s else ""
