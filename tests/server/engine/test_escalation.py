"""What failed for good, or was begun and forgotten, goes to people, once; what waits is taken back for maintenance."""

from __future__ import annotations

import msgspec

from eagle_eye.server.engine.settings import Maintenance
from eagle_eye.server.model.records import Action, Incident
from tests.server.engine.frames import Fleet
from tests.server.engine.test_respond import Office, hung, slow


def the(office: Office) -> Incident:
    (incident,) = office.incidents.values()
    return incident


def last(office: Office) -> Action:
    return list(office.actions.values())[-1]


def test_an_action_that_failed_for_good_is_given_to_people_once() -> None:
    office = Office()
    fleet = hung(office)
    office.report("failed", fleet.now_s)
    office.take(fleet.run(1))
    escalated = the(office)
    assert (escalated.state, escalated.escalated_s) == ("confirmed", fleet.now_s)
    assert "failed (attempt 1 of 1)" in escalated.escalation
    office.take(fleet.run(5))
    assert the(office).escalated_s == escalated.escalated_s


def test_while_a_try_is_left_nobody_is_called() -> None:
    office = Office()
    office.settings = msgspec.structs.replace(office.settings, tries_max=2, retry_s=3)
    fleet = hung(office)
    office.report("failed", fleet.now_s)
    office.take(fleet.run(2))
    assert the(office).escalation == ""
    office.take(fleet.run(3))
    office.report("refused", fleet.now_s)
    office.take(fleet.run(2))
    assert "attempt 2 of 2" in the(office).escalation


def test_an_action_that_nobody_took_up_is_given_to_people() -> None:
    office = Office()
    fleet = hung(office)
    office.actions[last(office).id] = msgspec.structs.replace(last(office), expires_s=fleet.now_s)
    office.take(fleet.run(2))
    assert "expired: nobody approved it or took it up in time (attempt 1 of 1)" in the(office).escalation


def test_what_a_person_rejected_calls_nobody() -> None:
    office = Office(mode="approve")
    fleet = hung(office)
    office.actions[last(office).id] = msgspec.structs.replace(last(office), state="rejected", updated_s=fleet.now_s)
    office.take(fleet.run(5))
    assert (the(office).hold_rule, the(office).escalation) == ("tries", "")


def test_an_action_without_a_report_is_given_to_people_until_there_is_one() -> None:
    office = Office()
    office.settings = msgspec.structs.replace(office.settings, report_s=5)
    fleet = hung(office)
    office.report("running", fleet.now_s)
    office.take(fleet.run(7))
    assert "policy.report_s" in the(office).escalation
    office.report("running", fleet.now_s)
    office.take(fleet.run(1))
    assert (the(office).state, the(office).escalation, the(office).escalated_s) == ("acting", "", None)


def maintained(office: Office, from_s: float, until_s: float) -> None:
    window = Maintenance(from_s=from_s, until_s=until_s, nodes=["n1"], reason="firmware")
    office.settings = msgspec.structs.replace(office.settings, maintenance=[window])


def test_a_request_is_taken_back_when_a_maintenance_window_opens_and_made_anew_after_it() -> None:
    office = Office()
    fleet = hung(office)
    maintained(office, fleet.now_s + 3, fleet.now_s + 10)
    office.take(fleet.run(2))
    assert [a.state for a in office.actions.values()] == ["requested"]
    office.take(fleet.run(2))
    assert last(office).state == "withdrawn"
    assert "firmware of n1" in last(office).reason
    assert (the(office).state, the(office).hold_rule) == ("confirmed", "maintenance")
    office.take(fleet.run(8))
    assert [a.state for a in office.actions.values()] == ["withdrawn", "requested"]
    assert the(office).state == "acting"


def test_what_was_taken_up_is_not_taken_back() -> None:
    office = Office()
    fleet = hung(office)
    office.report("accepted", fleet.now_s)
    maintained(office, fleet.now_s, fleet.now_s + 10)
    office.take(fleet.run(3))
    assert last(office).state == "accepted"


def test_a_checkpoint_is_taken_back_too_and_asked_for_again() -> None:
    office = Office()
    office.settings = msgspec.structs.replace(office.settings, checkpoint_wait_s=60)
    office.take([slow(100.0)])
    maintained(office, 101.0, 110.0)
    office.take([slow(101.0), slow(105.0)])
    assert [(a.kind, a.state) for a in office.actions.values()] == [("checkpoint_now", "withdrawn")]
    office.take([slow(110.0)])
    assert [(a.kind, a.state) for a in office.actions.values()][1:] == [("checkpoint_now", "requested")]


def test_what_came_back_before_anybody_acted_is_asked_for_again() -> None:
    office = Office()
    fleet: Fleet = hung(office)
    fleet.stopped, fleet.silent_s = False, {}
    office.take(fleet.run(20))
    assert last(office).state == "withdrawn"
    assert "recovered" in last(office).reason
    fleet.stopped, fleet.silent_s = True, {"n1": 9.0}
    office.take(fleet.run(25))  # it has learned that this job may pause
    assert [a.state for a in office.actions.values()] == ["withdrawn", "requested"]
