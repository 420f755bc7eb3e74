"""What an operator is told to type, and the story of an incident."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.charts.dossier import ENTRIES_MAX, OperatorCommand, commands, story
from eagle_eye.server.model.records import AuditEntry, Delivery, EvidenceRequest, Job, Node
from tests.server.builders import NOW, action, incident

JOB = Job(job="job", attempt=0, state="running", ranks=[], restart_owner="", updated_s=NOW)
SLURM = Job(**{**{name: getattr(JOB, name) for name in JOB.__struct_fields__}, "scheduled_as": "slurm:17"})


def node(name: str, state: str = "in_service") -> Node:
    return Node(node=name, state=state, reason="", updated_s=NOW)  # type: ignore[arg-type]


def texts(found: list[OperatorCommand]) -> list[tuple[str, str]]:
    return [(one.command, one.undo) for one in found]


def test_what_awaits_approval_comes_first_and_is_undone_by_readmission() -> None:
    found = commands(incident(state="acting"), [action(state="awaiting")], {"n1": node("n1")}, JOB)
    assert texts(found)[:2] == [
        ("eagle-eye actions approve act_1", "eagle-eye nodes readmit n1"),
        ("eagle-eye actions reject act_1", ""),
    ]


def test_what_was_not_done_can_be_done_by_hand_and_by_the_scheduler() -> None:
    found = texts(commands(incident(), [action(state="would_act")], {"n1": node("n1")}, SLURM))
    assert ("eagle-eye nodes exclude --reason 'hang inc_1' n1", "eagle-eye nodes readmit n1") in found
    drain = "scontrol update NodeName=n1 State=DRAIN 'Reason=eagle-eye hang inc_1'"
    assert (drain, "scontrol update NodeName=n1 State=RESUME") in found


def test_a_node_that_is_out_is_checked_and_readmitted() -> None:
    found = texts(commands(incident(state="recovered"), [action(state="done")], {"n1": node("n1", "excluded")}, JOB))
    assert found[:2] == [
        ("eagle-eye nodes check n1", ""),
        ("eagle-eye nodes readmit n1", "eagle-eye nodes exclude n1"),
    ]


def test_what_is_under_way_is_followed_and_not_done_twice() -> None:
    found = texts(commands(incident(state="acting"), [action(state="running")], {"n1": node("n1")}, JOB))
    assert found[0] == ("eagle-eye actions show act_1", "")
    assert not any("exclude" in command for command, _ in found)


@pytest.mark.parametrize(("mode", "offered"), [("approve", True), ("act", False)])
def test_an_approval_is_taken_back_where_a_person_gave_it(mode: str, offered: bool) -> None:
    found = texts(commands(incident(state="acting"), [action()], {}, JOB, mode))
    assert (("eagle-eye actions withdraw act_1", "") in found) == offered


@pytest.mark.parametrize(("state", "offered"), [("confirmed", True), ("recovered", False)])
def test_what_expired_is_asked_for_again_while_the_trouble_lasts(state: str, offered: bool) -> None:
    found = texts(commands(incident(state=state), [action(state="expired")], {}, JOB))
    assert (("eagle-eye actions renew act_1", "") in found) == offered


@given(st.text(max_size=40))
def test_no_name_of_a_node_is_more_than_a_name_to_a_shell(name: str) -> None:
    found = commands(incident(nodes=[name], node=name), [], {name: node(name)}, SLURM)
    lines = [shlex.split(line) for one in found for line in (one.command, one.undo) if line]
    excluding = [words for words in lines if words[:3] == ["eagle-eye", "nodes", "exclude"]]
    assert len(excluding) == (1 if name and name.isprintable() else 0)
    for words in excluding:
        assert words[-1] == name
        assert not name.startswith("-") or words[-2] == "--"
    for words in lines:
        if words[0] == "scontrol":
            assert words[2] == f"NodeName={name}"
            assert name.isascii()


@pytest.mark.parametrize("name", ["n1\nrm -rf /", "\x1b[2J", ""])
def test_a_name_that_cannot_be_typed_gives_no_command(name: str) -> None:
    found = commands(incident(nodes=[name], node=name), [], {name: node(name)}, SLURM)
    assert [shlex.split(one.command)[1:3] for one in found] == [["incidents", "acknowledge"], ["incidents", "false"]]


def test_the_story_is_told_in_the_order_of_time() -> None:
    asked = action(reports=[{"state": "done", "detail": "n1 is out", "who": "tok_1", "time_s": NOW + 5}])
    sent = Delivery(
        id="d", event_id="e", subscription_id="sub-1", type="eagle_eye.action.requested", state="delivered",
        attempts=1, due_s=NOW, created_s=NOW, updated_s=NOW + 1,
    )  # fmt: skip
    bundle = EvidenceRequest(
        id="ev", incident_id="inc_1", node="n1", job="job", attempt=0, kind="evidence", state="received",
        within_seconds=3.0, asked_by="server", created_s=NOW, updated_s=NOW + 3, expires_s=NOW, bytes=5,
    )  # fmt: skip
    trail = [
        AuditEntry(time_s=NOW, who="server", verb="open", subject="inc_1", detail="hang of n1"),
        AuditEntry(time_s=NOW + 4, who="tok_2", verb="acknowledge", subject="inc_1"),
        AuditEntry(time_s=NOW + 5, who="tok_1", verb="report done", subject="act_1"),
    ]
    found = story(incident(), [asked], [sent], [bundle], trail).entries
    assert [entry.kind for entry in found] == ["fault", "incident", "delivery", "evidence", "person", "report"]
    assert found[-1].text == "exclude node: done: n1 is out"


def test_a_long_story_keeps_its_end_and_says_what_it_left_out() -> None:
    trail = [
        AuditEntry(time_s=NOW + n, who="server", verb="change", subject="inc_1", detail="x" * 5_000)
        for n in range(ENTRIES_MAX + 10)
    ]
    found = story(incident(), [], [], [], trail)
    assert (len(found.entries), found.left_out) == (ENTRIES_MAX, 11)
    assert len(found.entries[-1].text) <= 1_000
