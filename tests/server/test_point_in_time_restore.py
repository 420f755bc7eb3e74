"""The database is restored to a moment, from a base backup and archived WAL, as docs/how-to/postgresql.md has it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.demo.two_servers import postgresql_programs
from eagle_eye.orchestrators.protocol import JobState
from eagle_eye.schema.action import ACTION_REQUESTED
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import open_records
from eagle_eye.server.store.store import Change
from tests.server.builders import SECRET, action
from tests.server.gate import gate
from tests.server.own_process import WITHIN_S, OwnProcess, serving, wait_until
from tests.server.postgresql_server import (
    PostgresqlServer,
    owned_by_ordinary_user,
    run_as_ordinary_user,
)
from tests.server.postgresql_server import serving as serving_postgresql
from tests.server.shipped_receiver import shipped

pytestmark = pytest.mark.slow  # the database is backed up and restored, and servers start four times

JOB = JobState(0, frozenset({"n1", "n2"}), running=True)
ARCHIVING = """archive_mode = on
archive_command = 'mkdir -p ../archive && cp %p ../archive/%f'
"""


@pytest.fixture
def postgresql() -> Iterator[PostgresqlServer]:
    """A server that archives its WAL."""
    if (bin_ := postgresql_programs()) is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql-15)")
    with serving_postgresql(bin_, ARCHIVING) as server:
        yield server


def back_up(postgresql: PostgresqlServer) -> None:
    place = ("-h", str(postgresql.folder), "-p", str(postgresql.port), "-U", "eagle_eye")
    base = str(postgresql.folder / "base")
    run_as_ordinary_user(
        str(postgresql.bin / "pg_basebackup"), *place, "-D", base, "--checkpoint=fast", "--wal-method=none"
    )


def moment(postgresql: PostgresqlServer) -> str:
    """Return the time of the database's clock, with what was committed before it and nothing after it."""
    [(now,)] = postgresql.execute("SELECT clock_timestamp()::text")
    time.sleep(0.1)
    return str(now)


def restore(postgresql: PostgresqlServer, until: str) -> None:
    """Put the database back to the moment, as one that may be written."""
    postgresql.execute("SELECT pg_switch_wal()")
    postgresql.control("stop", "--wait", "--mode=fast")  # which archives what was written last
    data, base = postgresql.folder / "data", postgresql.folder / "base"
    data.rename(postgresql.folder / "lost")
    base.rename(data)
    with (data / "postgresql.auto.conf").open("a", encoding="utf-8") as settings:
        settings.write("restore_command = 'cp ../archive/%f %p'\nrecovery_target_action = 'promote'\n")
        settings.write(f"recovery_target_time = '{until}'\n")
    (data / "recovery.signal").touch()
    owned_by_ordinary_user(data / "recovery.signal")
    postgresql.control("start", "--wait")
    wait_until(lambda: postgresql.execute("SELECT pg_is_in_recovery()") == [(False,)])


@contextmanager
def leading(url: str, folder: Path) -> Iterator[OwnProcess]:
    """Run the only server until the block ends; it leads when the block begins."""
    file = folder / "server.toml"
    records = f'[records]\nurl = "{url}"\nlease_s = 2.0\n'
    file.write_text(f"{records}[webhooks]\nallow_private = true\nheartbeat_s = 0.0\n", encoding="utf-8")

    def leads() -> bool:
        try:
            return server.client.get("/leadz").status_code == 200
        except httpx.TransportError:
            return False

    with serving(folder / "data", "--config", str(file)) as server:
        wait_until(leads)
        yield server


def epoch(server: OwnProcess) -> int:
    return int(server.client.get("/leadz").json()["epoch"])


def test_after_a_restore_the_epoch_rises_above_what_subscribers_have_seen_and_nothing_is_carried_out_twice(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    url, until = postgresql.new_database(), ""
    on_its_way, may_pass = threading.Event(), threading.Event()

    def hold(event: dict[str, Any]) -> None:
        if event["type"] == ACTION_REQUESTED:
            on_its_way.set()
            may_pass.wait(WITHIN_S)

    with shipped(tmp_path, JOB, SECRET) as orchestrator, gate(orchestrator.url) as target:
        target.before = hold
        with leading(url, tmp_path) as server:
            back_up(postgresql)
            body = {"url": target.url, "secret": SECRET}
            assert server.client.post("/api/v1/subscriptions", json=body).status_code == 201
            store = open_records(RecordsSettings(url), Path("/-"))
            store.commit(
                Change(actions=(action(detected_s=time.time(), expires_s=time.time() + 600, state="awaiting"),))
            )
            store.close()
            assert server.client.post("/api/v1/actions/act_1/approve").status_code == 200
            assert on_its_way.wait(WITHIN_S)
            until = moment(postgresql)
            may_pass.set()
            assert target.wait_for(ACTION_REQUESTED, epoch(server)) == 202
            assert [one.action_id for one in orchestrator.queued()] == ["act_1"]  # begun, after the moment
        for _ in range(2):
            with leading(url, tmp_path) as server:
                wait_until(lambda: orchestrator.ledger.highest_epoch(0) == epoch(server))
        seen = orchestrator.ledger.highest_epoch(0)
        restore(postgresql, until)
        assert postgresql.execute("SELECT epoch FROM lease", url.partition("@/")[2].partition("?")[0]) < [(seen,)]
        delivered = len(target.passed)
        with leading(url, tmp_path) as server:
            wait_until(lambda: epoch(server) > seen)
            wait_until(lambda: any(answered(one, ACTION_REQUESTED) for one in target.passed[delivered:]))
            assert [one["id"] for one in server.client.get("/api/v1/actions").json()["items"]] == ["act_1"]
        assert orchestrator.queued() == []


def answered(passed: tuple[dict[str, Any], int], kind: str) -> bool:
    """Return whether an event of the kind was taken."""
    event, status = passed
    return event["type"] == kind and status in (200, 202, 204)
