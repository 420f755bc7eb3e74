"""What the store asks of a database engine; ``sqlite.py`` and ``postgresql.py`` are the two there are."""

from __future__ import annotations

from typing import Any, Protocol

import sqlalchemy

from eagle_eye.server.model.errors import StoreUnavailable


class RecordsDatabase(Protocol):
    """One database on one engine: how it is connected to, who may write, and what its errors mean."""

    where: str  # the file or the database, for people
    readers: int  # connections that read at a time
    mark: str  # of a parameter, in a statement that is handed to the driver as it is
    failures: tuple[type[Exception], ...]  # what its use raises where it fails; nothing else is a failure of it
    triggers: tuple[str, ...]  # statements that make the audit trail append-only and have changes of tokens counted

    @property
    def damage(self) -> str | None:
        """What is known to be damaged."""
        ...

    def connections(self, most: int, *, writing: bool = False) -> sqlalchemy.Engine:
        """Return a pool of at most so many connections, opened when they are needed; for reading unless ``writing``."""
        ...

    def check(self, connection: sqlalchemy.Connection) -> None:
        """Raise StoreUnavailable, with the remedy, where the records cannot be kept in this database."""
        ...

    def is_lost(self, driver: Any) -> bool:
        """Return whether a driver's connection was lost: another one may answer."""
        ...

    def ensure_leading(self) -> None:
        """Raise NotLeading where another server of the same records leads, or may lead by now."""
        ...

    def begin_writing(self, driver: Any) -> None:
        """Begin the only transaction that writes, of all processes, on a driver's connection. Raises NotLeading.

        What is read from here on stays true until its end, whichever connection reads it.
        """
        ...

    def last_id(self, connection: sqlalchemy.Connection, column: sqlalchemy.Column[int]) -> int:
        """Return the last id that the column of a table gave out, of rows that are deleted since, too; 0 for none."""
        ...

    def set_last_id(self, connection: sqlalchemy.Connection, column: sqlalchemy.Column[int], last_id: int) -> None:
        """Have the column give out ids after this one."""
        ...

    def storable(self, text: str) -> str:
        """Return the text as it can be stored."""
        ...

    def unavailable(self, doing: str, error: Exception) -> StoreUnavailable:
        """Return what to raise for a failure: what could not be done, why, and the remedy."""
        ...

    def note_damage(self, how: str) -> None:
        """Record that records are damaged; it is logged once."""
        ...
