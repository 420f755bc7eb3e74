from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.cli.main import main
from eagle_eye.server.store.store import Change
from tests.server.builders import Running, incident, running, silence

REASON = "its fan is being replaced"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for name in [name for name in os.environ if name.startswith("EAGLE_EYE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "250")
    with running(tmp_path) as started:
        monkeypatch.setenv("EAGLE_EYE_SERVER", started.url)
        started.dispatcher.services.store.commit(Change(incidents=(incident(),)))
        yield started


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_silence_has_what_its_flags_name(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    scope = ["--fault", "hang", "--fault", "gpu_lost", "--job", "llm-*", "--node", "n1"]
    made = json.loads(shown(capsys, "silences", "add", *scope, "--for", "90m", "--reason", REASON, "--json"))
    assert (made["faults"], made["jobs"], made["nodes"]) == (["hang", "gpu_lost"], ["llm-*"], ["n1"])
    assert (made["until"], made["reason"]) == ("2023-11-14T23:43:20.000Z", REASON)


def test_it_says_what_it_silences_and_that_actions_go_on(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, "silences", "add", "--node", "n1", "--for", "4h", "--reason", REASON)
    assert "it silences 1 open incident\n" in said
    assert "actions go on" in said


def test_a_silence_is_listed_and_ended(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    server.dispatcher.services.store.commit(Change(silences=(silence(),)))
    for words in (["silences"], ["silences", "list", "--state", "active", "--node", "n1"]):
        table = shown(capsys, *words)
        assert "sil-1" in table
        assert REASON in table
    assert shown(capsys, "silences", "end", "sil-1") == "end sil-1: done\n"
    assert json.loads(shown(capsys, "silences", "show", "sil-1"))["ended_by"] == "local"
    assert shown(capsys, "silences", "--state", "active") == "none\n"


def test_an_incident_is_listed_and_shown_with_its_silence(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    server.dispatcher.services.store.commit(Change(silences=(silence(),)))
    listed = shown(capsys, "incidents").splitlines()
    assert "silenced until" in listed[0]
    assert "2023-11-14T22:43:20Z" in listed[1]
    page = shown(capsys, "incidents", "show", "inc_1")
    assert f"by alice until 2023-11-14T22:43:20.000Z (sil-1): {REASON}; actions go on" in page


@pytest.mark.parametrize("length", ["4", "-4h", "tomorrow", "now", ""])
def test_a_length_that_is_none_is_refused(length: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["silences", "add", "--node", "n1", f"--for={length}", "--reason", "x"]) == 2
    assert "--for: expected a length such as 90m, 4h or 7d" in capsys.readouterr().err
