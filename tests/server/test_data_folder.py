"""Two servers never share a folder; what a dead one left in it keeps nobody out."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_eye.cli.main import main
from eagle_eye.server.admin.data_folder import LOCK_FILE, held
from eagle_eye.server.history import processes
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file
from tests.server.own_process import WITHIN_S, ended, serving, wait_until


def test_a_second_server_on_a_folder_is_refused_in_one_line_until_the_first_is_killed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data) as first:
        second = ended(data)
        assert second.returncode == 1
        assert second.stderr.count("\n") == 1
        for named in (str(data), f"process {first.process.pid}", socket.gethostname(), first.listen, "--data"):
            assert named in second.stderr
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(WITHIN_S)
        with serving(data) as third:
            assert third.process.poll() is None


def test_tokens_and_backup_work_beside_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(tmp_path / "data")
    with held(Path(data), "127.0.0.1:8470"):
        open_file(Path(data) / RECORDS_FILE).close()
        assert main(["tokens", "create", "--scope", "read", "--data", data]) == 0
        assert main(["tokens", "list", "--data", data]) == 0
        assert main(["backup", str(tmp_path / "copy"), "--data", data]) == 0
    assert capsys.readouterr().out
    assert not (tmp_path / "copy" / LOCK_FILE).exists()


@pytest.mark.parametrize(
    "left", [b"", b'{"pid":1,"host":"another","listen":"10.0.0.1:8470"}', b"\xff\x00 no JSON", b"[" * 100_000]
)
def test_what_a_lock_file_says_keeps_nobody_out(tmp_path: Path, left: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(left)
    said = rf"process {os.getpid()} on host {socket.gethostname()}, which listens on 127\.0\.0\.1:8470"
    with held(tmp_path, "127.0.0.1:8470"), pytest.raises(StoreUnavailable, match=said), held(tmp_path):
        pass
    with held(tmp_path):
        pass


def test_a_lock_file_that_was_deleted_is_made_anew(tmp_path: Path) -> None:
    with held(tmp_path):
        pass
    (tmp_path / LOCK_FILE).unlink()
    with held(tmp_path), pytest.raises(StoreUnavailable), held(tmp_path):
        pass


def test_a_process_that_the_server_started_does_not_hold_the_folder_after_it(tmp_path: Path) -> None:
    with held(tmp_path):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with held(tmp_path):
            assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_what_writes_segments_is_killed_with_its_server(tmp_path: Path) -> None:
    reported = tmp_path / "pid"
    child = (
        "import os, pathlib, sys, time; from eagle_eye.server.history.processes import settle; settle(0);"
        "path = pathlib.Path(sys.argv[1]); (path.parent / 'written').write_text(str(os.getpid()));"
        "(path.parent / 'written').rename(path); time.sleep(600)"
    )
    parent = (
        "import subprocess, sys; from eagle_eye.server.history.processes import environment;"
        "subprocess.run([sys.executable, '-c', *sys.argv[1:]], env=environment())"
    )
    with subprocess.Popen([sys.executable, "-c", parent, child, str(reported)]) as server:
        try:
            wait_until(reported.exists)
            pid = int(reported.read_text())
        finally:
            server.kill()
    wait_until(lambda: not _runs(pid))


def test_what_writes_segments_ends_where_its_server_had_ended_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: _NoLibrary())
    monkeypatch.setenv("EE_PARENT_PID", "1")
    monkeypatch.setattr(os, "getppid", lambda: 4_711)
    with pytest.raises(SystemExit):
        processes.end_with_parent()


class _NoLibrary:
    def prctl(self, *_arguments: int) -> int:
        return 0


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
