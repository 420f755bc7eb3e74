"""The tables of the records: one schema on two engines."""

from __future__ import annotations

import secrets

from alembic import context, op
from sqlalchemy import BigInteger, Column, Double, Integer, MetaData, Table, Text

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
    "silences": ("id", "state until_s", ""),
    "tokens": ("id", "sha256 node", "node"),
    "ended_sessions": ("person", "ended_s", ""),
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
    "cells": ("cell", "", ""),
    "job_cells": ("job", "cell over_s", "over_s"),
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
    """Make the tables, and the rows of those that have one: no token changed, nobody leads."""
    connection = op.get_bind()
    sqlite = connection.dialect.name == "sqlite"
    _tables().create_all(connection, checkfirst=False)
    for name, of in INDEXES.items():
        op.execute(f"CREATE INDEX {name} ON {of}")
    for name, field in AUDIT_FIELDS.items():
        written = f"json_extract(record, '$.{field}')" if sqlite else _postgresql_field(field)
        op.execute(f"CREATE INDEX {name} ON audit ({written})")
    op.execute("INSERT INTO token_changes (total) VALUES (0)")
    op.execute(f"INSERT INTO action_ids (salt) VALUES ('{secrets.token_hex(16)}')")  # noqa: S608 - our own
    op.execute("INSERT INTO lease (epoch, renewals, holder, backend_pid) VALUES (0, 0, '', 0)")
    for statement in context.config.attributes["triggers"]:
        connection.exec_driver_sql(statement)
    if sqlite:
        connection.exec_driver_sql("PRAGMA user_version = 1")  # other programs' files have 0


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
        ("audit", (Column("record", Text, nullable=False),)),
        ("changes", (Column("kind", TEXT, nullable=False), Column("key", TEXT, nullable=False))),
    ):
        sequence = Column("sequence", ROW_ID, primary_key=True, autoincrement=True)
        Table(trail, metadata, sequence, *columns, sqlite_autoincrement=True)
    Table("token_changes", metadata, Column("total", ROW_ID, nullable=False))
    Table("action_ids", metadata, Column("salt", TEXT, primary_key=True))
    for table, keys in (("lease", ()), ("cell_leases", (Column("cell", TEXT, primary_key=True, unique=True),))):
        epoch = Column("epoch", BigInteger, primary_key=True, autoincrement=False)
        Table(table, metadata, *keys, epoch, *_lease_columns())
    return metadata


def _column(name: str, *, nullable: bool, unique: bool) -> Column[object]:
    if name in ("active", "moved"):
        return Column(name, Integer, nullable=nullable)
    if name == "sequence":
        return Column(name, BigInteger, nullable=nullable)
    return Column(name, Double if name.endswith("_s") else TEXT, nullable=nullable, unique=unique or None)


def _lease_columns() -> tuple[Column[object], ...]:
    return (
        Column("renewals", BigInteger, nullable=False),
        Column("holder", TEXT, nullable=False),
        Column("backend_pid", Integer, nullable=False),
        Column("timeline", BigInteger, nullable=False, server_default="0"),  # 0 is not known
        Column("wish_number", BigInteger, nullable=False, server_default="0"),
        Column("wish_nodes", Integer, nullable=False, server_default="0"),
        Column("wish_holder", TEXT, nullable=False, server_default=""),
    )


def _postgresql_field(field: str) -> str:
    written = f"(record)::jsonb ->> '{field}'"
    return f"(({written})::float8)" if field.endswith("_s") else f"({written})"
