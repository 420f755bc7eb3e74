"""The records in a PostgreSQL database: connections, what is SQL for PostgreSQL alone, and the lease in its row."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy
from sqlalchemy import exc
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from eagle_eye.server.model.errors import NotLeading, StoreUnavailable
from eagle_eye.server.store.leadership import LEAP, Leadership, Lease, Renewed, Wish
from eagle_eye.server.store.schema import JsonMember, JsonNumber, JsonText, json_parts
from eagle_eye.server.store.settings import DEFAULT_CELL, RecordsSettings, libpq_url

LOCK_S = 5  # how long to wait for another process that writes, as with SQLite
OLDEST = 14  # version of PostgreSQL
IDLE_S = 30  # how long a transaction may be open without a statement: a process that was stopped releases its lock
SLOW_S = 0.5  # an attempt to connect that fails after so long is followed by a rest of its length
WITHIN_RATIO = 0.8  # of a lease: what bounds how long a leader's transaction, or its waiting, may take
# libpq's parameters, where the URL does not set them: no call waits for a database that is cut off.
DEFAULTS = {
    "client_encoding": "UTF8",
    "connect_timeout": "5",
    "tcp_user_timeout": "10000",
    "fallback_application_name": "eagle-eye",
}

TRIGGERS: tuple[str, ...] = (
    """CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN RAISE EXCEPTION ''the audit trail is append-only''; END'""",
    """CREATE TRIGGER audit_is_kept BEFORE DELETE OR UPDATE OR TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()""",
    """CREATE FUNCTION token_was_changed() RETURNS trigger LANGUAGE plpgsql
    AS 'BEGIN UPDATE token_changes SET total = total + 1; RETURN NULL; END'""",
    """CREATE TRIGGER token_changed AFTER INSERT OR UPDATE OR DELETE ON tokens
    FOR EACH STATEMENT EXECUTE FUNCTION token_was_changed()""",
)

# One transaction writes at a time, as with SQLite: what it reads before it writes stays true, and ids are given out in
# the order in which they are committed. The lock is the transaction's: connection poolers may stand between.
_BEGIN = (
    "SELECT set_config('lock_timeout', '{lock_ms}', true),"
    " set_config('idle_in_transaction_session_timeout', '{idle_ms}', true),"
    " pg_advisory_xact_lock(hashtextextended(current_schema() || '.eagle_eye.records', 0))"
)
# Until the transaction's end the epoch cannot rise: what is committed was decided by the one that leads.
_EPOCH = "SELECT epoch FROM {lease} WHERE {mine} FOR KEY SHARE"
# Held by the session with which a server writes, for as long as it is connected; alone by what copies records.
_SERVER_LOCK = "hashtextextended(current_schema() || '.eagle_eye.server', 0)"
HOLDERS = f"""
    SELECT pid, coalesce(host(client_addr), 'its own host'), backend_start::timestamp(0)::text
    FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND granted AND objsubid = 1
    AND (classid::bigint << 32 | objid::bigint) = {_SERVER_LOCK}
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""  # noqa: S608 - constants
_NAMED = (
    "UPDATE {lease} SET backend_pid = pg_backend_pid()"
    " WHERE {mine} AND epoch = %s AND holder = %s RETURNING backend_pid"
)
_LAST_ID = sqlalchemy.text("SELECT pg_sequence_last_value(pg_get_serial_sequence(:table_name, :column_name)::regclass)")
_SET_LAST_ID = sqlalchemy.text("SELECT setval(pg_get_serial_sequence(:table_name, :column_name), :last_id)")
_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")  # in JSON; an escaped backslash before u0000 is none
_READ_ONLY = "25006"
_REMEDIES: tuple[tuple[str, str], ...] = (
    (
        r"password authentication failed|no password supplied",
        "records.password_file or PGPASSFILE must hold the password of the URL's user",
    ),
    (r"no pg_hba.conf entry", "the server's pg_hba.conf must let this user in from this host, or sslmode must be set"),
    (r'database ".*" does not exist', "create it: createdb --encoding UTF8 NAME"),
    (r'role ".*" does not exist', "create it: createuser NAME, and let it create tables in the database"),
    (r"permission denied for schema", "let the URL's user create tables there: GRANT CREATE, USAGE ON SCHEMA"),
    (r"lock timeout", "another process has kept the records locked for too long; the next try may succeed"),
    (r"certificate|SSL", "sslmode and sslrootcert of records.url must fit the server's certificate"),
)
_UNREACHED = "PostgreSQL must run and be reachable at records.url; the next try connects anew"

_log = logging.getLogger(__name__)


class _Pool(QueuePool):
    """A pool whose connections are all closed once it is disposed of: also one that a thread still used, afterwards."""

    _disposed = False

    def dispose(self) -> None:
        """Close the connections that nobody uses now, and each of the others as it comes back."""
        self._disposed = True
        super().dispose()

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        super()._do_return_conn(record)
        if self._disposed:
            super().dispose()


class PostgresqlDatabase:
    """A database with records. One process writes at a time; a lost connection is made anew at its next use."""

    readers = 4
    mark = "%s"
    triggers = TRIGGERS

    def __init__(self, settings: RecordsSettings, *, alone: bool, leadership: Leadership | None = None) -> None:
        """``alone``: nothing is written beside a server. With ``leadership`` it is written by the one that leads."""
        try:
            import psycopg
        except ModuleNotFoundError as error:
            raise StoreUnavailable(
                f'records.url needs: pip install "eagle-eye[postgresql]" (no module {error.name})'
            ) from None
        self._psycopg = psycopg
        self._url = libpq_url(settings)
        self.cell = settings.cell
        self._epoch, self._named_by = self.of_lease(_EPOCH), self.of_lease(_NAMED)
        self._password_file = Path(settings.password_file) if settings.password_file else None
        try:
            known: dict[str, Any] = psycopg.conninfo.conninfo_to_dict(self._url)
        except psycopg.ProgrammingError as error:
            raise StoreUnavailable(f"records.url is no URL that libpq can read: {_line(error)}") from None
        within_ms = int(WITHIN_RATIO * settings.lease_s * 1_000)
        lock_ms, idle_ms = (LOCK_S * 1_000, IDLE_S * 1_000) if leadership is None else (within_ms, within_ms)
        self._begin = _BEGIN.format(lock_ms=lock_ms, idle_ms=idle_ms)
        defaults = DEFAULTS if leadership is None else {**DEFAULTS, "tcp_user_timeout": str(within_ms)}
        self._defaults = {name: value for name, value in defaults.items() if name not in known}
        self._lease_defaults = {**self._defaults, "tcp_user_timeout": str(within_ms)}
        self._within_ms = within_ms
        self.where = f"{known.get('host', 'localhost')}/{known.get('dbname', '')}"
        self.failures: tuple[type[Exception], ...] = (exc.DBAPIError, exc.TimeoutError, psycopg.Error)
        self.not_permitted: type[Exception] = psycopg.errors.InsufficientPrivilege
        self.not_offered: tuple[type[Exception], ...] = (
            psycopg.errors.InsufficientPrivilege,
            psycopg.errors.UndefinedFunction,
            psycopg.errors.FeatureNotSupported,
        )
        self.damage: str | None = None
        self._pools: list[sqlalchemy.Engine] = []
        self._alone = alone
        self._leadership = leadership
        self._writer_pid = 0
        self._tried_in_vain: tuple[float, Exception] | None = None  # until when nobody tries to connect again, and why

    def connections(self, most: int, *, writing: bool = False) -> sqlalchemy.Engine:
        """Return a pool of at most so many connections, opened when they are needed; for reading unless ``writing``."""
        pool = sqlalchemy.create_engine(
            "postgresql+psycopg://",
            creator=self._connect_to_write if writing else self._connect,
            poolclass=_Pool,
            pool_size=most,
            max_overflow=0,
            # So that a restart of the database fails nothing. What only reads is asked again instead: a second
            # question before each read doubled what a server asks that has nothing to do.
            pool_pre_ping=writing,
            isolation_level="READ COMMITTED" if writing else "AUTOCOMMIT",
        )
        self._pools.append(pool)
        return pool

    def check(self, connection: sqlalchemy.Connection) -> None:
        """Raise StoreUnavailable, with the remedy, where the records cannot be kept in this database."""
        version, encoding, recovering, read_only = connection.exec_driver_sql(
            "SELECT current_setting('server_version_num')::int, current_setting('server_encoding'),"
            " pg_is_in_recovery(), current_setting('transaction_read_only')"
        ).one()
        if version < OLDEST * 10_000:
            raise StoreUnavailable(
                f"{self.where} is PostgreSQL {version // 10_000}, the records need {OLDEST} or newer"
            )
        if encoding != "UTF8":
            raise StoreUnavailable(
                f"{self.where} has encoding {encoding}, the records need UTF8: createdb --encoding UTF8 NAME"
            )
        if recovering or read_only == "on":
            raise self._cannot_be_written()

    def is_lost(self, driver: Any) -> bool:
        """Return whether a driver's connection was lost: another one may answer."""
        return bool(driver.closed)

    def ensure_leading(self) -> None:
        """Raise NotLeading where another server leads, or may lead by now."""
        if self._leadership is not None:
            self._leadership.epoch_to_decide()

    def begin_writing(self, driver: Any) -> None:
        """Begin the only transaction that writes, of all processes. Raises NotLeading."""
        if self._leadership is None:
            driver.execute(self._begin)
            return
        term = self._leadership.term_to_decide()
        driver.execute(self._begin)
        (found,) = driver.execute(self._epoch).fetchone()
        if found != term.epoch:
            self._leadership.settle()  # the epoch may have risen meanwhile
        if found != term.epoch:
            raise NotLeading(f"another server leads (epoch {found}, this one's was {term.epoch}): nothing was written")

    def last_id(self, connection: sqlalchemy.Connection, column: sqlalchemy.Column[int]) -> int:
        """Return the last id that the column of a table gave out, of rows that are deleted since, too; 0 for none."""
        names = {"table_name": column.table.name, "column_name": column.name}
        found: int | None = connection.execute(_LAST_ID, names).scalar()
        return found or 0

    def set_last_id(self, connection: sqlalchemy.Connection, column: sqlalchemy.Column[int], last_id: int) -> None:
        """Have the column give out ids after this one."""
        names = {"table_name": column.table.name, "column_name": column.name}
        connection.execute(_SET_LAST_ID, {**names, "last_id": last_id})

    def storable(self, text: str) -> str:
        """Return the text with U+FFFD for each NUL, which PostgreSQL keeps neither in text nor in JSON."""
        if "\\u0000" in text:
            text = _NUL.sub(r"\1\\ufffd", text)
        return text.replace("\0", "\ufffd")

    def unavailable(self, doing: str, error: Exception) -> StoreUnavailable:
        """Return what to raise for a failure: what could not be done, why, and the remedy."""
        cause = error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
        if getattr(cause, "sqlstate", None) == _READ_ONLY:
            for pool in self._pools:
                pool.dispose()  # after a failover the old primary is a replica: the next try looks for the new one
            return self._cannot_be_written()
        said = _line(cause)
        lost = isinstance(cause, self._psycopg.OperationalError)
        remedy = next((one for sign, one in _REMEDIES if re.search(sign, said)), _UNREACHED if lost else "")
        return StoreUnavailable(f"the records in {self.where} cannot be {doing}: {said}{remedy and f'; {remedy}'}")

    def note_damage(self, how: str) -> None:
        """Record that records are damaged; it is logged once."""
        if self.damage is None:
            self.damage = f"the records in {self.where} are damaged: {how}; restore the database from its backup"
            _log.error("%s", self.damage)

    def _cannot_be_written(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.where} is read-only or in recovery (a replica): records.url must name the primary, or all hosts"
            " with target_session_attrs=read-write"
        )

    def of_lease(self, statement: str) -> str:
        """Return the statement with ``{lease}`` and ``{mine}``: the table of the cell's lease, and its row there."""
        if self.cell == DEFAULT_CELL:
            return statement.replace("{lease}", "lease").replace("{mine}", "true")
        # No parameter: names of cells are letters, digits and hyphens (settings.py).
        return statement.replace("{lease}", "cell_leases").replace("{mine}", f"cell = '{self.cell}'")

    def connect_for_lease(self) -> Any:
        """Return a connection on which no statement waits for as long as a lease. Raises StoreUnavailable."""
        connection = self._connect(self._lease_defaults)
        try:
            connection.autocommit = True
            for name in ("lock_timeout", "statement_timeout"):
                connection.execute("SELECT set_config(%s, %s, false)", (name, str(self._within_ms)))
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, defaults: Mapping[str, Any] | None = None) -> Any:
        options: dict[str, Any] = dict(self._defaults if defaults is None else defaults)
        if self._password_file is not None:
            try:
                options["password"] = self._password_file.read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, ValueError) as error:
                raise StoreUnavailable(f"records.password_file {self._password_file} cannot be read: {error}") from None
        began_s = time.monotonic()
        if self._tried_in_vain is not None and began_s < self._tried_in_vain[0]:
            raise self._tried_in_vain[1]
        try:
            # No prepared statements: a pooler may hand each transaction another session.
            connection = self._psycopg.connect(self._url, prepare_threshold=None, **options)
        except self._psycopg.OperationalError as error:
            # A host that does not answer is not waited for by each who asks, one after the other.
            now_s = time.monotonic()
            if now_s - began_s >= SLOW_S:
                self._tried_in_vain = now_s + (now_s - began_s), error
            raise
        self._tried_in_vain = None
        return connection

    def _connect_to_write(self) -> Any:
        """Return a connection that locks out what must not write beside it. Raises StoreUnavailable, NotLeading."""
        leadership = self._leadership
        if not self._alone and (leadership is None or not leadership.leads):
            return self._connect()
        connection = self._connect()
        try:
            connection.autocommit = True
            holders = connection.execute(HOLDERS).fetchall()
            if self._writer_pid in [pid for pid, _, _ in holders]:
                # The session that this process lost, and PostgreSQL does not know of that yet.
                connection.execute("SELECT pg_terminate_backend(%s, 1000)", (self._writer_pid,))
            how = "" if leadership is None else "_shared"
            locked = connection.execute(f"SELECT pg_try_advisory_lock{how}({_SERVER_LOCK})").fetchone()[0]
            named = leadership is None or self._named(connection, leadership)
            self._writer_pid = connection.execute("SELECT pg_backend_pid()").fetchone()[0]
            connection.autocommit = False
        except BaseException:
            connection.close()
            raise
        if locked and named:
            return connection
        connection.close()
        if not named:
            raise NotLeading("another server leads by now")
        _, host, since = holders[0] if holders else (0, "somewhere", "a moment ago")
        raise StoreUnavailable(
            f"the records in {self.where} are in use by another process (connected from {host} since {since}): records"
            " are copied while no server uses them"
        )

    def _named(self, connection: Any, leadership: Leadership) -> bool:
        """Have the lease name the connection's session, for who takes over to end; return False if it is another's."""
        epoch = leadership.epoch_to_decide()
        return connection.execute(self._named_by, (epoch, leadership.url)).fetchone() is not None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


@compiles(JsonText, "postgresql")
def _text(element: JsonText, compiler: Any, **options: Any) -> str:
    record, field, _ = json_parts(element, compiler, **options)
    return f"(({record})::jsonb ->> '{field}')"


@compiles(JsonNumber, "postgresql")
def _number(element: JsonNumber, compiler: Any, **options: Any) -> str:
    record, field, _ = json_parts(element, compiler, **options)
    return f"((({record})::jsonb ->> '{field}')::float8)"


@compiles(JsonMember, "postgresql")
def _member(element: JsonMember, compiler: Any, **options: Any) -> str:
    record, path, value = json_parts(element, compiler, **options)
    names, _, inside = path.partition("[*].")
    one = f"jsonb_build_object('{inside}', {value})" if inside else value
    return f"(({record})::jsonb @> jsonb_build_object('{names}', jsonb_build_array({one})))"


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


class PostgresqlLease:
    """The lease of the servers of a cell on a database. Used by one thread at a time."""

    def __init__(self, database: PostgresqlDatabase) -> None:
        self._database = database
        self._connection: Any = None
        self._timeline = _TIMELINE

    def found_cell(self) -> None:
        """Make the lease of a cell that is new. Raises StoreUnavailable."""
        if self._database.cell == DEFAULT_CELL:
            return
        self._rows(
            "INSERT INTO cell_leases (cell, epoch, renewals, holder, backend_pid) VALUES (%s, 0, 0, '', 0)"
            " ON CONFLICT DO NOTHING RETURNING epoch",
            self._database.cell,
        )

    def read(self) -> Lease:
        """Return the lease as it is."""
        return Lease(*self._rows("SELECT epoch, renewals, holder, backend_pid FROM {lease} WHERE {mine}")[0])

    def take_lease(self, seen: Lease, holder: str) -> int | None:
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
