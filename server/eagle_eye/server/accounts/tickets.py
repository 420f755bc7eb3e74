"""Parses repair tickets exported by the site's own system: CSV with a header, or one JSON object per line. Pure.

Columns: ``id``, ``node``, ``opened``, and optionally ``closed`` and ``text``; others are ignored and listed. A file
with any error is rejected as a whole.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from eagle_eye.schema.names import NAME_CHARS_MAX, is_name
from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.model.account_records import Ticket

Format = Literal["csv", "jsonl"]
COLUMNS = ("id", "node", "opened", "closed", "text")
REQUIRED = ("id", "node", "opened")
TICKETS_MAX = 10_000  # per import
TEXT_CHARS_MAX = 1_000  # kept of a ticket's text
OTHERS_NAMED_MAX = 20


class TicketFileWrong(ValueError):
    """The file is invalid; the message names line, column and what was expected."""


class Parsed(NamedTuple):
    """The tickets of a file, the last line of each id, and the ignored columns."""

    tickets: list[Ticket]
    left_out: list[str]


def parse(text: str, form: Format, imported_s: float) -> Parsed:
    """Return the file's tickets. Raises TicketFileWrong."""
    tickets: dict[str, Ticket] = {}
    left_out: dict[str, None] = {}
    for count, (line, row) in enumerate(_csv_rows(text) if form == "csv" else _json_rows(text)):
        if count >= TICKETS_MAX:
            raise TicketFileWrong(f"line {line}: more than {TICKETS_MAX} tickets; import the file in parts")
        left_out.update(dict.fromkeys(str(name)[:80] for name in row if name not in COLUMNS))
        ticket = _ticket(line, row, imported_s)
        tickets[ticket.id] = ticket
    return Parsed(list(tickets.values()), list(left_out)[:OTHERS_NAMED_MAX])


def _csv_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""), strict=True)
    try:
        header = [name.strip().lower() for name in next(reader, [])]
        missing = [name for name in REQUIRED if name not in header]
        if missing:
            raise TicketFileWrong(
                f"line 1: no column {', '.join(missing)}; expected a header with {','.join(COLUMNS)}"
                " (closed and text may be left out)"
            )
        twice = [name for name in COLUMNS if header.count(name) > 1]
        if twice:
            raise TicketFileWrong(f"line 1, column {twice[0]}: it is there twice")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise TicketFileWrong(f"line {reader.line_num}: {len(cells)} cells; the header has {len(header)}")
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise TicketFileWrong(f"line {reader.line_num}: no CSV: {error}") from None


def _json_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise TicketFileWrong(f"line {number}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise TicketFileWrong(f"line {number}: expected a JSON object, got {type(row).__name__}")
        yield number, row


def _ticket(line: int, row: Mapping[str, Any], imported_s: float) -> Ticket:
    opened_s = _time(line, row, "opened")
    if opened_s is None:
        raise TicketFileWrong(f"line {line}, column opened: it is empty; expected when the ticket was opened")
    closed_s = _time(line, row, "closed")
    if closed_s is not None and closed_s < opened_s:
        raise TicketFileWrong(f"line {line}, column closed: {row['closed']!r} is before opened, {row['opened']!r}")
    said = row.get("text")
    return Ticket(
        id=_name(line, row, "id"),
        node=_name(line, row, "node"),
        opened_s=opened_s,
        closed_s=closed_s,
        text="" if said is None else str(said)[:TEXT_CHARS_MAX],
        imported_s=imported_s,
    )


def _name(line: int, row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    # Ticket systems number their tickets, and JSON keeps the number.
    name = str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else ""
    if not is_name(name):
        raise TicketFileWrong(
            f"line {line}, column {column}: expected 1 to {NAME_CHARS_MAX} printable characters,"
            f" got {str(value)[:80]!r}"
        )
    return name


def _time(line: int, row: Mapping[str, Any], column: str) -> float | None:
    value = row.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        return unix_seconds(json.dumps(value) if not isinstance(value, str) else value.strip())
    except (ValueError, OverflowError):
        raise TicketFileWrong(
            f"line {line}, column {column}: expected an RFC 3339 time with its offset such as 2026-01-31T12:00:00Z,"
            f" or Unix seconds, got {str(value)[:80]!r}"
        ) from None
