"""A full disk, damaged files, a clock that jumps: the server says so, keeps what it acknowledged, goes on by itself."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.server.app import create_app
from eagle_eye.server.history.embedded_history import HISTORY_FILE
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file
from eagle_eye.server.store.store import INCIDENTS, Change
from tests.server.builders import FakeClock, Running, body, frame, incident, running, settings

DISK_BYTES = 8 << 20
CHUNK_BYTES = 64 << 10
BACK_WITHIN_REQUESTS = 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a file system of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system that is small enough to fill")
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("a tmpfs cannot be mounted here (a container needs CAP_SYS_ADMIN)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write to the file until there is no room for another byte."""
    with path.open("wb", buffering=0) as file:
        for size in (CHUNK_BYTES, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


def acknowledged(server: Running, first: int, count: int) -> list[int]:
    """Send frames one by one; return the sequences of those that were acknowledged."""
    found = []
    for sequence in range(first, first + count):
        answer = server.send(body(frame(sequence, dropped={"x" * 60_000: 1})))
        assert answer.status_code in (200, 503), answer.text
        if answer.status_code == 200:
            found.append(sequence)
        else:
            assert answer.headers["retry-after"] == "5"
    return found


def test_a_full_disk_is_said_loses_nothing_acknowledged_and_ends_by_itself(small_disk: Path) -> None:
    clock = FakeClock()
    with running(small_disk / "data", clock) as server:
        kept = acknowledged(server, 1, 3)
        assert kept == [1, 2, 3]
        fill(small_disk / "filler")
        kept += acknowledged(server, 4, 12)
        assert len(kept) < 15
        clock.advance(5.0)
        assert server.client.get("/readyz").json()["checks"]["storage"] != "ok"
        (small_disk / "filler").unlink()
        clock.advance(5.0)
        after = acknowledged(server, 100, BACK_WITHIN_REQUESTS)
        assert after[-1] == 100 + BACK_WITHIN_REQUESTS - 1
        assert server.client.get("/readyz").json()["checks"]["storage"] == "ok"
    with running(small_disk / "data", clock) as server:
        assert {seen.sequence for seen, _ in server.watcher.recovered} >= {*kept, *after}


@pytest.mark.parametrize("name", [RECORDS_FILE, HISTORY_FILE])
def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not a database, nor ever was one" * 200)
    with pytest.raises(StoreUnavailable, match=name):
        create_app(settings(tmp_path))
    assert (tmp_path / name).read_bytes() == b"not a database, nor ever was one" * 200


@pytest.mark.parametrize("name", [RECORDS_FILE, HISTORY_FILE])
@pytest.mark.parametrize("whole", [True, False])
def test_a_database_that_is_deleted_or_replaced_is_said_at_once(tmp_path: Path, name: str, whole: bool) -> None:
    clock = FakeClock()
    with running(tmp_path, clock) as server:
        assert server.send(body(frame(1))).status_code == 200
        if whole:  # a backup put back, as nobody should while the server runs
            shutil.copy(tmp_path / name, tmp_path / "copy")
            (tmp_path / "copy").replace(tmp_path / name)
        else:
            (tmp_path / f"{name}-wal").unlink()
        clock.advance(5.0)
        assert server.send(body(frame(2))).status_code == (503 if name == HISTORY_FILE else 200)
        said = server.client.get("/readyz").json()["checks"]["storage"]
        assert f"{name}{'' if whole else '-wal'} was deleted or replaced" in said


def test_a_damaged_table_is_503_and_the_rest_is_served(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.dispatcher.services.store.commit(Change(incidents=(incident(),)))
    whole = (tmp_path / RECORDS_FILE).read_bytes()
    with sqlite3.connect(tmp_path / RECORDS_FILE) as database:
        root, size = database.execute(
            "SELECT rootpage, (SELECT page_size FROM pragma_page_size) FROM sqlite_schema WHERE name = 'incidents'"
        ).fetchone()
    database.close()
    damaged = bytearray(whole)
    damaged[(root - 1) * size : root * size] = b"\xff" * size
    (tmp_path / RECORDS_FILE).write_bytes(damaged)
    with running(tmp_path) as server:
        answer = server.client.get("/api/v1/incidents")
        assert (answer.status_code, answer.json()["reason"]) == (503, "storage")
        assert server.client.get("/api/v1/nodes").status_code == 200
        assert server.send(body(frame(1))).status_code == 200
    (tmp_path / RECORDS_FILE).write_bytes(whole)
    with running(tmp_path) as server:
        assert len(server.client.get("/api/v1/incidents").json()["items"]) == 1


def test_a_log_that_was_cut_off_anywhere_holds_whole_commits_in_order(tmp_path: Path) -> None:
    store = open_file(tmp_path / RECORDS_FILE)
    for number in range(5):
        store.commit(Change(incidents=(incident(f"inc_{number}"), incident(f"too_{number}"))))
    log = (tmp_path / f"{RECORDS_FILE}-wal").read_bytes()
    database = (tmp_path / RECORDS_FILE).read_bytes()
    store.close()
    seen = set()
    for cut in (*range(0, len(log), len(log) // 12), len(log)):
        crashed = tmp_path / str(cut)
        crashed.mkdir()
        (crashed / RECORDS_FILE).write_bytes(database)
        (crashed / f"{RECORDS_FILE}-wal").write_bytes(log[:cut] + b"\xa5" * (cut % 100))
        found = open_file(crashed / RECORDS_FILE)
        ids = [one.id for one in found.all(INCIDENTS)]
        assert ids == [f"{kind}_{n}" for n in range(len(ids) // 2) for kind in ("inc", "too")]
        found.commit(Change(incidents=(incident("inc_new"),)))
        found.close()
        shutil.rmtree(crashed)
        seen.add(len(ids))
    assert {0, 10} <= seen


@pytest.mark.parametrize("jump_s", [-3_600.0, 3_600.0])
def test_no_jump_of_the_clock_hides_that_agents_are_silent(tmp_path: Path, jump_s: float) -> None:
    clock = FakeClock()
    with running(tmp_path, clock) as server:
        assert server.send(body(frame(1))).status_code == 200

        def agents() -> str:
            said: str = server.client.get("/readyz").json()["checks"]["agents"]
            return said

        assert agents() == "ok"
        clock.advance(jump_s)
        assert agents() != "ok"
        assert server.send(body(frame(2, time_s=clock.now_s()), sent_s=clock.now_s())).status_code == 200
        assert agents() == "ok"
        assert server.dispatcher.services.fleet.counts(clock.now_s(), 30.0) == (1, 1)
        clock.advance(60.0)
        assert "no agent was heard for 60 s" in agents()
