from __future__ import annotations

from typing import Any, get_args

import pytest
from msgspec.structs import replace

from eagle_eye.schema.action import Report, ReportState
from eagle_eye.server.engine import ledger
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import ActionState, Node
from tests.server.builders import NOW, action, incident

LEGAL = {
    "requested": {"accepted", "running", "done", "failed", "refused"},
    "accepted": {"running", "done", "failed", "refused"},
    "running": {"done", "failed"},
    # A subscriber that had begun before it heard of the withdrawal: what was done is to be known.
    "withdrawn": {"accepted", "running", "done", "failed", "refused"},
}


@pytest.mark.parametrize("state", get_args(ActionState))
@pytest.mark.parametrize("reported", get_args(ReportState))
def test_a_report_moves_an_action_only_where_the_table_says(state: str, reported: ReportState) -> None:
    before = action(state=state)
    if reported in LEGAL.get(state, set()) or reported == state:
        after = ledger.report_action(before, Report(reported, "why"), "tok-1", NOW + 1)
        assert after.state == reported
        assert after.reports == [{"state": reported, "detail": "why", "time_s": NOW + 1, "who": "tok-1"}]
    else:
        with pytest.raises(IllegalTransition, match=state):
            ledger.report_action(before, Report(reported), "tok-1", NOW + 1)


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
    for state in ("requested", "accepted", "running", "done"):  # the answer was lost and the word is repeated
        approved = action(state=state)
        assert ledger.approve(approved, NOW) is approved
    for state in ("would_act", "failed", "expired", "rejected"):
        with pytest.raises(IllegalTransition):
            ledger.approve(action(state=state), NOW)
    with pytest.raises(IllegalTransition):
        ledger.reject(action(state="requested"), NOW)


def test_what_is_past_its_expiry_cannot_be_approved() -> None:
    with pytest.raises(IllegalTransition, match="past its expiry"):
        ledger.approve(action(state="awaiting", expires_s=NOW), NOW)


def test_what_a_subscriber_accepted_can_be_neither_withdrawn_nor_expired() -> None:
    assert ledger.withdraw(action(), "over", NOW).state == "withdrawn"
    assert ledger.expire(action(), NOW).state == "expired"
    for state in ("accepted", "running", "done"):
        with pytest.raises(IllegalTransition):
            ledger.withdraw(action(state=state), "over", NOW)
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
    assert ledger.stand(out, "excluded", "smoke", NOW + 2) is out
    assert ledger.stand(out, "excluded", "", NOW + 2) is out
    assert ledger.readmit(node, "", "tok", NOW + 2, 100.0) is node


def out_of_service(**more: Any) -> Node:
    fields: dict[str, Any] = {"state": "excluded", "reason": "gpu_lost: inc_1", "by": "server", "fault": "gpu_lost"}
    return Node(node="n1", updated_s=NOW, **{**fields, **more})


def test_another_reason_makes_a_drain_of_ours_the_one_of_who_gave_it() -> None:
    theirs = ledger.stand(out_of_service(state="draining"), "draining", "new power supply", NOW + 1, "tok_alice")
    assert (theirs.by, theirs.reason, theirs.fault) == ("tok_alice", "new power supply", "gpu_lost")
    assert ledger.take_out(theirs, "hang", "hang: inc_2", "excluded", NOW + 2) is theirs


def test_whoever_changes_a_nodes_standing_voids_the_return_that_waits_for_a_check() -> None:
    checking = out_of_service(check_id="chk_1")
    assert ledger.stand(checking, "excluded", "", NOW + 1, "tok").check_id == ""
    assert ledger.stand(checking, "draining", "no", NOW + 1, "tok").check_id == ""
    assert ledger.take_out(checking, "silent_data_corruption", "", "excluded", NOW + 1).check_id == ""


def test_a_suspect_of_silent_corruption_stays_one_whoever_took_it_out_and_whatever_follows() -> None:
    theirs = out_of_service(by="tok_alice", fault="", reason="new power supply")
    suspect = ledger.take_out(theirs, "silent_data_corruption", "sdc: inc_2", "excluded", NOW + 1)
    assert (suspect.fault, suspect.reason, suspect.by) == ("silent_data_corruption", theirs.reason, "tok_alice")
    drained = out_of_service(fault="silent_data_corruption", state="draining")
    assert ledger.take_out(drained, "hang", "hang: inc_3", "excluded", NOW + 2).fault == "silent_data_corruption"


def test_a_node_that_returns_is_watched_for_its_fault_and_a_related_one_is_a_relapse() -> None:
    back = ledger.readmit(out_of_service(), "replaced", "tok", NOW + 1, 100.0)
    assert (back.state, back.fault, back.watched_until_s, back.by) == ("in_service", "gpu_lost", NOW + 101, "tok")
    related, other = (ledger.take_out(back, fault, "", "excluded", NOW + 50) for fault in ("gpu_hang", "nic_degraded"))
    assert (related.relapsed, other.relapsed) == ([NOW + 50], [])
    assert ledger.take_out(back, "gpu_hang", "", "excluded", NOW + 101).relapsed == []
    assert ledger.readmit(out_of_service(), "", "tok", NOW + 1, 0.0).watched_until_s is None
    often = replace(back, relapsed=[NOW] * ledger.RELAPSES_MAX)
    assert len(ledger.take_out(often, "gpu_hang", "", "excluded", NOW + 50).relapsed) == ledger.RELAPSES_MAX
