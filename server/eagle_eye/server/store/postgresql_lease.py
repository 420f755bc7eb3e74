"""Keeps the lease in its row in PostgreSQL, over a connection of its own: a long transaction delays no renewal."""

from __future__ import annotations

import logging
from typing import Any

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.lease import LEAP, Lease, Renewed, Wish
from eagle_eye.server.store.postgresql import HOLDERS, PostgresqlDatabase
from eagle_eye.server.store.settings import DEFAULT_CELL

CELLS_SINCE = "0007"  # version of the tables from which on servers know cells
TERMINATE_MS = 1_000  # how long to wait for the end of the earlier leader's session
# The database's timeline: 1 at first, and greater after each failover and each restore to a point in time.
_TIMELINE = "('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint"
_KNOWN_TIMELINE = "GREATEST(timeline, 1)"  # as it was written last
# The next epoch. Those that came after the one in the row, and were lost with a failover, are lower.
_NEXT_EPOCH = f"epoch + 1 + {LEAP} * GREATEST(0, {{timeline}} - {_KNOWN_TIMELINE})"

# Physical ones; to others the states of a replica are hidden, and a copy that is being made counts for as long.
_REPLICAS_BEHIND = """
    SELECT count(*) FROM pg_stat_replication LEFT JOIN pg_replication_slots ON active_pid = pid
    WHERE coalesce(slot_type, 'physical') = 'physical' AND coalesce(state, 'streaming') IN ('streaming', 'catchup')
    AND (current_setting('synchronous_standby_names') = '' OR current_setting('synchronous_commit') IN ('off', 'local'))
"""

_log = logging.getLogger(__name__)


class PostgresqlLease:
    """The lease of the servers of a cell on a database. Used by one thread at a time."""

    def __init__(self, database: PostgresqlDatabase) -> None:
        self._database = database
        self._connection: Any = None
        self._timeline = _TIMELINE

    def found_cell(self) -> None:
        """Make the lease of a cell that is new; servers that know no cells are to start no more.

        Raises StoreUnavailable.
        """
        if self._database.cell == DEFAULT_CELL:
            return
        self._rows(
            "INSERT INTO cell_leases (cell, epoch, renewals, holder, backend_pid) VALUES (%s, 0, 0, '', 0)"
            " ON CONFLICT DO NOTHING RETURNING epoch",
            self._database.cell,
        )
        self._rows("UPDATE oldest_readers SET oldest = %s WHERE oldest < %s RETURNING oldest", CELLS_SINCE, CELLS_SINCE)

    def read(self) -> Lease:
        """Return the lease as it is."""
        return Lease(*self._rows("SELECT epoch, renewals, holder, backend_pid FROM {lease} WHERE {mine}")[0])

    def take(self, seen: Lease, holder: str) -> int | None:
        """Take the lease if it is still as it was seen; return the new epoch.

        The session with which the leader before writes is ended first. A transaction of it that is not ended keeps the
        epoch from rising, until PostgreSQL ends it (``idle_in_transaction_session_timeout``).
        """
        if seen.holder and seen.backend_pid:
            self._end_session_of(seen)
        taken = self._rows(
            "UPDATE {lease} SET epoch = {next_epoch}, timeline = {timeline}, renewals = 0, holder = %s,"
            " backend_pid = 0, wish_nodes = 0, wish_holder = ''"
            " WHERE {mine} AND epoch = %s AND renewals = %s AND holder = %s RETURNING epoch",
            holder,
            seen.epoch,
            seen.renewals,
            seen.holder,
        )
        return int(taken[0][0]) if taken else None

    def renew(self, epoch: int, holder: str) -> Renewed | None:
        """Count a renewal; return None if the lease is another's by now.

        The epoch rises where the database failed over. Two statements: one that may write the key waits for others'
        transactions.
        """
        renewed = self._rows(
            "UPDATE {lease} SET renewals = renewals + 1"
            " WHERE {mine} AND epoch = %s AND holder = %s AND GREATEST(timeline, 1) = {timeline}"
            " RETURNING epoch, wish_number, wish_nodes, wish_holder",
            epoch,
            holder,
        ) or self._rows(
            "UPDATE {lease} SET epoch = {next_epoch}, timeline = {timeline}, renewals = 0"
            " WHERE {mine} AND epoch = %s AND holder = %s RETURNING epoch, wish_number, wish_nodes, wish_holder",
            epoch,
            holder,
        )
        return Renewed(renewed[0][0], Wish(*renewed[0][1:])) if renewed else None

    def rise(self, epoch: int, holder: str, to: int) -> bool:
        """Raise the epoch, if the lease is still this server's; return whether it was.

        Waits for the transaction that writes at the moment, which holds the epoch.
        """
        return bool(
            self._rows(
                "UPDATE {lease} SET epoch = %s, renewals = 0"
                " WHERE {mine} AND epoch = %s AND holder = %s RETURNING epoch",
                to,
                epoch,
                holder,
            )
        )

    def release(self, epoch: int, holder: str) -> None:
        """Give the lease back, if it is still this server's."""
        self._rows(
            "UPDATE {lease} SET holder = '', backend_pid = 0"
            " WHERE {mine} AND epoch = %s AND holder = %s RETURNING epoch",
            epoch,
            holder,
        )

    def wish(self, seen: Lease, holder: str, nodes: int) -> None:
        """Wish that the leader step down for ``holder``, which so many nodes ask in vain, if the lease is as seen."""
        self._rows(
            "UPDATE {lease} SET wish_number = wish_number + 1, wish_nodes = %s, wish_holder = %s"
            " WHERE {mine} AND epoch = %s AND holder = %s RETURNING epoch",
            nodes,
            holder,
            seen.epoch,
            seen.holder,
        )

    def replicas_behind(self) -> int:
        """Return how many replicas of the database may lack its last commits."""
        return int(self._rows(_REPLICAS_BEHIND)[0][0])

    def close(self) -> None:
        """Release the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _end_session_of(self, seen: Lease) -> None:
        # Only while the lease is as it was seen, and only a session that writes as a server: a number is used again.
        try:
            self._asked(
                f"SELECT pg_terminate_backend(%s, {TERMINATE_MS}) FROM {{lease}}"  # noqa: S608
                " WHERE {mine} AND epoch = %s AND renewals = %s"
                f" AND %s IN (SELECT pid FROM ({HOLDERS}) AS holders)",
                seen.backend_pid,
                seen.epoch,
                seen.renewals,
                seen.backend_pid,
            )
        except self._database.not_permitted:  # a failure, too, but not of the connection
            _log.warning(
                "the session of the leader before cannot be ended: the servers should use the same role",
                extra={"backend_pid": seen.backend_pid},
            )
        except self._database.failures as error:
            raise self._unavailable(error) from error

    def _rows(self, statement: str, *values: Any) -> list[Any]:
        """Run the statement; ``{timeline}`` in it is the database's, or the known one where that is not to be had."""
        statement = statement.replace("{next_epoch}", _NEXT_EPOCH)
        try:
            try:
                return self._asked(statement.replace("{timeline}", self._timeline), *values)
            except self._database.not_offered as error:
                if "{timeline}" not in statement or self._timeline == _KNOWN_TIMELINE:
                    raise
                found = self._asked(statement.replace("{timeline}", _KNOWN_TIMELINE), *values)
                self._timeline = _KNOWN_TIMELINE
                _log.warning(
                    "the database does not say its timeline: the epoch does not rise by itself when it fails over"
                    " (docs/how-to/two-servers.md)",
                    extra={"error": " ".join(str(error).split())},
                )
                return found
        except self._database.failures as error:
            raise self._unavailable(error) from error

    def _asked(self, statement: str, *values: Any) -> list[Any]:
        if self._connection is None:
            self._connection = self._database.connect_for_lease()
        return list(self._connection.execute(self._database.of_lease(statement), values).fetchall())

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        self.close()
        return self._database.unavailable("asked who leads", error)
