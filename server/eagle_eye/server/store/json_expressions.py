"""What statements ask of a record's JSON; each engine's file says how it is written there."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Boolean, ColumnElement, Double, Text, literal_column
from sqlalchemy.sql.functions import FunctionElement


class JsonText(FunctionElement[str]):
    """A field of the record as text."""

    type = Text()
    inherit_cache = True

    def __init__(self, record: ColumnElement[Any], field: str) -> None:
        super().__init__(record, literal_column(field))


class JsonNumber(FunctionElement[float]):
    """A field of the record as a number."""

    type = Double()
    inherit_cache = True

    def __init__(self, record: ColumnElement[Any], field: str) -> None:
        super().__init__(record, literal_column(field))


class JsonMember(FunctionElement[bool]):
    """Whether a list of the record contains the value; "ranks[*].node" looks into the list's objects."""

    type = Boolean()
    inherit_cache = True

    def __init__(self, record: ColumnElement[Any], path: str, value: ColumnElement[str]) -> None:
        super().__init__(record, literal_column(path), value)


def parts(element: FunctionElement[Any], compiler: Any, **options: Any) -> tuple[str, str, str]:
    """Return the record, the field or path, and the value, "" for none, as they stand in the statement."""
    record, path, *value = element.clauses
    written = compiler.process(value[0], **options) if value else ""
    return compiler.process(record, **options), str(path), written
