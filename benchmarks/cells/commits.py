"""How many decisions one PostgreSQL takes in a second: cells write one at a time, each decision in a transaction."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from eagle_eye.server.model.records import AuditEntry
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import open_records
from eagle_eye.server.store.store import INCIDENTS, Change, Store
from tests.server.builders import incident
from tests.server.postgresql_server import PostgresqlServer


def measure(postgresql: PostgresqlServer, writers: int, seconds: float) -> dict[str, Any]:
    """Return how many decisions processes commit together; the database is as durable as ``postgresql`` is set up."""
    url = postgresql.new_database()
    open_records(RecordsSettings(url), Path("/-")).close()
    context = multiprocessing.get_context("spawn")
    begin, counts = context.Barrier(writers), context.SimpleQueue()
    processes = [
        context.Process(target=_write, args=(url, number, begin, counts, seconds)) for number in range(writers)
    ]
    for process in processes:
        process.start()
    done = [counts.get() for _ in processes]
    for process in processes:
        process.join()
    return {"writers": writers, "seconds": seconds, "decisions_per_second": sum(done) / seconds}


def _write(url: str, writer: int, begin: Barrier, counts: Any, seconds: float) -> None:
    store = open_records(RecordsSettings(url), Path("/-"))
    begin.wait()
    end_s, count = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        id_ = f"inc_{writer}_{count}"

        def work(inner: Store, id_: str = id_) -> Change:
            """Read, as a decision does, and write an incident with its entry in the audit trail."""
            inner.get(INCIDENTS, id_)
            entry = AuditEntry(time_s=time.time(), who="server", verb="open", subject=id_)
            return Change(incidents=(incident(id_),), audit=(entry,))

        store.update(work)
        count += 1
    store.close()
    counts.put(count)
