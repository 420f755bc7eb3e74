from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.cli.main import main
from eagle_eye.cli.operator import DELIVERIES, INCIDENTS
from eagle_eye.cli.tables import Column, print_table
from eagle_eye.server.model.records import Node
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, Running, action, body, frame, incident, running


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for name in [name for name in os.environ if name.startswith("EAGLE_EYE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    with running(tmp_path, webhooks__allow_private=True) as started:
        monkeypatch.setenv("EAGLE_EYE_SERVER", started.url)
        yield started


def commit(server: Running, change: Change) -> None:
    server.dispatcher.services.store.commit(change)


@pytest.mark.parametrize("columns", ["40", "100", ""])
def test_a_table_wraps_sentences_alone_and_leaves_empty_columns_out(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    summary = "no step for 10.0 s where 0.12 s are typical, and rank 1 says nothing"
    item = {"id": "inc_0123456789abcdef", "detected": "2026-01-31T12:00:00.123Z", "fault": "throughput_drop"}
    print_table(INCIDENTS.columns, [{**item, "summary": summary}])
    titles, first, *rest = capsys.readouterr().out.splitlines()
    assert titles.split() == ["incident", "detected", "fault", "summary"]
    assert first.split()[:3] == ["inc_0123456789abcdef", "2026-01-31T12:00:00Z", "throughput_drop"]
    assert " ".join((first + " ".join(rest)).split()).endswith(summary)
    assert bool(rest) == (columns == "100")  # too narrow for a table, or no terminal: one line


def test_in_a_narrow_terminal_columns_go_and_are_named_and_times_lose_their_year(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    reported = {"id": "dlv-11-sub-12d5f425d675", "type": "eagle_eye.incident.updated", "state": "failed", "attempts": 4}
    updated = "2026-11-22T10:48:19.123456Z"
    error = "gave up after 4 attempts: ConnectError"
    print_table(DELIVERIES.columns, [{**reported, "last_error": error, "reason": "attempts", "updated": updated}])
    out, missing = capsys.readouterr()
    titles, *lines = out.splitlines()
    assert max(map(len, (titles, *lines))) <= 80
    assert titles.split() == ["delivery", "state", "reason", "error", "updated", "(UTC)"]
    assert lines[0].split() == [reported["id"], "failed", "attempts", "gave", "up", "after", "4", "11-22", "10:48:19"]
    assert missing == "no room for: attempts, type (a wider terminal or --json has them)\n"


def test_at_80_columns_an_incident_has_its_summary_below(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    summary = "no step for 10.0 s where 0.12 s are typical, and rank 1 says nothing at all to its peers"
    item = {"id": "inc_0123456789abcdef", "detected": "2026-01-31T12:00:00.123Z", "fault": "throughput_drop"}
    item |= {"state": "confirmed", "job": "llama-70b-pretrain", "nodes": "gpu-0017"}
    print_table(INCIDENTS.columns, [{**item, "summary": summary}, {**item, "summary": ""}])
    titles, first, *below, last = capsys.readouterr().out.splitlines()
    assert "gpu-0017" in first
    assert "gpu-0017" in last
    assert "summary" not in titles
    assert " ".join(" ".join(below).split()) == summary
    assert all(line.startswith("  ") and len(line) <= 80 for line in below)


def test_nodes_that_are_out_come_first_then_the_accused(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    states = {"a": "in_service", "b": "in_service", "c": "draining", "d": "excluded", "e": "in_service"}
    nodes = tuple(Node(node=name, state=state, reason="", updated_s=NOW) for name, state in states.items())  # type: ignore[arg-type]
    commit(server, Change(nodes=nodes, incidents=(incident(nodes=["b"], node="b"),)))
    for limit, more in (("10", []), ("3", ["there are more than 3; --limit shows them"])):
        assert main(["nodes", "--limit", limit]) == 0
        out, said = capsys.readouterr()
        listed = [line.split()[0] for line in out.splitlines()[1:] if line[:1] in states]
        assert listed[:3] == ["d", "c", "b"]
        assert said.splitlines()[-1:] == more


def test_what_is_no_time_in_a_column_of_times_is_left_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table((Column("at", "at"),), [{"at": "2026-11-22T10:48:19.5Z"}, {"at": "never"}])
    assert "2026-11-22T10:48:19.5Z" in capsys.readouterr().out


def test_a_step_is_shown_as_the_count_that_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_table((Column("step", "step"), Column("share", "share")), [{"step": 17.0, "share": 0.5}])
    assert capsys.readouterr().out.split() == ["step", "share", "17", "0.5"]


def test_lists_are_tables_or_json(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    commit(server, Change(incidents=(incident(), incident("inc_2", state="closed"))))
    assert main(["incidents"]) == 0
    table = capsys.readouterr().out
    assert "inc_1" in table
    assert "n1 hangs" in table
    assert main(["incidents", "--json", "--state", "closed"]) == 0
    assert [item["id"] for item in json.loads(capsys.readouterr().out)] == ["inc_2"]
    assert main(["incidents", "list", "--state", "open", "--json"]) == 0
    assert [item["id"] for item in json.loads(capsys.readouterr().out)] == ["inc_1"]


def test_a_long_list_is_read_page_by_page_up_to_the_limit(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    commit(server, Change(incidents=tuple(incident(f"inc_{number}") for number in range(1_100))))
    assert main(["incidents", "--json", "--limit", "1050"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1_050
    assert main(["incidents", "--limit", "2"]) == 0
    assert "more than 2" in capsys.readouterr().err


def test_an_answer_that_is_too_large_is_named_as_such(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("eagle_eye.client.http_client.ANSWER_BYTES_MAX", 8)
    assert main(["incidents"]) == 1
    assert "the answer has more than 0 MiB; ask for less" in capsys.readouterr().err


def test_verbs_reach_the_server(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    server.send(body(frame()))
    commit(server, Change(incidents=(incident(),), actions=(action(state="awaiting"),)))
    for words in (
        ["nodes", "exclude", "n1", "--reason", "smoke"],
        ["incidents", "acknowledge", "inc_1"],
        ["actions", "approve", "act_1"],
        ["actions", "report", "act_1", "done", "--detail", "by hand"],
    ):
        assert main(words) == 0, words
    capsys.readouterr()
    assert main(["nodes", "show", "n1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reason"] == "smoke"
    assert main(["actions", "show", "act_1", "--json"]) == 0
    assert [report["detail"] for report in json.loads(capsys.readouterr().out)["reports"]] == ["by hand"]


def test_a_subscription_is_made_pinged_and_ended(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["subscriptions", "add", "http://127.0.0.1:1/", "--type", "eagle_eye.ping", "--job", "j"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["secret"].startswith("whsec_")
    assert (made["types"], made["jobs"]) == (["eagle_eye.ping"], ["j"])
    for verb in ("ping", "rotate", "delete"):
        assert main(["subscriptions", verb, made["id"]]) == 0
    capsys.readouterr()
    assert main(["deliveries", "--json"]) == 0
    assert [item["type"] for item in json.loads(capsys.readouterr().out)] == ["eagle_eye.ping"]


def test_control_characters_do_not_reach_the_terminal(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    commit(server, Change(incidents=(incident(summary="\x1b[2Jgone\x07", nodes=["n\x9b1"]),)))
    assert main(["incidents"]) == 0
    out = capsys.readouterr().out
    assert "gone" in out
    assert not set(out) & {"\x1b", "\x07", "\x9b"}


def test_the_servers_refusal_is_one_line(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["incidents", "resolve", "inc/../x"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("eagle-eye incidents: HTTP 404: ")
    assert message.count("\n") == 1


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodes", "--server", "http://127.0.0.1:1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert main(["nodes", "--server", "ftp://x"]) == 1
    assert "--server" in capsys.readouterr().err


def test_the_token_comes_from_a_file(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, record = mint("read", None, NOW, None)
    commit(server, Change(tokens=(record,)))
    assert main(["nodes"]) == 1
    assert "--token-file" in capsys.readouterr().err
    file = tmp_path / "token"
    file.write_text(text + "\n")
    assert main(["nodes", "--token-file", str(file)]) == 0
    assert main(["--token-file", "x"]) == 2
    assert main(["nodes", "--token-file", str(tmp_path / "none")]) == 1
    assert text not in capsys.readouterr().err


def test_usage_errors_are_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["nodes", "fly"], ["nodes", "show"], ["nodes", "--limit", "x"], ["actions", "report", "a", "happy"]):
        assert main(words) == 2, words
    capsys.readouterr()
