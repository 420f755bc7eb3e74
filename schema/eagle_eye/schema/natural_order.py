"""The order in which people count names."""

from __future__ import annotations

import re

_DIGITS = re.compile(r"(\d+)")


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return what sorts n2 before n10."""
    parts = _DIGITS.split(name)
    return tuple((0, int(part[:18])) if part.isdecimal() else (1, part) for part in parts if part)
