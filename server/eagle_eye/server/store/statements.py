"""Statements as a driver takes them: made with SQLAlchemy once for each engine, and then run without it.

Run by SQLAlchemy, a look-up of one record took three times the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Dialect
from sqlalchemy.sql import Executable
from sqlalchemy.sql.compiler import SQLCompiler

Values = Sequence[Any] | Mapping[str, Any]
# Beyond it they are made anew: those with lists of values have as many shapes as lists have lengths.
STATEMENTS_MAX = 2_000


class Statement(NamedTuple):
    """The text for the driver, the names of its places, None where it takes names, and values of its own."""

    text: str
    places: tuple[str, ...] | None
    own: Mapping[str, Any]

    def values(self, given: Mapping[str, Any]) -> Values:
        """Return the values as the driver takes them."""
        if self.places is None:
            return {**self.own, **given}
        return [given[name] if name in given else self.own[name] for name in self.places]


class Statements:
    """The statements of one engine, each made when it is first needed."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._made: dict[Hashable, Statement] = {}

    def of(self, key: Hashable, make: Callable[[], Executable]) -> Statement:
        """Return the statement of this key, which ``make`` returns the first time."""
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= STATEMENTS_MAX:
                self._made.clear()
            found = self._made[key] = self._compiled(make())
        return found

    def executing(self, cursor: Any) -> Callable[..., None]:
        """Return what executes a statement with a driver's cursor, its values given by name."""

        def execute(statement: Executable, **values: Any) -> None:
            prepared = self.of(statement, lambda: statement)
            cursor.execute(prepared.text, prepared.values(values))

        return execute

    def _compiled(self, statement: Any) -> Statement:
        compiled: SQLCompiler = statement.compile(dialect=self._dialect, compile_kwargs={"render_postcompile": True})
        places = tuple(compiled.positiontup) if compiled.positional and compiled.positiontup is not None else None
        return Statement(str(compiled), places, compiled.params)
