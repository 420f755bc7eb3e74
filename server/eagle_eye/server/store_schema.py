"""The store's tables, as migrations that are only ever appended to; PRAGMA user_version counts those applied."""

from __future__ import annotations

_RECORDS = """
CREATE TABLE incidents (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    job TEXT NOT NULL, state TEXT NOT NULL, fault TEXT NOT NULL, record TEXT NOT NULL);
CREATE INDEX incidents_state ON incidents (state);
CREATE TABLE actions (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    incident_id TEXT NOT NULL, job TEXT NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL,
    created_s REAL NOT NULL, record TEXT NOT NULL);
CREATE INDEX actions_state ON actions (state);
CREATE INDEX actions_created ON actions (created_s);
CREATE INDEX actions_incident ON actions (incident_id);
CREATE TABLE nodes (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, node TEXT NOT NULL UNIQUE, state TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE jobs (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, job TEXT NOT NULL UNIQUE, state TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE subscriptions (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, active INTEGER NOT NULL, record TEXT NOT NULL);
CREATE TABLE tokens (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL UNIQUE,
    record TEXT NOT NULL);
CREATE TABLE events (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    type TEXT NOT NULL, job TEXT NOT NULL, "group" TEXT NOT NULL, time_s REAL NOT NULL, record TEXT NOT NULL);
CREATE INDEX events_time ON events (time_s);
CREATE TABLE deliveries (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    subscription_id TEXT NOT NULL, event_id TEXT NOT NULL, type TEXT NOT NULL, state TEXT NOT NULL,
    "group" TEXT NOT NULL, sequence INTEGER NOT NULL, due_s REAL NOT NULL, expires_s REAL, created_s REAL NOT NULL,
    record TEXT NOT NULL);
CREATE INDEX deliveries_pending ON deliveries (subscription_id, "group", sequence) WHERE state = 'pending';
CREATE INDEX deliveries_event ON deliveries (event_id);
"""

_TRAILS = """
CREATE TABLE audit (sequence INTEGER PRIMARY KEY AUTOINCREMENT, record TEXT NOT NULL);
CREATE TRIGGER audit_is_kept BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
CREATE TRIGGER audit_is_final BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the audit trail is append-only'); END;
CREATE TABLE changes (sequence INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, "key" TEXT NOT NULL);
"""

_TOKENS_BY_NODE = """
ALTER TABLE tokens ADD COLUMN node TEXT;
UPDATE tokens SET node = json_extract(record, '$.node');
CREATE INDEX tokens_node ON tokens (node);
"""

_EVIDENCE = """
CREATE TABLE evidence (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    incident_id TEXT NOT NULL, job TEXT NOT NULL, node TEXT NOT NULL, state TEXT NOT NULL, record TEXT NOT NULL);
CREATE INDEX evidence_incident ON evidence (incident_id);
CREATE INDEX evidence_state ON evidence (state);
"""

MIGRATIONS: tuple[str, ...] = (_RECORDS + _TRAILS, _TOKENS_BY_NODE, _EVIDENCE)
