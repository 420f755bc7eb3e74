"""The tables of the records: one for each kind, JSON beside its indexed columns, and the trails. For both engines.

What changes here needs a migration (``migrations/versions``).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Double, Index, Integer, MetaData, Table, Text, text
from sqlalchemy.types import TypeEngine

from eagle_eye.server.store.json_expressions import JsonNumber, JsonText
from eagle_eye.server.store.store import KINDS, Kind

metadata = MetaData()

# SQLite counts rows up only in an INTEGER; PostgreSQL sorts and compares by bytes, as SQLite does.
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")
_TEXT = Text().with_variant(Text(collation="C"), "postgresql")
_FLAGS = ("active", "moved")
_NULLABLE = (("deliveries", "expires_s"), ("tokens", "node"), ("job_cells", "over_s"))


def _type(name: str) -> TypeEngine[Any]:
    if name in _FLAGS:
        return Integer()
    if name == "sequence":
        return BigInteger()
    return Double() if name.endswith("_s") else _TEXT


def _table(kind: Kind[Any]) -> Table:
    unique = (kind.key, "sha256")
    return Table(
        kind.name,
        metadata,
        Column("rowid", _ROW_ID, primary_key=True, autoincrement=True),
        *(
            Column(name, _type(name), nullable=(kind.name, name) in _NULLABLE, unique=name in unique or None)
            for name in kind.column_names
        ),
        Column("record", Text, nullable=False),
        sqlite_autoincrement=True,
    )


def _lease_columns() -> tuple[Column[Any], ...]:
    """Return the columns of a lease beside its epoch."""
    return (
        Column("renewals", BigInteger, nullable=False),
        Column("holder", _TEXT, nullable=False),
        Column("backend_pid", Integer, nullable=False),
        Column("timeline", BigInteger, nullable=False, server_default="0"),
        Column("wish_number", BigInteger, nullable=False, server_default="0"),
        Column("wish_nodes", Integer, nullable=False, server_default="0"),
        Column("wish_holder", _TEXT, nullable=False, server_default=""),
    )


TABLES = {kind.name: _table(kind) for kind in KINDS}
AUDIT = Table(
    "audit",
    metadata,
    Column("sequence", _ROW_ID, primary_key=True, autoincrement=True),
    Column("record", Text, nullable=False),
    sqlite_autoincrement=True,
)
CHANGES = Table(
    "changes",
    metadata,
    Column("sequence", _ROW_ID, primary_key=True, autoincrement=True),
    Column("kind", _TEXT, nullable=False),
    Column("key", _TEXT, nullable=False),
    sqlite_autoincrement=True,
)
# Token permissions are cached between requests until this count, kept by triggers, shows that a token changed.
TOKEN_CHANGES = Table("token_changes", metadata, Column("total", _ROW_ID, nullable=False))
# One row: what the ids of actions and incidents are made with (engine/incidents.py);
# no other database makes the same ones.
ACTION_IDS = Table("action_ids", metadata, Column("salt", _TEXT, primary_key=True))
# One row: who leads, of several servers on one database (lease.py). The epoch is the key, so that transactions which
# hold FOR KEY SHARE keep it from rising, and no renewal waits for them.
LEASE = Table("lease", metadata, Column("epoch", BigInteger, primary_key=True, autoincrement=False), *_lease_columns())
# A row for each cell but the default one, which has the table above: that is how servers know it that know no cells.
CELL_LEASES = Table(
    "cell_leases",
    metadata,
    Column("cell", _TEXT, primary_key=True, unique=True),
    Column("epoch", BigInteger, primary_key=True, autoincrement=False),
    *_lease_columns(),
)


def _index(name: str, table: str, *columns: str, where: str | None = None) -> None:
    only = None if where is None else text(where)
    Index(name, *(TABLES[table].c[column] for column in columns), sqlite_where=only, postgresql_where=only)


_index("incidents_state", "incidents", "state")
_index("actions_state", "actions", "state")
_index("actions_created", "actions", "created_s")
_index("actions_incident", "actions", "incident_id")
_index("events_time", "events", "time_s")
_index("deliveries_pending", "deliveries", "subscription_id", "group", "sequence", where="state = 'pending'")
_index("deliveries_failed", "deliveries", "subscription_id", "sequence", where="state = 'failed'")
_index("deliveries_event", "deliveries", "event_id")
_index("deliveries_told", "deliveries", "group", "subscription_id")
_index("tokens_node", "tokens", "node")
_index("evidence_incident", "evidence", "incident_id")
_index("evidence_state", "evidence", "state")
_index("node_checks_node", "node_checks", "node")
_index("node_checks_state", "node_checks", "state")
_index("node_checks_created", "node_checks", "created_s")
_index("attempts_job", "attempts", "job")
_index("attempts_end", "attempts", "end", where="\"end\" = ''")
_index("attempts_started", "attempts", "started_s")
_index("gpus_node", "gpus", "node")
_index("gpus_moved", "gpus", "moved", where="moved = 1")
_index("driver_errors_node", "driver_errors", "node")
_index("driver_errors_uuid", "driver_errors", "uuid", where="uuid <> ''")
_index("tickets_node", "tickets", "node")
Index("audit_subject", JsonText(AUDIT.c.record, "subject"))
Index("audit_who", JsonText(AUDIT.c.record, "who"))
Index("audit_time", JsonNumber(AUDIT.c.record, "time_s"))
