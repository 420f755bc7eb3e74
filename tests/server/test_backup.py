from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from eagle_eye.cli.main import main
from eagle_eye.server.admin import backup_command
from eagle_eye.server.admin.backup_command import SUMS_FILE, back_up
from eagle_eye.server.admin.data_folder import held
from eagle_eye.server.model.errors import BackupFailed
from eagle_eye.server.model.records import EvidenceRequest
from eagle_eye.server.security import auth
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file
from eagle_eye.server.store.store import INCIDENTS, Change
from tests.server.builders import NOW, body, frame, incident, running

HISTORY_FILE = "history.db"


def filled(folder: Path) -> None:
    store = open_file(folder / RECORDS_FILE)
    store.commit(Change(incidents=(incident(),)))
    store.close()


def gathered(id_: str) -> EvidenceRequest:
    return EvidenceRequest(
        id=id_,
        incident_id="inc_1",
        node="n1",
        job="job",
        attempt=0,
        kind="evidence",
        state="received",
        within_seconds=3.0,
        asked_by="server",
        created_s=NOW,
        updated_s=NOW,
        expires_s=NOW + 9,
        bytes=3,
    )


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_is_restored_has_the_same_incidents_tokens_history_and_evidence(tmp_path: Path) -> None:
    data, copy, restored = tmp_path / "data", tmp_path / "backup", tmp_path / "restored"
    text, token = auth.mint("admin", None, NOW, None)
    with running(data) as server:
        store = server.dispatcher.services.store
        asked = gathered("ev_1")
        store.commit(Change(incidents=(incident(),), tokens=(token,), evidence=(asked,)))
        assert server.send(body(frame(1), frame(2)), authorization=f"Bearer {text}").status_code == 200
        (data / "evidence").mkdir()
        (data / "evidence" / "ev_1.tar.gz").write_bytes(b"abc")
        (data / "evidence" / "ev_2.tar.gz.00.part").write_bytes(b"half")
        for segment in ("20260101", ".partial-20260102"):
            (data / "history" / "raw" / segment).mkdir(parents=True)
            (data / "history" / "raw" / segment / "frames.parquet").write_bytes(b"rows")
        back_up(data, copy)
        assert server.send(body(frame(3)), authorization=f"Bearer {text}").status_code == 200
    files = {SUMS_FILE, HISTORY_FILE, RECORDS_FILE, "evidence/ev_1.tar.gz", "history/raw/20260101/frames.parquet"}
    assert set(names(copy)) == files
    shutil.copytree(copy, restored)
    with running(restored) as server:
        server.client.headers["authorization"] = f"Bearer {text}"
        assert server.client.get("/api/v1/incidents").json()["items"][0]["id"] == "inc_1"
        assert server.client.get("/api/v1/evidence/ev_1/bundle").content == b"abc"
        assert [seen.sequence for seen, _ in server.watcher.recovered] == [1, 2]
        assert server.send(body(frame(2))).json()["duplicates"] == 1
        anonymous = httpx.get(f"{server.url}/api/v1/incidents", trust_env=False)
        assert anonymous.status_code == 401


def test_commits_during_the_copy_neither_end_up_in_it_nor_hold_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    monkeypatch.setattr(backup_command, "PAGES_PER_STEP", 16)
    store = open_file(data / RECORDS_FILE)
    store.commit(Change(incidents=tuple(incident(f"inc_{n}", summary="x" * 65_536) for n in range(10))))
    steps: list[int] = []

    def reported(_file: str, done: int, _total: int) -> None:
        steps.append(done)
        store.commit(Change(incidents=(incident(f"inc_late_{len(steps)}"),)))

    back_up(data, tmp_path / "copy", reported=reported)
    store.close()
    assert len(steps) > 5
    assert steps == sorted(steps)  # a copy that began anew would fall back
    copy = open_file(tmp_path / "copy" / RECORDS_FILE)
    assert {one.id for one in copy.all(INCIDENTS)} == {f"inc_{n}" for n in range(10)}
    copy.close()


def test_both_databases_are_of_one_moment(tmp_path: Path) -> None:
    data = tmp_path / "data"
    filled(data)
    shutil.copy(data / RECORDS_FILE, data / "another.db")
    later = threading.Event()

    def reported(file: str, _done: int, _total: int) -> None:
        if file == "another.db" and not later.is_set():
            later.set()
            store = open_file(data / RECORDS_FILE)
            store.commit(Change(incidents=(incident("inc_late"),)))
            store.close()

    back_up(data, tmp_path / "copy", reported=reported)
    assert later.is_set()
    copy = open_file(tmp_path / "copy" / RECORDS_FILE)
    assert copy.get(INCIDENTS, "inc_late") is None
    copy.close()


def test_a_damaged_database_is_named_and_leaves_no_backup(tmp_path: Path) -> None:
    data = tmp_path / "data"
    filled(data)
    whole = bytearray((data / RECORDS_FILE).read_bytes())
    # The pages' own bookkeeping, not the header: SQLite opens the file and finds out later.
    for page in range(10, len(whole) // 4096):
        whole[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    (data / RECORDS_FILE).write_bytes(whole)
    with pytest.raises(BackupFailed, match=r"records\.db"):
        back_up(data, tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    filled(tmp_path / "data")
    (tmp_path / "copy").mkdir()
    back_up(tmp_path / "data", tmp_path / "copy")
    with pytest.raises(BackupFailed, match="not an empty folder"):
        back_up(tmp_path / "data", tmp_path / "copy")


def test_a_backup_under_way_is_not_disturbed_by_another(tmp_path: Path) -> None:
    filled(tmp_path / "data")
    (tmp_path / "copy.partial").mkdir()
    (tmp_path / "copy.partial" / RECORDS_FILE).write_bytes(b"half")
    with pytest.raises(BackupFailed, match="another backup is being made"):
        back_up(tmp_path / "data", tmp_path / "copy")
    assert names(tmp_path / "copy.partial") == [RECORDS_FILE]


def test_a_disk_without_room_is_said_before_anything_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "data")
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(BackupFailed, match="1048576 bytes free"):
        back_up(tmp_path / "data", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_folder_without_databases_is_taken_for_a_mistake_and_stays_untouched(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(BackupFailed, match="data_dir"):
        back_up(tmp_path / "data", tmp_path / "copy")
    assert list((tmp_path / "data").iterdir()) == []


def test_the_copy_is_the_owners_alone_and_needs_no_file_beside_it(tmp_path: Path) -> None:
    filled(tmp_path / "data")
    back_up(tmp_path / "data", tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "copy" / RECORDS_FILE).stat().st_mode & 0o777 == 0o600
    assert names(tmp_path / "copy") == [SUMS_FILE, RECORDS_FILE]


def test_the_command_says_what_it_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "data")
    (tmp_path / "data" / HISTORY_FILE).write_bytes(b"")
    words = ["backup", str(tmp_path / "copy"), "--records-only", "--data", str(tmp_path / "data")]
    assert main([*words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    copied = (tmp_path / "copy" / RECORDS_FILE).read_bytes()
    assert said["files"] == [{"file": RECORDS_FILE, "bytes": len(copied), "sha256": hashlib.sha256(copied).hexdigest()}]
    subprocess.run(["sha256sum", "--check", "--quiet", SUMS_FILE], cwd=tmp_path / "copy", check=True)
    assert main(words) == 1
    assert "not an empty folder" in capsys.readouterr().err


def restored_from(tmp_path: Path, *options: str) -> int:
    return main(["backup", "restore", str(tmp_path / "copy"), "--data", str(tmp_path / "data"), *options])


def test_a_backup_is_put_back_what_was_there_is_set_aside_and_what_came_later_stays(tmp_path: Path) -> None:
    data = tmp_path / "data"
    filled(data)
    (data / "history" / "raw" / "old").mkdir(parents=True)
    (data / "history" / "raw" / "old" / "frames.parquet").write_bytes(b"rows")
    back_up(data, tmp_path / "copy")
    (data / RECORDS_FILE).write_bytes(b"damaged")
    (data / f"{RECORDS_FILE}-wal").write_bytes(b"of the damaged one")
    (data / "history" / "raw" / "old" / "frames.parquet").write_bytes(b"ruws")
    (data / "history" / "raw" / "new").mkdir()
    (data / "history" / "raw" / "new" / "frames.parquet").write_bytes(b"newer rows")
    assert restored_from(tmp_path) == 0
    (aside,) = data.glob("set-aside-*")
    assert {"history/raw/old/frames.parquet", RECORDS_FILE, f"{RECORDS_FILE}-wal"} <= set(names(aside))
    assert (aside / RECORDS_FILE).read_bytes() == b"damaged"
    assert (data / "history" / "raw" / "old" / "frames.parquet").read_bytes() == b"rows"
    assert (data / "history" / "raw" / "new" / "frames.parquet").read_bytes() == b"newer rows"
    store = open_file(data / RECORDS_FILE)
    assert store.get(INCIDENTS, "inc_1") is not None
    store.close()
    assert not [path for path in names(data) if backup_command.PARTIAL in path]


def test_one_database_is_put_back_without_the_other(tmp_path: Path) -> None:
    filled(tmp_path / "data")
    shutil.copy(tmp_path / "data" / RECORDS_FILE, tmp_path / "data" / HISTORY_FILE)
    back_up(tmp_path / "data", tmp_path / "copy")
    for name in (RECORDS_FILE, HISTORY_FILE):
        (tmp_path / "data" / name).write_bytes(b"later")
    assert restored_from(tmp_path, "--history-only") == 0
    assert (tmp_path / "data" / RECORDS_FILE).read_bytes() == b"later"
    assert restored_from(tmp_path, "--records-only") == 0
    copied = (tmp_path / "copy" / RECORDS_FILE).read_bytes()
    assert (tmp_path / "data" / RECORDS_FILE).read_bytes() == copied


def test_nothing_is_put_back_under_a_server_or_from_a_backup_that_is_not_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path / "data")
    back_up(tmp_path / "data", tmp_path / "copy")
    (tmp_path / "data" / RECORDS_FILE).write_bytes(b"later")
    with held(tmp_path / "data", "127.0.0.1:8470"):
        assert restored_from(tmp_path) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"process {os.getpid()}" in said
    assert "127.0.0.1:8470" in said
    (tmp_path / "copy" / RECORDS_FILE).write_bytes(b"rotten")
    assert restored_from(tmp_path) == 1
    assert f"{RECORDS_FILE} is missing or does not match SHA256SUMS" in capsys.readouterr().err
    (tmp_path / "copy" / SUMS_FILE).unlink()
    assert restored_from(tmp_path) == 1
    assert "not a complete backup" in capsys.readouterr().err
    assert (tmp_path / "data" / RECORDS_FILE).read_bytes() == b"later"


def test_words_that_are_neither_a_folder_nor_a_restore_are_refused(tmp_path: Path) -> None:
    for words in (["restore"], ["a", "b"], ["restore", "a", "b"], ["a", "--history-only"]):
        assert main(["backup", *words, "--data", str(tmp_path)]) == 2
