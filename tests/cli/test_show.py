from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from eagle_eye.cli.main import main
from eagle_eye.cli.show import sparkline, thinned
from eagle_eye.schema.action import EvidenceItem
from eagle_eye.server.model.records import Job
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, Running, action, body, frame, incident, running, subscription

POWER = EvidenceItem("gpu_power_watts", "n1", 0, 240.5, 400.0, 300.0, "watts")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    for name in [name for name in os.environ if name.startswith("EAGLE_EYE_")]:
        monkeypatch.delenv(name)
    with running(tmp_path) as started:
        monkeypatch.setenv("EAGLE_EYE_SERVER", started.url)
        started.send(body(frame()))
        waiting = action(state="awaiting", evidence=[POWER])
        blamed = replace(incident(), evidence=[POWER], summary="n1 draws\x1b[31m little power")
        job = Job(job=blamed.job, attempt=0, state="running", ranks=[], restart_owner="", updated_s=NOW)
        started.dispatcher.services.store.commit(Change(incidents=(blamed,), actions=(waiting,), jobs=(job,)))
        yield started


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_an_incident_is_shown_with_its_evidence_in_units_and_against_its_peers(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(capsys, "incidents", "show", "inc_1").splitlines()
    at = lines.index("Evidence")
    assert lines[at + 2].split("  ")[0] == "GPU power"
    assert lines[at + 2].split() == ["GPU", "power", "n1", "device", "0", "240.5", "W", "400", "W", "300", "W"]


def test_an_incident_says_what_to_type_next(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    following = shown(capsys, "incidents", "show", "inc_1").partition("Next\n")[2]
    assert "  eagle-eye incidents false inc_1\n" in following


def test_an_action_that_awaits_approval_shows_both_decisions(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, "actions", "show", "act_1")
    assert "  eagle-eye actions approve act_1\n" in out
    assert "  eagle-eye actions reject act_1\n" in out


def test_what_awaits_a_person_is_called_so_in_lists_and_on_pages(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    server.dispatcher.services.store.commit(Change(incidents=(incident(state="acting"),)))
    for words in (("incidents",), ("incidents", "show", "inc_1"), ("actions",), ("actions", "show", "act_1")):
        assert "awaiting approval" in shown(capsys, *words)


@pytest.mark.parametrize("words", [("incidents", "show", "inc_1"), ("actions", "show", "act_1")])
def test_without_a_subscriber_nobody_is_said_to_carry_an_action_out(
    server: Running, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert "nobody will carry it out: no subscription takes this action" in shown(capsys, *words)
    server.dispatcher.services.store.commit(Change(subscriptions=(subscription(),)))
    assert "to be carried out by sub-1 (https://example.com/hook)" in shown(capsys, *words)


def test_an_incident_in_a_list_is_as_far_as_its_action(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    done = action(state="done")
    server.dispatcher.services.store.commit(Change(incidents=(incident(state="acting"),), actions=(done,)))
    assert "action done" in shown(capsys, "incidents")


def test_an_action_that_was_decided_offers_no_decision(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    shown(capsys, "actions", "reject", "act_1")
    assert "approve" not in shown(capsys, "actions", "show", "act_1").partition("Next\n")[2]


def test_a_node_shows_its_state_its_reason_and_the_way_back(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    shown(capsys, "nodes", "exclude", "n1", "--reason", "smoke")
    out = shown(capsys, "nodes", "show", "n1")
    assert out.startswith("n1  excluded")
    assert "  smoke\n" in out
    assert "  eagle-eye nodes readmit n1\n" in out


def test_a_node_that_is_back_in_service_leads_to_its_newest_incident(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    following = shown(capsys, "nodes", "show", "n1").partition("Next\n")[2]
    assert following.startswith("why it was accused last, and was it right?\n  eagle-eye incidents show inc_1\n")


def test_a_job_shows_its_incidents(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert "inc_1" in shown(capsys, "jobs", "show", incident().job).partition("Incidents\n")[2]


@pytest.mark.parametrize(
    "words", [("incidents", "show", "inc_1"), ("nodes", "show", "n1"), ("jobs", "show", incident().job)]
)
def test_no_control_character_of_a_record_reaches_the_terminal(
    words: tuple[str, ...], server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, *words)
    assert "little power" in out
    assert "\x1b" not in out


def test_what_is_unknown_is_refused_in_a_line(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["incidents", "show", "inc_none"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_terminal_without_unicode_gets_plain_characters(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict", write_through=True)
    server.send(body(frame()))
    monkeypatch.setattr(sys, "stdout", plain)
    assert main(["incidents", "show", "inc_1"]) == 0


def test_evidence_is_shown_where_only_the_base_is_installed() -> None:
    program = (
        "import sys\n"
        "for name in ('numpy', 'fastapi', 'sqlalchemy'): sys.modules[name] = None\n"
        "from eagle_eye.cli import nodes, show\n"
        "print(show.figure(240.5, 'watts'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "240.5 W\n"


def test_a_node_whose_name_begins_like_a_flag_can_be_typed(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    server.send(body(frame(node="-n")))
    assert "  eagle-eye nodes exclude -- -n\n" in shown(capsys, "nodes", "show", "--", "-n")


def test_a_sparkline_is_blank_where_nothing_was_observed() -> None:
    assert sparkline([0.0, None, 5.0, 10.0], 0.0, 10.0, "abc") == "a bc"


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False, width=32)), max_size=400))
def test_a_thinned_series_fits_and_keeps_within_its_range(values: list[float | None]) -> None:
    found = thinned(values, 40)
    known = [value for value in values if value is not None]
    assert len(found) <= 40
    assert len(sparkline(found, -1.0, 1.0)) == len(found)
    assert all(value is None or min(known) <= value * 1.0000001 + 1e-30 or value <= max(known) for value in found)
    assert any(value is not None for value in found) == bool(known)
