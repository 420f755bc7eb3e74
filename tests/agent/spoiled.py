"""Documents of the right shape that hold one wrong thing: what neither random bytes nor flipped bits come to."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

NASTY: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**30),
    *(0.5, -0.0, 5e-324, 1e308, math.nan, math.inf),
    *("", "0", "-5", "9" * 30, "\N{ARABIC-INDIC DIGIT THREE}", "a\nb", "\0", "\ud800", "x" * 300),
    *([], {}, [[]], ["a", 1], {"": {}}),
)


def spoiled(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the document with each of its values, at any depth, taken away or replaced by each nasty one."""
    for number in range(len(list(_places(document)))):
        for nasty in NASTY:
            plain = copy.deepcopy(document)
            holder, key = list(_places(plain))[number]
            holder[key] = copy.deepcopy(nasty)
            yield plain
        plain = copy.deepcopy(document)
        holder, key = list(_places(plain))[number]
        del holder[key]
        yield plain


def _places(plain: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(plain) if isinstance(plain, dict) else range(len(plain)) if isinstance(plain, list) else ()
    for key in keys:
        yield plain, key
        yield from _places(plain[key])
