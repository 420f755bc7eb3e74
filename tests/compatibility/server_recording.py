"""Writes what a server of the version at hand keeps, and what it means, for later versions to be tested against.

``python tests/compatibility/server_recording.py FOLDER``, with the folders of an earlier commit and the commit's own
root first on PYTHONPATH, writes ``records.db.gz``, ``history.db.gz`` and ``data.json``: all of it as that version
reads it. It imports only what every version has.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.schema.frame import encode_frame
from eagle_eye.server.history.journal import Journal
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.records import AuditEntry, Job, Node
from eagle_eye.server.security import auth
from eagle_eye.server.store import store
from eagle_eye.server.store.sql_store import SqlStore, open_file
from tests.server.builders import NOW, FakeClock, action, batch_of, event, frame, incident, subscription

FRAMES = 3
WINDOW_S = 900.0
DATABASES = ("records.db", "history.db")
UNREACHABLE = "http://127.0.0.1:9/hook"  # no test asks the network for it
KINDS = ("INCIDENTS", "ACTIONS", "NODES", "JOBS", "SUBSCRIPTIONS", "TOKENS", "EVENTS", "DELIVERIES")


def meaning_of(records: SqlStore) -> dict[str, Any]:
    """Return all that the records hold, as plain JSON."""
    kept = {kind: msgspec.to_builtins(records.page(getattr(store, kind), {}).items) for kind in KINDS}
    return {**kept, "audit": msgspec.to_builtins(records.audit().items)}


def main(folder: Path) -> None:
    """Write the recording."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        data = Path(name)
        records = open_file(data / DATABASES[0])
        _, admin = auth.mint("admin", None, NOW, None)
        _, agent = auth.mint("agent", "n1", NOW, 3600.0)
        reported = AuditEntry(time_s=NOW, who=admin.id, verb="acknowledge", subject="inc_1", detail="seen")
        records.commit(store.Change(subscriptions=(subscription(url=UNREACHABLE),), tokens=(admin, agent)))
        records.commit(
            store.Change(
                incidents=(incident(), incident("inc_2", state="closed", ended_s=NOW + 60)),
                actions=(action(), action("act_2", "done", incident_id="inc_2")),
                jobs=(Job(job="job", attempt=1, state="running", ranks=[], restart_owner="", updated_s=NOW),),
                nodes=(Node(node="n1", state="excluded", reason="act_2", updated_s=NOW),),
                events=(event(),),
                audit=(reported,),
            )
        )
        history: Any = Journal(data / DATABASES[1], HistorySettings(), 1 << 20, FakeClock())
        entries = [(n, NOW + n, encode_frame(frame(n, time_s=NOW + n))) for n in range(1, FRAMES + 1)]
        history.submit(batch_of("n1", "stream-n1", NOW + FRAMES, 0.5, entries)).result(10.0)
        meaning = meaning_of(records)
        records.close()
        history.close()
        for database in DATABASES:
            (folder / f"{database}.gz").write_bytes(gzip.compress((data / database).read_bytes(), mtime=0))
        meaning["frames"] = _frames(data)
    (folder / "data.json").write_text(f"{json.dumps(meaning, indent=1, sort_keys=True)}\n", encoding="utf-8")


def _frames(data: Path) -> list[list[Any]]:
    """Return what the history tells of its frames: in early versions the journal, later what stands before it."""
    try:
        from eagle_eye.server.history.embedded_history import EmbeddedHistory
    except ModuleNotFoundError:
        history: Any = Journal(data / DATABASES[1], HistorySettings(), 1 << 20, FakeClock())
    else:
        history = EmbeddedHistory(data, HistorySettings(), 1 << 20, FakeClock(), WINDOW_S)
    frames = [[seen.frame.node, seen.frame.sequence, seen.received_s] for seen in history.replay(0.0, FRAMES)]
    history.close()
    return frames


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("folder", type=Path)
    main(arguments.parse_args().folder)
