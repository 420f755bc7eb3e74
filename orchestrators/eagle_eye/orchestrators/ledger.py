"""What a subscriber knows after a crash: deliveries seen, outcomes, pending reports; and files written whole.

The ledger is one SQLite file. Every method is a transaction that is on disk when it returns; thread-safe.
"""

from __future__ import annotations

import os
import secrets
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from eagle_eye.orchestrators.cloudevent import unix_seconds
from eagle_eye.schema.action import ActionRequest, Report


def write_whole(path: Path, content: bytes) -> None:
    """Write the content to disk, readable only by its owner; a crash leaves the old content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


# Begun, excluded, restarting: in progress, and how far. Unknown: to the server, which may ask for it anew.
ActionState = Literal["queued", "begun", "excluded", "restarting", "finished", "refused", "withdrawn", "unknown"]
_IN_PROGRESS: tuple[ActionState, ...] = ("begun", "excluded", "restarting")

# Long after a sender has given up redelivering: Standard Webhooks senders retry for some days.
MEMORY_S = 14 * 86_400.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS delivery (webhook_id TEXT PRIMARY KEY, received_s REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS action (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, action_id TEXT NOT NULL UNIQUE, state TEXT NOT NULL,
    received_s REAL NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS readmission (webhook_id TEXT PRIMARY KEY, nodes TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS report (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT, action_id TEXT NOT NULL, path TEXT NOT NULL,
    body BLOB NOT NULL, until_s REAL NOT NULL, fate TEXT NOT NULL DEFAULT 'owed');
CREATE TABLE IF NOT EXISTS epoch (one INTEGER PRIMARY KEY CHECK (one = 1), seen INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS name (one INTEGER PRIMARY KEY CHECK (one = 1), name TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS report_owed ON report (fate, sequence);
"""


@dataclass(frozen=True)
class OwedReport:
    """A report that the server has not confirmed; useless after ``until_s`` (Unix seconds)."""

    sequence: int
    action_id: str
    path: str
    report: Report
    until_s: float


class Ledger:
    """Open until ``close``. An action is recorded once, however often and under whatever delivery id it arrives."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        # Autocommit mode: transactions are started explicitly with IMMEDIATE, so that no reader is upgraded.
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.executescript(_SCHEMA)
        made = f"{socket.gethostname()[:64]}-{secrets.token_hex(4)}"
        self._connection.execute("INSERT OR IGNORE INTO name VALUES (1, ?)", (made,))
        self.name: str = self._connection.execute("SELECT name FROM name").fetchone()[0]  # of this subscriber

    def close(self) -> None:
        """Close the file; no method may be called afterwards."""
        with self._lock:
            self._connection.close()

    def seen(self, webhook_id: str) -> bool:
        """Whether a delivery under this id has been recorded."""
        with self._lock:
            row = self._connection.execute("SELECT 1 FROM delivery WHERE webhook_id = ?", (webhook_id,)).fetchone()
        return row is not None

    def highest_epoch(self, epoch: int) -> int:
        """Return the highest epoch seen so far, this one included."""
        with self._lock:
            row = self._connection.execute("SELECT seen FROM epoch").fetchone()
        if row is not None and row[0] >= epoch:
            return int(row[0])
        with self._transaction() as execute:
            execute.execute(
                "INSERT INTO epoch VALUES (1, ?) ON CONFLICT (one) DO UPDATE SET seen = max(seen, excluded.seen)",
                (epoch,),
            )
        return epoch

    def record_delivery(self, webhook_id: str, now_s: float) -> None:
        """Record a delivery, so that later ones with this id are duplicates; forgets those older than MEMORY_S."""
        with self._transaction() as execute:
            self._remember(execute, webhook_id, now_s)

    def record_action(self, webhook_id: str, action: ActionRequest, state: ActionState, now_s: float) -> bool:
        """Record the delivery and its action together; False where the action was known before."""
        with self._transaction() as execute:
            self._remember(execute, webhook_id, now_s)
            changed = execute.execute(
                "INSERT INTO action (action_id, state, received_s, body) VALUES (?, ?, ?, ?)"
                " ON CONFLICT (action_id) DO UPDATE"
                " SET state = excluded.state, received_s = excluded.received_s, body = excluded.body"
                " WHERE action.state = 'unknown'",
                (action.action_id, state, now_s, msgspec.json.encode(action)),
            ).rowcount
        return changed == 1

    def withdraw(self, webhook_id: str, action_id: str, now_s: float) -> bool:
        """Withdraw a queued action; False where it is unknown or was already begun."""
        with self._transaction() as execute:
            self._remember(execute, webhook_id, now_s)
            changed = execute.execute(
                "UPDATE action SET state = 'withdrawn' WHERE action_id = ? AND state = 'queued'", (action_id,)
            ).rowcount
        return changed == 1

    def record_readmission(self, webhook_id: str, nodes: list[str], now_s: float) -> None:
        """Record the delivery and its readmission together."""
        with self._transaction() as execute:
            self._remember(execute, webhook_id, now_s)
            if nodes:
                text = msgspec.json.encode(nodes).decode()
                execute.execute("INSERT OR IGNORE INTO readmission VALUES (?, ?)", (webhook_id, text))

    def readmissions(self) -> list[tuple[str, list[str]]]:
        """Return the pending readmissions: (delivery, nodes)."""
        with self._lock:
            rows = self._connection.execute("SELECT webhook_id, nodes FROM readmission ORDER BY rowid").fetchall()
        return [(webhook_id, msgspec.json.decode(nodes, type=list[str])) for webhook_id, nodes in rows]

    def readmitted(self, webhook_id: str) -> None:
        """Mark the readmission as done."""
        with self._transaction() as execute:
            execute.execute("DELETE FROM readmission WHERE webhook_id = ?", (webhook_id,))

    def named_after(self, nodes: list[str], time_s: float) -> list[str]:
        """Return those of the nodes that an action, detected after ``time_s`` and not withdrawn, excludes."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT body FROM action WHERE state NOT IN ('refused', 'withdrawn', 'unknown')"
            ).fetchall()
        later = [msgspec.json.decode(row[0], type=ActionRequest) for row in rows]
        later = [action for action in later if unix_seconds(action.detected, "detected") > time_s]
        named = {node for action in later for node in action.exclude}
        return [node for node in nodes if node in named]

    def begun_as(self, action: ActionRequest) -> str | None:
        """Return another action with the same kind, job, attempt and nodes that was begun; None if there is none."""
        begun = [other for state in (*_IN_PROGRESS, "finished") for other in self.actions(state)]
        same = (other.action_id for other in begun if _work(other) == _work(action))
        return next((known for known in same if known != action.action_id), None)

    def begin(self, action_id: str) -> bool:
        """Claim the action for the caller; False where it was withdrawn or is not queued."""
        return self._move(action_id, "begun", "queued")

    def mark(self, action_id: str, state: ActionState) -> None:
        """Record that the action, which was begun, has reached ``state``."""
        self._move(action_id, state, *_IN_PROGRESS)

    def finish(self, action_id: str) -> None:
        """Mark the action as done or failed: it is not begun again."""
        self._move(action_id, "finished", *_IN_PROGRESS)

    def refuse(self, action_id: str) -> bool:
        """Refuse a queued action; False where it was withdrawn meanwhile."""
        return self._move(action_id, "refused", "queued")

    def let_go(self, action_id: str) -> bool:
        """Note that the server does not know a queued action: no report is owed, and asked for anew it is taken."""
        with self._transaction() as execute:
            execute.execute("DELETE FROM report WHERE action_id = ? AND fate = 'owed'", (action_id,))
            return self._move(action_id, "unknown", "queued")

    def actions(self, state: ActionState) -> list[ActionRequest]:
        """Return the actions in this state, in order of arrival."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT body FROM action WHERE state = ? ORDER BY sequence", (state,)
            ).fetchall()
        return [msgspec.json.decode(row[0], type=ActionRequest) for row in rows]

    def state_of(self, action_id: str) -> str | None:
        """Return the action's state, None for an unknown one."""
        with self._lock:
            row = self._connection.execute("SELECT state FROM action WHERE action_id = ?", (action_id,)).fetchone()
        return None if row is None else str(row[0])

    def asked_as(self, action_id: str) -> ActionRequest | None:
        """Return the action as it was recorded, None for an unknown one."""
        with self._lock:
            row = self._connection.execute("SELECT body FROM action WHERE action_id = ?", (action_id,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=ActionRequest)

    def last_report(self, action_id: str) -> Report | None:
        """Return the newest report on the action, None if there is none."""
        with self._lock:
            row = self._connection.execute(
                "SELECT body FROM report WHERE action_id = ? ORDER BY sequence DESC LIMIT 1", (action_id,)
            ).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=Report)

    def owe(self, action_id: str, path: str, report: Report, until_s: float) -> None:
        """Store a report to be sent, if necessary by a later process, until confirmed or ``until_s``."""
        with self._transaction() as execute:
            execute.execute(
                "INSERT INTO report (action_id, path, body, until_s) VALUES (?, ?, ?, ?)",
                (action_id, path, msgspec.json.encode(report), until_s),
            )

    def owed(self) -> list[OwedReport]:
        """Return the pending reports in the order in which they were made."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT sequence, action_id, path, body, until_s FROM report WHERE fate = 'owed' ORDER BY 1"
            ).fetchall()
        return [
            OwedReport(sequence, action_id, path, msgspec.json.decode(body, type=Report), until_s)
            for sequence, action_id, path, body, until_s in rows
        ]

    def settle(self, sequence: int, fate: Literal["delivered", "rejected", "expired"]) -> None:
        """Mark the report as settled: it is not sent again."""
        with self._transaction() as execute:
            execute.execute("UPDATE report SET fate = ? WHERE sequence = ?", (fate, sequence))

    def _move(self, action_id: str, state: ActionState, *before: ActionState) -> bool:
        marks = ", ".join("?" * len(before))
        with self._transaction() as execute:
            changed = execute.execute(
                f"UPDATE action SET state = ? WHERE action_id = ? AND state IN ({marks})",  # noqa: S608 - marks only
                (state, action_id, *before),
            ).rowcount
        return changed == 1

    @staticmethod
    def _remember(execute: sqlite3.Connection, webhook_id: str, now_s: float) -> None:
        execute.execute("INSERT OR IGNORE INTO delivery VALUES (?, ?)", (webhook_id, now_s))
        old_s = now_s - MEMORY_S
        execute.execute("DELETE FROM delivery WHERE received_s < ?", (old_s,))
        execute.execute(
            "DELETE FROM action WHERE received_s < ? AND state IN ('finished', 'refused', 'withdrawn', 'unknown')",
            (old_s,),
        )
        execute.execute("DELETE FROM report WHERE until_s < ? AND fate <> 'owed'", (old_s,))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Put what is written inside on disk at once at the end, or none of it."""
        with self._transaction():
            yield

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            if self._connection.in_transaction:  # of this thread: nobody else has the lock
                yield self._connection
                return
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")


def _work(action: ActionRequest) -> tuple[str, str, int, frozenset[str]]:
    return action.kind, action.job, action.attempt, frozenset(action.exclude)
