"""Prints lists as readable tables: in a narrow terminal columns are dropped rather than words broken."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

SENTENCE_CHARS = 20  # text with spaces that is longer may be wrapped, to no less than this
GAP = 2
_TIME = re.compile(r"(\d{4}-)(\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d+)?Z")
_LONG, _SHORT = r"\1\2T\3Z", r"\2 \3"  # the shown part of a time; milliseconds are omitted in a table


class Column(NamedTuple):
    """A table's column; ``path`` names the field, with dots for nested ones.

    Where there is no room, the column with the greatest ``spare`` goes first; one with 0 stays. Sentences in it are
    wrapped to no less than ``sentence`` characters. One with ``below`` does not go: it is printed below each row.
    """

    title: str
    path: str
    spare: int = 0
    sentence: int = SENTENCE_CHARS
    below: bool = False


@dataclass(slots=True)
class _Shown:
    """A column's cells, and its minimum and preferred width."""

    column: Column
    title: str
    cells: list[str]
    least: int
    whole: int
    width: int = 0


def print_table(columns: Sequence[Column], items: Sequence[Mapping[str, Any]]) -> None:
    """Write the items to standard output as a table, without the columns that are empty in all of them.

    Only sentences are wrapped, at spaces: ids and names are never split. In a narrow terminal times lose their year,
    then sentences go below their rows, and columns are dropped and named on standard error. If even the rest does not
    fit, or standard output is not a terminal, each item is one line.
    """
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not items:
        console.print(Text("none"))
        return
    room = console.width if console.is_terminal or "COLUMNS" in os.environ else None
    shown, left_out = _fitted(columns, items, room)
    below = [column for column in left_out if column.below]
    if below:
        shown, left_out = _fitted([column for column in columns if column not in below], items, room)

    def table(rows: Iterable[Sequence[str]], header: bool) -> Table:
        found = Table(box=None, pad_edge=False, header_style="bold", show_header=header)
        for one in shown:
            found.add_column(one.title, overflow="fold", width=one.width, no_wrap=one.width >= one.whole)
        for row in rows:
            found.add_row(*map(Text, row))
        return found

    rows = list(zip(*(one.cells for one in shown), strict=True))
    console.width = max(console.width, _sum(one.width for one in shown))
    if not below:
        console.print(table(rows, header=True))
    for place, (row, item) in enumerate(zip(rows, items, strict=True) if below else ()):
        console.print(table([row], header=place == 0))
        for said in filter(None, (printable(field(item, column.path)) for column in below)):
            console.print(Padding(Text(said), (0, 0, 0, GAP), expand=False))
    if left_out:
        names = ", ".join(column.title for column in left_out)
        sys.stdout.flush()
        sys.stderr.write(f"no room for: {names} (a wider terminal or --json has them)\n")


def printable(value: Any) -> str:
    """Return the value as text without control characters: names and summaries are untrusted."""
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(printable(item) for item in value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a step is counted, though it travels as a float
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value))


def field(record: Mapping[str, Any], path: str) -> Any:
    """Return the record's field, None if the path does not exist."""
    value: Any = record
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _fitted(
    columns: Sequence[Column], items: Sequence[Mapping[str, Any]], room: int | None
) -> tuple[list[_Shown], list[Column]]:
    """Return the columns that fit, each with its width, and those that are dropped."""
    whole = _measured(columns, items, _LONG)
    for one in whole:
        one.width = one.whole
    if room is None or _sum(one.whole for one in whole) <= room:
        return whole, []
    shown, gone = list(whole), list[_Shown]()
    if _sum(one.least for one in shown) > room:
        shown = _measured(columns, items, _SHORT)
    while _sum(one.least for one in shown) > room:
        last = max(shown, key=lambda one: one.column.spare)
        if last.column.spare == 0:
            return whole, []
        shown.remove(last)
        gone.append(last)
    for one in reversed(gone):  # what went before a wider one did may fit again
        if _sum(each.least for each in (*shown, one)) <= room:
            shown.append(one)
    shown.sort(key=lambda one: columns.index(one.column))
    over = room - _sum(one.least for one in shown)
    for one in sorted(shown, key=lambda one: one.whole - one.least):
        one.width = min(one.whole, one.least + over)
        over -= one.width - one.least
    return shown, [one.column for one in gone if one not in shown]


def _measured(columns: Sequence[Column], items: Sequence[Mapping[str, Any]], time: str) -> list[_Shown]:
    """Return the non-empty columns, with times formatted by the pattern ``time``."""
    found = []
    for column in columns:
        reported = [printable(field(item, column.path)) for item in items]
        times = any(reported) and all(_TIME.fullmatch(cell) for cell in reported if cell)
        cells = [_TIME.sub(time, cell) for cell in reported] if times else reported
        widest = max(map(len, cells))
        if widest == 0:
            continue
        title = f"{column.title} (UTC)" if times and time == _SHORT else column.title
        whole = max(widest, len(title))
        if widest > column.sentence and any(" " in cell for cell in cells):
            least = column.sentence
        else:
            least = max(widest, *map(len, title.split()))
        found.append(_Shown(column, title, cells, least, whole))
    return found


def _sum(widths: Iterable[int]) -> int:
    each = list(widths)
    return sum(each) + GAP * max(len(each) - 1, 0)
