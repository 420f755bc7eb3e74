"""The records as one schema on two engines.

A SQLite file of an earlier server, which counted its own migrations, gets what it lacks: tables, columns, indexes and
the states that incidents have since.
"""

from __future__ import annotations

from alembic import context, op
from sqlalchemy import BigInteger, Column, Connection, Double, Integer, MetaData, Table, Text, inspect, text

revision = "0001"
down_revision = None

# Each table's key, its other columns, and those of them that may be empty.
RECORDS = {
    "incidents": ("id", "job state fault", ""),
    "actions": ("id", "incident_id job kind state created_s", ""),
    "nodes": ("node", "state", ""),
    "jobs": ("job", "state", ""),
    "subscriptions": ("id", "active", ""),
    "deliveries": (
        "id",
        "subscription_id event_id type state group sequence due_s expires_s created_s",
        "expires_s",
    ),
    "tokens": ("id", "sha256 node", "node"),
    "events": ("id", "type job group time_s", ""),
    "evidence": ("id", "incident_id job node state", ""),
    "node_checks": ("id", "node state created_s", ""),
    "subscription_health": ("subscription_id", "", ""),
    "attempts": ("id", "job run end started_s", ""),
    "memberships": ("id", "job started_s", ""),
    "gpus": ("uuid", "node seen_s moved", ""),
    "gpu_checks": ("uuid", "last_s", ""),
    "driver_errors": ("id", "node uuid last_s", ""),
    "tickets": ("id", "node opened_s", ""),
    "last_codes": ("node", "", ""),
    "forgotten_nodes": ("node", "forgotten_s", ""),
}
INDEXES = {
    "incidents_state": "incidents (state)",
    "actions_state": "actions (state)",
    "actions_created": "actions (created_s)",
    "actions_incident": "actions (incident_id)",
    "events_time": "events (time_s)",
    "deliveries_pending": "deliveries (subscription_id, \"group\", sequence) WHERE state = 'pending'",
    "deliveries_failed": "deliveries (subscription_id, sequence) WHERE state = 'failed'",
    "deliveries_event": "deliveries (event_id)",
    "deliveries_told": 'deliveries ("group", subscription_id)',
    "tokens_node": "tokens (node)",
    "evidence_incident": "evidence (incident_id)",
    "evidence_state": "evidence (state)",
    "node_checks_node": "node_checks (node)",
    "node_checks_state": "node_checks (state)",
    "node_checks_created": "node_checks (created_s)",
    "attempts_job": "attempts (job)",
    "attempts_end": 'attempts ("end") WHERE "end" = \'\'',
    "attempts_started": "attempts (started_s)",
    "gpus_node": "gpus (node)",
    "gpus_moved": "gpus (moved) WHERE moved = 1",
    "driver_errors_node": "driver_errors (node)",
    "driver_errors_uuid": "driver_errors (uuid) WHERE uuid <> ''",
    "tickets_node": "tickets (node)",
}
# In the audit trail's JSON, as each engine writes it.
AUDIT_FIELDS = {"audit_subject": "subject", "audit_who": "who", "audit_time": "time_s"}
ROW_ID = BigInteger().with_variant(Integer, "sqlite")
TEXT = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Make what is not there."""
    connection = op.get_bind()
    sqlite = connection.dialect.name == "sqlite"
    tables = _tables()
    there = set(inspect(connection).get_table_names())
    if sqlite and "incidents" in there:
        _earlier(connection, there)
    tables.create_all(connection, checkfirst=True)
    for name, of in INDEXES.items():
        op.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {of}")
    for name, field in AUDIT_FIELDS.items():
        written = f"json_extract(record, '$.{field}')" if sqlite else _postgresql_field(field)
        op.execute(f"CREATE INDEX IF NOT EXISTS {name} ON audit ({written})")
    if not connection.execute(text("SELECT 1 FROM token_changes")).first():
        op.execute("INSERT INTO token_changes (total) VALUES (0)")
    for statement in context.config.attributes["triggers"]:
        connection.exec_driver_sql(statement)
    if sqlite:
        # By which servers before this one know that they can go on with the file.
        connection.exec_driver_sql("PRAGMA user_version = 11")


def _tables() -> MetaData:
    metadata = MetaData()
    for table, (key, others, nullable) in RECORDS.items():
        names = (key, *others.split())
        unique = (key, "sha256")
        Table(
            table,
            metadata,
            Column("rowid", ROW_ID, primary_key=True, autoincrement=True),
            *(_column(name, nullable=name in nullable.split(), unique=name in unique) for name in names),
            Column("record", Text, nullable=False),
            sqlite_autoincrement=True,
        )
    for trail, columns in (
        ("audit", ()),
        ("changes", (Column("kind", TEXT, nullable=False), Column("key", TEXT, nullable=False))),
    ):
        sequence = Column("sequence", ROW_ID, primary_key=True, autoincrement=True)
        record = () if columns else (Column("record", Text, nullable=False),)
        Table(trail, metadata, sequence, *columns, *record, sqlite_autoincrement=True)
    Table("token_changes", metadata, Column("total", ROW_ID, nullable=False))
    return metadata


def _column(name: str, *, nullable: bool, unique: bool) -> Column[object]:
    if name in ("active", "moved"):
        return Column(name, Integer, nullable=nullable)
    if name == "sequence":
        return Column(name, BigInteger, nullable=nullable)
    return Column(name, Double if name.endswith("_s") else TEXT, nullable=nullable, unique=unique or None)


def _postgresql_field(field: str) -> str:
    written = f"(record)::jsonb ->> '{field}'"
    return f"(({written})::float8)" if field.endswith("_s") else f"({written})"


def _earlier(connection: Connection, there: set[str]) -> None:
    """Bring the tables of earlier servers to what theirs was last, where they lack columns or states."""
    columns = {table: {column["name"] for column in inspect(connection).get_columns(table)} for table in there}
    if "node" not in columns["tokens"]:
        op.execute("ALTER TABLE tokens ADD COLUMN node TEXT")
        op.execute("UPDATE tokens SET node = json_extract(record, '$.node')")
    if "node_checks" in there and "created_s" not in columns["node_checks"]:
        op.execute("ALTER TABLE node_checks ADD COLUMN created_s REAL NOT NULL DEFAULT 0")
        op.execute("UPDATE node_checks SET created_s = json_extract(record, '$.created_s')")
    op.execute(
        "UPDATE incidents SET state = CASE"
        " WHEN json_extract(record, '$.fact') OR json_extract(record, '$.hold_rule') IN ('tries', 'report', 'mode')"
        " OR (json_array_length(record, '$.kinds') >= 2 AND json_extract(record, '$.confidence') >= 0.9)"
        " THEN 'confirmed' ELSE 'suspected' END WHERE state = 'open'"
    )
    op.execute(
        "UPDATE incidents SET record = json_set(record, '$.state', state, '$.since_s',"
        " json_extract(record, '$.detected_s')) WHERE json_extract(record, '$.since_s') IS NULL"
    )
