"""A problem that stays reported for a while after it was last seen. Pure."""

from __future__ import annotations

NAMED_S = 60.0  # long enough to be read, short enough to disappear once it is over


class LogTrouble:
    """A collector's text for one kind of problem; times are of the agent's monotonic clock."""

    def __init__(self) -> None:
        self._text = ""
        self._until_s = 0.0

    def note(self, text: str, now_s: float) -> None:
        """Report this text from now on."""
        self._text, self._until_s = text, now_s + NAMED_S

    def text(self, now_s: float) -> str:
        """Return the text to report; "" when it is over."""
        return self._text if now_s < self._until_s else ""
