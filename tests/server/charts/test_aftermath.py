"""Was it right? What has come to light since, for and against it; nothing is claimed that nobody saw."""

from __future__ import annotations

from typing import Any

from eagle_eye.server.api.incidents import aftermath
from eagle_eye.server.model.records import NodeCheck, Ticket
from tests.server.builders import NOW, action, incident

DONE = action("act_1", state="done", kind="exclude_node", exclude=["n1"], created_s=NOW, updated_s=NOW + 2)


def check(state: Any, created_s: float = NOW + 60, node: str = "n1") -> NodeCheck:
    times = {"created_s": created_s, "updated_s": created_s + 1, "expires_s": created_s + 600}
    asked: dict[str, Any] = {"asked_by": "local", "reason": "", "checks": [], "deadline_seconds": 600.0, **times}
    return NodeCheck(id=f"chk_{created_s}", node=node, purpose="look", fault="", state=state, detail="GPU 3", **asked)


def test_nothing_is_said_of_what_was_not_carried_out() -> None:
    for state in ("would_act", "awaiting", "requested", "failed"):
        assert aftermath(incident(), [action("act_1", state=state, kind="exclude_node")], [], []) == []


def test_a_node_that_nobody_checked_is_said_to_be_not_known() -> None:
    found = aftermath(incident(), [DONE], [check("asked"), check("sick", NOW - 60), check("sick", node="n2")], [])
    assert "Not known yet: whether n1 itself is sick. It has not been checked since." in found


def test_the_newest_check_since_speaks() -> None:
    found = aftermath(incident(), [DONE], [check("sick", NOW + 60), check("healthy", NOW + 120)], [])
    assert found[0] == "A check of n1 found it healthy: GPU 3"


def test_a_false_alarm_comes_first() -> None:
    found = aftermath(incident(state="false", ended_s=NOW + 9), [DONE], [check("sick")], [])
    assert found[0] == "A person called it a false alarm."
    assert not any("over" in one for one in found)


def test_the_trouble_ended_or_goes_on() -> None:
    assert "The trouble was over 7 s after the action." in aftermath(
        incident(state="recovered", ended_s=NOW + 9), [DONE], [], []
    )
    assert any(one.startswith("The trouble goes on") for one in aftermath(incident(state="confirmed"), [DONE], [], []))


def test_how_many_kinds_of_evidence_agreed() -> None:
    assert aftermath(incident(kinds=["xid"]), [DONE], [], [])[-1] == "It rests on one kind of evidence: xid."
    two = aftermath(incident(kinds=["rank_silence", "standstill"]), [DONE], [], [])[-1]
    assert two == "2 kinds of evidence agreed: rank silence, standstill."


def test_a_ticket_of_the_node_since_the_onset_is_told() -> None:
    old, new = (
        Ticket(id=str(at), node="n1", opened_s=NOW + at, closed_s=None, text=f"riser {at}", imported_s=NOW)
        for at in (-9000, 9000)
    )
    found = aftermath(incident(), [DONE], [], [old, new])
    assert "A ticket was opened for n1: riser 9000" in found
    assert not any("-9000" in one for one in found)
