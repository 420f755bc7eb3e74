"""Glob patterns of job and node names in settings, and exact names among them. Pure."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

NAMES_MAX = 1_000  # patterns in one list, which a person must still be able to read
_WILD = frozenset("*?[")

Names = Annotated[list[str], Meta(max_length=NAMES_MAX)]


def matches(patterns: Sequence[str], name: str) -> bool:
    """Return whether one of the glob patterns matches the name; an empty list matches every name."""
    return not patterns or any(_fits(pattern, name) for pattern in patterns)


def is_exact(patterns: Sequence[str], name: str) -> bool:
    """Return whether the name itself is among the patterns, written without wildcards."""
    return any(pattern == name and not _WILD & set(pattern) for pattern in patterns)


def _fits(pattern: str, name: str) -> bool:
    # A list of exact names may exceed fnmatch's cache of compiled patterns.
    return pattern == name if _WILD.isdisjoint(pattern) else fnmatch.fnmatchcase(name, pattern)
