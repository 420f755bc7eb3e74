"""Expands Slurm host lists: "gpu[001-004,7]-ib,login" to names. Pure, with bounded cost for any input."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

HOSTS_MAX = 65_536  # of one list: Slurm's own limit
CHARS_MAX = 1 << 20
NAME_CHARS_MAX = 255
DIGITS_MAX = 18


class BadHostList(ValueError):
    """A text that is not a host list, or expands to more names than allowed."""


def expand(text: str, hosts_max: int = HOSTS_MAX) -> tuple[str, ...]:
    """Return the names in the order of the list; () for an empty one and Slurm's "(null)". Raises BadHostList."""
    if text in ("", "(null)", "None assigned"):
        return ()
    if len(text) > CHARS_MAX:
        raise BadHostList(f"a host list of {len(text)} characters; at most {CHARS_MAX}")
    found: list[str] = []
    for item in _items(text):
        parts = _parts(item)
        size = 1
        for choices in parts:
            size *= _size(choices)
        if len(found) + size > hosts_max:
            raise BadHostList(f"more than {hosts_max} hosts in {text[:80]!r}")
        found += map("".join, itertools.product(*([*_values(choices)] for choices in parts)))
    return tuple(found)


def _items(text: str) -> Iterator[str]:
    """Yield the items between commas outside of brackets."""
    begin, inside = 0, False
    for place, char in enumerate(text):
        if char in "[]":
            if (char == "[") == inside:
                raise BadHostList(f"brackets do not match in {text[:80]!r}")
            inside = not inside
        elif char == "," and not inside:
            yield text[begin:place]
            begin = place + 1
        elif not char.isprintable() or char.isspace():
            raise BadHostList(f"{char!r} in {text[:80]!r}")
    if inside:
        raise BadHostList(f"brackets do not match in {text[:80]!r}")
    yield text[begin:]


def _parts(item: str) -> list[list[tuple[str, int]]]:
    """Return an item as its parts, each a list of (first, count): "a[1-2]b" is [a x 1], [1 x 2], [b x 1]."""
    pieces = item.replace("]", "[").split("[")
    # Each of the item's names contains all text outside of the brackets.
    if not pieces[0] or sum(map(len, pieces[::2])) > NAME_CHARS_MAX:
        raise BadHostList(f"a name of no or of more than {NAME_CHARS_MAX} characters: {item[:80]!r}")
    parts: list[list[tuple[str, int]]] = []
    for place, piece in enumerate(pieces):
        if place % 2:
            parts.append([_range(one) for one in piece.split(",")])
        elif piece:
            parts.append([(piece, 1)])
    return parts


def _range(text: str) -> tuple[str, int]:
    """Return the first number as written, and the count: "08-11" is ("08", 4)."""
    first, dash, last = text.partition("-")
    last = last if dash else first
    for number in (first, last):
        if not (number.isascii() and number.isdigit() and len(number) <= DIGITS_MAX):
            raise BadHostList(f"{text[:40]!r} is no range of numbers")
    count = int(last) - int(first) + 1
    if count < 1:
        raise BadHostList(f"{text[:40]!r} runs backwards")
    return first, count


def _size(choices: list[tuple[str, int]]) -> int:
    return sum(count for _, count in choices)


def _values(choices: list[tuple[str, int]]) -> Iterator[str]:
    for first, count in choices:
        if count == 1:
            yield first
        else:
            yield from (f"{int(first) + step:0{len(first)}d}" for step in range(count))
