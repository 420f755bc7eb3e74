"""The store's tables, as append-only migrations; PRAGMA user_version counts those applied."""

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

_NODE_CHECKS = """
CREATE TABLE node_checks (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    node TEXT NOT NULL, state TEXT NOT NULL, record TEXT NOT NULL);
CREATE INDEX node_checks_node ON node_checks (node);
CREATE INDEX node_checks_state ON node_checks (state);
"""

_SUBSCRIPTION_HEALTH = """
CREATE TABLE subscription_health (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, subscription_id TEXT NOT NULL UNIQUE, record TEXT NOT NULL);
CREATE INDEX deliveries_told ON deliveries ("group", subscription_id);
CREATE INDEX deliveries_failed ON deliveries (subscription_id, sequence) WHERE state = 'failed';
"""

_ACCOUNTS = """
CREATE TABLE attempts (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    job TEXT NOT NULL, run TEXT NOT NULL, "end" TEXT NOT NULL, started_s REAL NOT NULL, record TEXT NOT NULL);
CREATE INDEX attempts_job ON attempts (job);
CREATE INDEX attempts_end ON attempts ("end") WHERE "end" = '';
CREATE INDEX attempts_started ON attempts (started_s);
CREATE TABLE memberships (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    job TEXT NOT NULL, started_s REAL NOT NULL, record TEXT NOT NULL);
CREATE TABLE gpus (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, uuid TEXT NOT NULL UNIQUE,
    node TEXT NOT NULL, seen_s REAL NOT NULL, moved INTEGER NOT NULL, record TEXT NOT NULL);
CREATE INDEX gpus_node ON gpus (node);
CREATE INDEX gpus_moved ON gpus (moved) WHERE moved = 1;
CREATE TABLE driver_errors (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    node TEXT NOT NULL, uuid TEXT NOT NULL, last_s REAL NOT NULL, record TEXT NOT NULL);
CREATE INDEX driver_errors_node ON driver_errors (node);
CREATE INDEX driver_errors_uuid ON driver_errors (uuid) WHERE uuid <> '';
CREATE TABLE tickets (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    node TEXT NOT NULL, opened_s REAL NOT NULL, record TEXT NOT NULL);
CREATE INDEX tickets_node ON tickets (node);
CREATE INDEX audit_subject ON audit (json_extract(record, '$.subject'));
"""

_INCIDENT_STATES = """
UPDATE incidents SET state = CASE
    WHEN json_extract(record, '$.fact') OR json_extract(record, '$.hold_rule') IN ('tries', 'report', 'mode')
        OR (json_array_length(record, '$.kinds') >= 2 AND json_extract(record, '$.confidence') >= 0.9)
    THEN 'confirmed' ELSE 'suspected' END
WHERE state = 'open';
UPDATE incidents SET record =
    json_set(record, '$.state', state, '$.since_s', json_extract(record, '$.detected_s'));
CREATE INDEX audit_time ON audit (json_extract(record, '$.time_s'));
CREATE INDEX audit_who ON audit (json_extract(record, '$.who'));
"""

# Token permissions are cached between requests until this count shows that a token changed.
_CHANGES_OF_TOKENS = """
CREATE TABLE token_changes (total INTEGER NOT NULL);
INSERT INTO token_changes VALUES (0);
CREATE TRIGGER token_made AFTER INSERT ON tokens BEGIN UPDATE token_changes SET total = total + 1; END;
CREATE TRIGGER token_changed AFTER UPDATE ON tokens BEGIN UPDATE token_changes SET total = total + 1; END;
CREATE TRIGGER token_deleted AFTER DELETE ON tokens BEGIN UPDATE token_changes SET total = total + 1; END;
"""

_LAST_CODES = """
CREATE TABLE last_codes (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, node TEXT NOT NULL UNIQUE, record TEXT NOT NULL);
"""

_FORGOTTEN_NODES = """
CREATE TABLE forgotten_nodes (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, node TEXT NOT NULL UNIQUE, forgotten_s REAL NOT NULL,
    record TEXT NOT NULL);
"""

_GPU_CHECKS = """
CREATE TABLE gpu_checks (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT, uuid TEXT NOT NULL UNIQUE, last_s REAL NOT NULL, record TEXT NOT NULL);
ALTER TABLE node_checks ADD COLUMN created_s REAL NOT NULL DEFAULT 0;
UPDATE node_checks SET created_s = json_extract(record, '$.created_s');
CREATE INDEX node_checks_created ON node_checks (created_s);
"""

MIGRATIONS: tuple[str, ...] = (
    _RECORDS + _TRAILS,
    _TOKENS_BY_NODE,
    _EVIDENCE,
    _NODE_CHECKS,
    _SUBSCRIPTION_HEALTH,
    _ACCOUNTS,
    _INCIDENT_STATES,
    _CHANGES_OF_TOKENS,
    _LAST_CODES,
    _FORGOTTEN_NODES,
    _GPU_CHECKS,
)
