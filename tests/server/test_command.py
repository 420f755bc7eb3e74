from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import tomllib

from eagle_eye.cli.main import main
from eagle_eye.server.admin import tokens_command
from eagle_eye.server.history.settings import HistorySettings, of_earlier_versions
from eagle_eye.server.security.auth import sha256
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file
from tests.loopback import free_port
from tests.server.builders import FakeClock, logging_put_back

WITHIN_S = 30.0


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("EAGLE_EYE_")]:
        monkeypatch.delenv(name)
    hangup = signal.getsignal(signal.SIGHUP)
    with logging_put_back():
        yield
    signal.signal(signal.SIGHUP, hangup)


def test_the_printed_configuration_is_toml_that_the_server_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["server", "--print-config", "--data", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    plain = tomllib.loads(text)
    assert plain["data_dir"] == str(tmp_path)
    assert plain["policy"]["mode"] == "observe"
    file = tmp_path / "server.toml"
    file.write_text(text)
    assert main(["server", "--print-config", "--config", str(file)]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (["--listen", "everywhere"], "listen"),
        (["--config", "/does/not/exist.toml"], "/does/not/exist.toml"),
    ],
)
def test_a_configuration_error_is_one_line_and_exit_code_2(
    flags: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["server", *flags]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert message.startswith("eagle-eye server: ")
    assert key in message


def test_keys_of_earlier_versions_are_said_in_a_line_each() -> None:
    assert of_earlier_versions(HistorySettings()) == []
    lines = of_earlier_versions(HistorySettings(merge_below_bytes=0, hours_retention_s=60.0))
    assert lines == [
        "history.merge_below_bytes = 0 has no effect: segments are not merged any more; remove it",
        (
            "history.hours_retention_s = 60.0 limits only the hours that an earlier version left:"
            " minutes alone are made now, see minutes_retention_s"
        ),
    ]


def test_an_unknown_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.toml"
    file.write_text("[webhooks]\nretries = 3\n")
    assert main(["server", "--config", str(file)]) == 2
    assert "webhooks.retries" in capsys.readouterr().err


def test_other_machines_are_not_served_without_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server", "--listen", "0.0.0.0:0", "--data", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "eagle-eye tokens create" in message
    assert message.count("\n") == 1


def test_a_taken_address_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["server", "--listen", f"127.0.0.1:{port}", "--data", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in message
    assert f"process {os.getpid()} has it" in message
    assert "--listen" in message
    assert message.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    assert main(["server", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "file")]) == 1
    assert "data_dir" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_the_server_reloads_on_a_hangup_and_serves_until_it_is_asked_to_stop(
    tmp_path: Path, stop: signal.Signals
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "eagle_eye.cli.main", "server", "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen([*command, "--data", str(tmp_path)], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            assert f"serving http://127.0.0.1:{port}" in server.stderr.readline()
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                assert client.get("/healthz").status_code == 200
                server.send_signal(signal.SIGHUP)
                assert "the configuration was read" in server.stderr.readline()
                with client.stream("GET", "/api/v1/events") as stream:
                    next(stream.iter_lines())
                    server.send_signal(stop)
                    assert server.wait(WITHIN_S) == 0
        finally:
            server.kill()
        assert "Traceback" not in server.stderr.read()


def tokens(*words: str) -> int:
    parser = argparse.ArgumentParser()
    tokens_command.configure(parser)
    return tokens_command.run(parser.parse_args(words), FakeClock())


def test_a_token_is_printed_once_listed_without_its_text_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(tmp_path)]
    assert tokens("create", "--scope", "agent", "--node", "n1", "--expires-days", "2", *data) == 0
    text = capsys.readouterr().out.strip()
    assert text.startswith("ee_")
    assert tokens("list", *data) == 0
    listed = capsys.readouterr().out
    assert text not in listed
    assert "2023-11-16T22:13:20.000Z" in listed
    assert tokens("revoke", listed.split()[0], *data) == 0
    assert tokens("list", *data) == 0
    assert "revoked" in capsys.readouterr().out.split()[3]
    assert tokens("revoke", listed.split()[0], "--json", *data) == 0
    assert json.loads(capsys.readouterr().out)["revoked"] is True
    with pytest.raises(LookupError, match="no token is called 'tok-none'"):
        tokens("revoke", "tok-none", *data)


def test_a_join_token_lasts_a_day_and_is_listed_with_the_nodes_that_it_enrols(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(tmp_path)]
    assert tokens("create", "--scope", "join", "--nodes", "gpu*", "--nodes", "login1", "--replaces", *data) == 0
    capsys.readouterr()
    assert tokens("list", *data) == 0
    assert "gpu*, login1, anew" in (listed := capsys.readouterr().out)
    assert "2023-11-15T22:13:20.000Z" in listed


def test_a_token_is_written_to_a_new_file_of_its_owner_and_told_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for scope, more in (("admin", ()), ("join", ()), ("agent", ("--node", "n1")), ("remote_write", ("--nodes", "*"))):
        file = tmp_path / scope
        before = os.umask(0)
        try:
            assert tokens("create", "--scope", scope, *more, "--out", str(file), "--data", str(tmp_path)) == 0
        finally:
            os.umask(before)
        text = file.read_text().strip()
        assert text.startswith("ee_")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        said = capsys.readouterr()
        assert said.out == ""
        assert text not in said.err
        with closing(open_file(tmp_path / RECORDS_FILE)) as store:
            found = store.token_by_sha256(sha256(text))
        assert found is not None
        assert found.scope == scope


def test_a_token_in_a_file_is_not_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--scope", "read", "--out", str(tmp_path / "token"), "--json", "--data", str(tmp_path))
    assert tokens("create", *words) == 0
    assert "token" not in json.loads(capsys.readouterr().out)


def test_no_file_is_overwritten_and_no_token_made_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, link = tmp_path / "known", tmp_path / "link"
    file.write_text("in use\n")
    link.symlink_to(tmp_path / "elsewhere")
    for path in (file, link, tmp_path / "no" / "folder"):
        words = ["--scope", "read", "--out", str(path), "--data", str(tmp_path)]
        assert main(["tokens", "create", *words]) == 2
        assert f"--out: {path}" in capsys.readouterr().err
    assert file.read_text() == "in use\n"
    assert not (tmp_path / "elsewhere").exists()
    assert tokens("list", "--data", str(tmp_path)) == 0
    assert capsys.readouterr().out == ""


def test_a_file_of_a_token_that_could_not_be_made_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert main(["tokens", "create", "--scope", "agent", "--out", str(file), "--data", str(tmp_path)]) == 2
    assert not file.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
def test_what_root_makes_is_the_folders_owners() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        outer = Path(name)
        outer.chmod(0o755)
        folder = outer / "data"
        folder.mkdir()
        os.chown(folder, 65_534, 65_534)
        assert tokens("create", "--scope", "read", "--out", str(outer / "token"), "--data", str(folder)) == 0
        assert {path.stat().st_uid for path in folder.iterdir()} == {65_534}
        assert (outer / "token").stat().st_uid == os.geteuid() == 0


@pytest.mark.parametrize(
    "words",
    [
        ["--scope", "agent"],
        ["--scope", "join", "--expires-days", "31"],
        ["--scope", "read", "--nodes", "gpu*"],
        ["--scope", "agent", "--node", "n1", "--replaces"],
        ["--scope", "read", "--node", "n1"],
        ["--scope", "read", "--expires-days", "0"],
        ["--scope", "read", "--expires-days", "nan"],
        ["--scope", "root"],
        [],
    ],
)
def test_wrong_usage_of_tokens_is_exit_code_2(tmp_path: Path, words: list[str]) -> None:
    assert main(["tokens", "create", *words, "--data", str(tmp_path)]) == 2
