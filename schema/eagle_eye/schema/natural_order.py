"""Natural sort order of names."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"(\d+)")


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that sorts n2 before n10."""
    parts = _DIGITS.split(name)
    return tuple((0, int(part[:18])) if part.isdecimal() else (1, part) for part in parts if part)
