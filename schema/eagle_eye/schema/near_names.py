"""Suggests known names for mistyped ones: on command lines, in files, requests and the environment.

Uses difflib. Argparse suggests names only from Python 3.14 on, and only for its own choices.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

NAME_CHARS_MAX = 200  # of a name that is compared: a longer one is not a typo
LIKENESS_MIN = 0.72  # difflib's ratio: two letters of eight may differ


def nearest(name: str, known: Iterable[str], likeness_min: float = LIKENESS_MIN) -> str | None:
    """Return the most similar known name, ignoring case; None if none is similar."""
    if len(name) > NAME_CHARS_MAX:
        return None
    by_folded = {one.casefold(): one for one in known}
    found = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=likeness_min)
    return by_folded[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?", "" if no known name is similar."""
    found = nearest(name, known)
    return "" if found is None else f"; did you mean {found}?"
