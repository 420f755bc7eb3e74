from __future__ import annotations

from typing import get_args

import pytest

from eagle_eye.schema.action import Report, ReportState
from eagle_eye.server import ledger
from eagle_eye.server.errors import IllegalTransition
from eagle_eye.server.records import ActionState, Node
from tests.server.builders import NOW, action, incident

LEGAL = {
    "requested": {"accepted", "running", "done", "failed", "refused"},
    "accepted": {"running", "done", "failed", "refused"},
    "running": {"done", "failed"},
    # A subscriber that had begun before it heard of the withdrawal: what was done is to be known.
    "withdrawn": {"accepted", "running", "done", "failed", "refused"},
}


@pytest.mark.parametrize("state", get_args(ActionState))
@pytest.mark.parametrize("told", get_args(ReportState))
def test_a_report_moves_an_action_only_where_the_table_says(state: str, told: ReportState) -> None:
    before = action(state=state)
    if told in LEGAL.get(state, set()) or told == state:
        after = ledger.report_action(before, Report(told, "why"), "tok-1", NOW + 1)
        assert after.state == told
        assert after.reports == [{"state": told, "detail": "why", "time_s": NOW + 1, "who": "tok-1"}]
    else:
        with pytest.raises(IllegalTransition, match=state):
            ledger.report_action(before, Report(told), "tok-1", NOW + 1)


def test_the_same_report_twice_changes_nothing() -> None:
    once = ledger.report_action(action(), Report("done", "ok"), "tok-1", NOW)
    assert ledger.report_action(once, Report("done", "ok"), "tok-1", NOW + 5) is once


def test_a_running_action_may_say_more_of_how_it_runs() -> None:
    running = ledger.report_action(action(), Report("running", "1 of 2"), "tok-1", NOW)
    further = ledger.report_action(running, Report("running", "2 of 2"), "tok-1", NOW)
    assert [report["detail"] for report in further.reports] == ["1 of 2", "2 of 2"]


def test_reports_are_bounded_but_the_last_word_is_always_heard() -> None:
    record = action()
    for number in range(ledger.REPORTS_MAX):
        record = ledger.report_action(record, Report("running", str(number)), "tok-1", NOW)
    with pytest.raises(IllegalTransition, match="100 reports"):
        ledger.report_action(record, Report("running", "more"), "tok-1", NOW)
    assert ledger.report_action(record, Report("done", "x" * 10_000), "tok-1", NOW).state == "done"


def test_a_long_detail_is_cut() -> None:
    record = ledger.report_action(action(), Report("done", "x" * 10_000), "tok-1", NOW)
    assert len(record.reports[0]["detail"]) == ledger.REPORT_CHARS_MAX


def test_approval_and_rejection_answer_what_awaits_one() -> None:
    assert ledger.approve(action(state="awaiting"), NOW).state == "requested"
    assert ledger.reject(action(state="awaiting"), NOW).state == "rejected"
    requested = action(state="requested")
    assert ledger.approve(requested, NOW) is requested
    for state in ("would_act", "done", "expired", "rejected"):
        with pytest.raises(IllegalTransition):
            ledger.approve(action(state=state), NOW)
    with pytest.raises(IllegalTransition):
        ledger.reject(action(state="requested"), NOW)


def test_what_is_past_its_expiry_cannot_be_approved() -> None:
    with pytest.raises(IllegalTransition, match="past its expiry"):
        ledger.approve(action(state="awaiting", expires_s=NOW), NOW)


def test_what_a_subscriber_accepted_can_be_neither_withdrawn_nor_expired() -> None:
    assert ledger.withdraw(action(), NOW).state == "withdrawn"
    assert ledger.expire(action(), NOW).state == "expired"
    for state in ("accepted", "running", "done"):
        with pytest.raises(IllegalTransition):
            ledger.withdraw(action(state=state), NOW)
        with pytest.raises(IllegalTransition):
            ledger.expire(action(state=state), NOW)


def test_incident_verbs_are_idempotent_and_false_is_final() -> None:
    seen = ledger.acknowledge(incident(), "tok-1", NOW + 1)
    assert seen.acknowledged_by == "tok-1"
    assert ledger.acknowledge(seen, "tok-2", NOW + 2) is seen
    closed = ledger.resolve(incident(), NOW + 1)
    assert (closed.state, closed.ended_s) == ("closed", NOW + 1)
    assert ledger.resolve(closed, NOW + 2) is closed
    false = ledger.mark_false(closed, NOW + 3)
    assert (false.state, false.ended_s) == ("false", NOW + 1)
    assert ledger.mark_false(false, NOW + 4) is false
    with pytest.raises(IllegalTransition):
        ledger.resolve(false, NOW + 5)


def test_a_nodes_standing_changes_once() -> None:
    node = Node(node="n1", state="in_service", reason="", updated_s=NOW)
    out = ledger.stand(node, "excluded", "smoke", NOW + 1)
    assert (out.state, out.reason, out.updated_s) == ("excluded", "smoke", NOW + 1)
    assert ledger.stand(out, "excluded", "again", NOW + 2) is out
