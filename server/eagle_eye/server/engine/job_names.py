"""Job and node names in settings: glob patterns, and whether one is a name in full. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

NAMES_MAX = 1_000  # patterns in one list: still read by a person
_WILD = frozenset("*?[")

Names = Annotated[list[str], Meta(max_length=NAMES_MAX)]


def matches(patterns: Sequence[str], name: str) -> bool:
    """Return whether one of the glob patterns fits the name; no patterns fit every name."""
    return not patterns or any(_fits(pattern, name) for pattern in patterns)


def is_exact(patterns: Sequence[str], name: str) -> bool:
    """Return whether the name itself is among the patterns, written without wildcards."""
    return any(pattern == name and not _WILD & set(pattern) for pattern in patterns)


def _fits(pattern: str, name: str) -> bool:
    # A list of names in full is longer than what fnmatch keeps of compiled patterns.
    return pattern == name if _WILD.isdisjoint(pattern) else fnmatch.fnmatchcase(name, pattern)
