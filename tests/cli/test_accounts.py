"""What operators read of the past: tables, JSON, and errors that say what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.cli.main import main
from eagle_eye.server.accounts.node_records import compared
from eagle_eye.server.engine.settings import ModeRule, PolicySettings
from eagle_eye.server.model.records import Comparison, Gpu, Ticket
from eagle_eye.server.store.store import Change
from tests.server.accounts.past import attempt, three_failures
from tests.server.builders import NOW, Running, action, incident, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server with a past that no test changes but by tickets."""
    with running(tmp_path_factory.mktemp("past")) as started:
        store = started.dispatcher.services.store
        three_failures(store)
        over = attempt(
            0, -7_200, -3_600, end="failed", first_step=1, first_step_s=-7_100, last_step=9, last_step_s=-4_000
        )
        store.commit(
            Change(
                attempts=(over,),
                incidents=(
                    incident(detected_s=NOW - 3_950, onset_s=NOW - 4_000, seen_s=NOW - 3_600, ended_s=NOW - 3_500),
                ),
                actions=(action("act_0", "would_act", created_s=NOW - 3_900),),
                tickets=(
                    Ticket(id="T-\x1b[2J", node="n1", opened_s=NOW - 100, closed_s=None, text="", imported_s=NOW),
                ),
            )
        )
        yield started


@pytest.fixture(autouse=True)
def asked(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EAGLE_EYE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("EAGLE_EYE_SERVER", server.url)


def reported(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_goodput_names_the_job_and_what_its_time_was_lost_to(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in reported(capsys, "goodput").splitlines()]
    assert ["job", "1", "1.00", "0.861", "0.861", "1.11"] in lines
    assert ["job", "stopped", "hang", "n1", "0.89", "0.11"] in lines
    by_node = [line.split() for line in reported(capsys, "goodput", "--by", "node").splitlines()]
    assert ["n1", "0.89", "0.11", "0.89"] in by_node
    assert json.loads(reported(capsys, "goodput", "--by", "fault", "--json"))["by"] == "fault"


def test_the_ledger_shows_claims_and_their_totals(capsys: pytest.CaptureFixture[str]) -> None:
    text = reported(capsys, "ledger")
    assert "ticket T-\N{REPLACEMENT CHARACTER}[2J on n1" in text
    assert ["all", "1", "0", "0", "0", "1.00", "0.21", "to", "1.00"] in [line.split() for line in text.splitlines()]
    assert [claim["why"] for claim in json.loads(reported(capsys, "ledger", "--json"))["items"]] == ["ticket"]
    assert "none" in reported(capsys, "ledger", "--standing", "wrong")


def test_the_steps_say_whether_the_ledger_is_enough_and_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    text = reported(capsys, "ledger", "--steps")
    (line,) = [line for line in text.splitlines() if line.startswith("hang ")]
    assert "cannot tell: 1 decision with a known outcome, 10 needed" in line
    assert "no decision on record, so unknown: gpu_lost," in text
    assert "[[policy.modes]]" not in text
    one = reported(capsys, "ledger", "--steps", "--fault", "hang")
    assert '# hang: from observe to approve\n[[policy.modes]]\nfaults = ["hang"]\nmode = "approve"\n' in one
    assert json.loads(reported(capsys, "ledger", "--steps", "--json"))["decisions_min"] == 10


def test_jobs_with_a_mode_of_their_own_are_named_beside_the_faults(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    server.watcher.use_policy(PolicySettings(modes=[ModeRule(mode="act", jobs=["canary-*"])]))
    (line,) = [line for line in reported(capsys, "ledger", "--steps").splitlines() if line.startswith("hang ")]
    assert "observe; act for canary-*" in line
    server.watcher.policies.clear()


def test_the_steps_are_of_all_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "--steps", "--job", "llm"]) == 2
    assert "--steps: expected no --job" in capsys.readouterr().err


def test_the_report_has_what_was_lost_to_whom_and_what_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'eagle-eye[reports]'")
    file = tmp_path / "accounts.html"
    assert str(file) in reported(capsys, "accounts", "report", "--html", str(file))
    text = file.read_text()
    assert "1.11 GPU-hours were lost; the goodput was 86.1%." in text
    assert text.count("<svg") == 2
    assert '<td>n1</td><td class="number">0.89</td>' in text
    assert "<script" not in text


def test_the_report_of_a_time_without_jobs_claims_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'eagle-eye[reports]'")
    file = tmp_path / "accounts.html"
    past = ("--since", "2001-01-01T00:00:00Z", "--until", "2001-01-02T00:00:00Z")
    reported(capsys, "accounts", "report", "--html", str(file), *past)
    text = file.read_text()
    assert "No job ran in this time that anybody reported." in text
    assert "GPU-hours were lost" not in text


def test_the_reports_numbers_are_json_without_the_extra(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(reported(capsys, "accounts", "report", "--json"))
    assert found["causes"]["node"]["items"][0]["node"] == "n1"


def test_a_report_needs_a_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accounts", "report"]) == 2
    assert "--html FILE" in capsys.readouterr().err


def test_a_nodes_history_says_why_it_is_recurrent(capsys: pytest.CaptureFixture[str]) -> None:
    text = reported(capsys, "nodes", "history", "n1", "--limit", "3")
    assert text.splitlines()[0].startswith("n1 is in_service; recurrence score 0.8")
    assert "multi node failures 4 adds" in text
    assert "\x1b" not in text
    assert len(json.loads(reported(capsys, "nodes", "history", "n1", "--json"))["items"]) == 8
    assert "cannot tell, known for 1.0 days" in reported(capsys, "nodes", "history", "young")


def test_a_nodes_history_says_how_much_of_each_gpu_was_compared(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    seat: dict[str, Any] = {"node": "young", "model": "H100", "since_s": NOW, "first_seen_s": NOW, "seen_s": NOW}
    gpus = tuple(Gpu(uuid=f"GPU-{device}", device=device, **seat) for device in range(3))
    checks = tuple(
        compared(None, f"GPU-{device}", Comparison("chk", "young", NOW, 45.0, 4_000.0, 2.0 * device))
        for device in range(2)
    )
    server.dispatcher.services.store.commit(Change(gpus=gpus, gpu_checks=checks))
    text = reported(capsys, "nodes", "history", "young")
    said = ("nothing found in 4000 products, 45 s", "2 wrong numbers in 4000 products, 45 s", "never")
    lines = [line for line in text.splitlines() if "H100" in line]
    assert [line.rstrip().endswith(words) for line, words in zip(lines, said, strict=True)] == [True] * 3


def test_nodes_are_listed_with_their_score(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = [line for line in reported(capsys, "nodes").splitlines() if line.startswith("n1")]
    assert line.split()[:4] == ["n1", "in_service", "hang", "4"]


def test_tickets_come_from_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "export.csv"
    file.write_text("id,node,opened,queue\nT-1,n1,2023-11-01T00:00:00Z,dc\nT-2,n7,2023-11-01T00:00:00Z,dc\n", "utf-8")
    assert main(["tickets", "import", str(file)]) == 0
    said = capsys.readouterr()
    assert said.out == "2 new, 0 changed, 0 known already\n"
    assert said.err == "columns left out: queue\n1 nodes were never heard of, such as n7\n"
    assert [ticket["id"] for ticket in json.loads(reported(capsys, "tickets", "list", "--node", "n7", "--json"))] == [
        "T-2"
    ]
    assert "T-1" in reported(capsys, "tickets")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"id,node,opened\nT-1,n1,soon\n", "HTTP 400: line 2, column opened: expected an RFC 3339 time"),
        ("a.csv", b"id,node,opened\n\xff\n", "line 2: not UTF-8; save it as UTF-8"),
        ("a.txt", b"", "neither .csv nor .jsonl; say --format csv or --format jsonl"),
        ("missing.csv", None, "cannot be read: No such file or directory"),
        ("big.csv", b"x" * ((3 << 20) + 1), "has more than 3 MiB; import it in parts"),
    ],
)
def test_a_file_that_cannot_be_taken_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, message: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    assert main(["tickets", "import", str(file)]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
