from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from eagle_eye.cli.main import main
from eagle_eye.server.store.store import DELIVERIES, SUBSCRIPTIONS, Change
from tests.server.builders import NOW, Running, event, running

URL = "http://127.0.0.1:1/"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("server"), webhooks__allow_private=True) as server:
        yield server


@pytest.fixture
def server(started: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    for name in [name for name in os.environ if name.startswith("EAGLE_EYE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("EAGLE_EYE_SERVER", started.url)
    return started


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["subscriptions", *words]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_a_subscription_has_the_filters_of_its_flags(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--format", "alertmanager", "--job", "llm-*", "--fault", "hang", "--match", "node!=lab-*"]
    made = said(capsys, "add", URL, *flags, "--match", "severity=critical")
    assert (made["format"], made["jobs"], made["faults"]) == ("alertmanager", ["llm-*"], ["hang"])
    assert made["matchers"] == ["node!=lab-*", "severity=critical"]
    changed = said(capsys, "change", made["id"], "--any", "matchers", "--job", "other", "--url", URL + "x")
    assert (changed["url"], changed["jobs"], changed["faults"], changed["matchers"]) == (
        URL + "x",
        ["other"],
        ["hang"],
        [],
    )
    assert main(["subscriptions", "change", made["id"]]) == 1
    assert "nothing to change" in capsys.readouterr().err


def test_secrets_come_from_files_and_overlap_as_told(
    server: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("whsec_" + "B" * 43 + "=\n")
    made = said(capsys, "add", URL, "--secret-file", str(file))
    assert made["secret"] == file.read_text().strip()
    assert said(capsys, "rotate", made["id"], "--overlap", "60")["retiring"] == ["2023-11-14T22:14:20.000Z"]
    assert said(capsys, "rotate", made["id"], "--overlap", "0")["secrets"] == 2
    assert main(["subscriptions", "add", URL, "--secret-file", str(tmp_path / "none")]) == 1
    assert "--secret-file" in capsys.readouterr().err


def test_one_is_paused_resumed_and_repaired(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    name = said(capsys, "add", URL, "--job", "mended")["id"]
    for verb in ("pause", "pause", "resume"):
        assert main(["subscriptions", verb, name]) == 0
    capsys.readouterr()
    store = server.dispatcher.services.store
    store.commit(Change(events=(event("e1", job="mended", time_s=NOW + 3_600),)))
    (waiting,) = (one for one in store.all(DELIVERIES) if one.subscription_id == name)
    store.commit(Change(deliveries=(replace(waiting, state="failed"),)))
    assert said(capsys, "redeliver", name, "--since", "2023-11-14T22:00:00Z", "--json") == {
        "redelivered": 1,
        "more": False,
    }
    assert main(["subscriptions"]) == 0
    table = capsys.readouterr().out
    assert name in table
    assert "waiting" in table


def test_a_secret_is_written_to_a_new_file_and_not_printed(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    made = said(capsys, "add", URL, "--out", str(first))
    assert "secret" not in made
    assert "secret" not in said(capsys, "rotate", made["id"], "--out", str(second))
    for file in (first, second):
        assert file.read_text().startswith("whsec_")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert main(["subscriptions", "rotate", made["id"], "--out", str(first)]) == 2
    assert "--out" in capsys.readouterr().err
    kept = server.dispatcher.services.store.get(SUBSCRIPTIONS, made["id"])
    assert kept is not None
    assert kept.secrets == [second.read_text().strip()]
