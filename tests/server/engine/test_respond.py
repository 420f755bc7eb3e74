"""From judgements to records: one incident per cause, one action per attempt, recovery when the job steps again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from eagle_eye.detectors.types import Verdict
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.respond import Book, Response, respond
from eagle_eye.server.engine.settings import JobTerms, ModeRule, PolicySettings
from eagle_eye.server.model.records import Action, Incident
from tests.server.engine.frames import Fleet


class Office:
    """Keeps the records that ``respond`` returns, as the store does."""

    def __init__(self, mode: Any = "act") -> None:
        self.settings = PolicySettings(mode=mode, verdict_gone_s=10)
        self.incidents: dict[str, Incident] = {}
        self.actions: dict[str, Action] = {}
        self._ids = itertools.count(1)

    def _new_ids(self) -> tuple[Callable[[], str], Callable[[object], str], Callable[[object], str]]:
        def of(prefix: str) -> Callable[..., str]:
            return lambda *_: f"{prefix}{next(self._ids)}"

        return of("ev"), of("inc"), of("act")

    def take(self, judgements: list[Judgement], blind: str = "") -> list[Response]:
        responses = []
        for judgement in judgements:
            known = [i for i in self.incidents.values() if i.state in ("suspected", "confirmed", "acting", "recovered")]
            book = Book(known, list(self.actions.values()), earlier=list(self.incidents.values()))
            response = respond(judgement, book, self.settings, 10, blind, *self._new_ids())
            self.incidents.update({i.id: i for i in response.incidents})
            self.actions.update({a.id: a for a in response.actions})
            responses.append(response)
        return responses

    def report(self, state: Any, now_s: float | None = None) -> None:
        (action,) = [a for a in self.actions.values() if a.state in ("requested", "accepted", "running")]
        reported_s = action.updated_s if now_s is None else now_s
        self.actions[action.id] = msgspec.structs.replace(action, state=state, updated_s=reported_s)


def hung(office: Office) -> Fleet:
    fleet = Fleet()
    office.take(fleet.run(30))
    fleet.stopped, fleet.silent_s = True, {"n1": 9.0}
    office.take(fleet.run(12))
    return fleet


def test_a_hang_asks_once_for_the_exclusion_of_its_node() -> None:
    office = Office()
    fleet = hung(office)
    office.take(fleet.run(10))
    (action,) = office.actions.values()
    assert (action.kind, action.exclude, action.attempt, action.state) == ("exclude_node", ["n1"], 0, "requested")
    (incident,) = office.incidents.values()
    assert incident.state == "acting"


def test_observe_mode_keeps_what_it_would_have_done() -> None:
    office = Office(mode="observe")
    hung(office)
    (action,) = office.actions.values()
    assert action.state == "would_act"
    assert "observe" in next(iter(office.incidents.values())).hold


def test_approve_mode_waits_for_a_person() -> None:
    office = Office(mode="approve")
    hung(office)
    assert [a.state for a in office.actions.values()] == ["awaiting"]


def test_the_incident_recovers_when_the_next_attempt_steps() -> None:
    office = Office()
    fleet = hung(office)
    office.report("done")
    fleet.declare(1, nodes=["n0", "n2", "n3"])
    fleet.stopped, fleet.silent_s = False, {}
    office.take(fleet.run(3))
    assert [i.state for i in office.incidents.values()] == ["recovered"]


def test_ranks_killed_by_the_restart_are_no_new_incident() -> None:
    office = Office()
    fleet = hung(office)
    office.report("running")
    fleet.happens("n0", "process_exit", exit_code=-9, rank=0)
    office.take(fleet.run(5))
    assert len(office.incidents) == 1


def test_a_hang_that_ends_by_itself_withdraws_what_nobody_began() -> None:
    office = Office(mode="approve")
    fleet = hung(office)
    fleet.stopped, fleet.silent_s = False, {}
    office.take(fleet.run(20))
    assert [i.state for i in office.incidents.values()] == ["recovered"]
    assert [a.state for a in office.actions.values()] == ["withdrawn"]


def test_a_request_whose_report_is_late_is_not_withdrawn_when_the_job_moves_on() -> None:
    office = Office()
    fleet = hung(office)
    fleet.declare(1, nodes=["n0", "n2", "n3"])
    fleet.stopped, fleet.silent_s = False, {}
    office.take(fleet.run(5))
    assert [i.state for i in office.incidents.values()] == ["recovered"]
    assert [a.state for a in office.actions.values()] == ["requested"]


def test_a_request_that_nobody_took_up_is_withdrawn_when_the_job_has_moved_on_for_a_while() -> None:
    office = Office()
    fleet = hung(office)
    fleet.declare(1, nodes=["n0", "n2", "n3"])
    fleet.stopped, fleet.silent_s = False, {}
    office.take(fleet.run(30))
    assert [(a.state, a.reason) for a in office.actions.values()] == [
        ("withdrawn", "nobody took it up, and the job is in attempt 1")
    ]


def test_a_blind_server_holds_and_says_why() -> None:
    office = Office()
    fleet = Fleet()
    office.take(fleet.run(30))
    fleet.stopped, fleet.silent_s = True, {"n1": 9.0}
    office.take(fleet.run(12), blind="no disk")
    assert not office.actions
    assert "no disk" in next(iter(office.incidents.values())).hold


def test_an_action_that_nobody_took_expires_and_is_not_asked_again() -> None:
    office = Office()
    fleet = hung(office)
    office.settings = msgspec.structs.replace(office.settings)
    (action,) = office.actions.values()
    office.actions[action.id] = msgspec.structs.replace(action, expires_s=fleet.now_s)
    office.take(fleet.run(5))
    assert [a.state for a in office.actions.values()] == ["expired"]


def test_an_approval_that_a_person_took_back_is_asked_for_anew() -> None:
    office = Office(mode="approve")
    fleet = hung(office)
    (action,), (incident,) = office.actions.values(), office.incidents.values()
    office.actions[action.id] = msgspec.structs.replace(action, state="withdrawn")
    office.incidents[incident.id] = msgspec.structs.replace(incident, state="confirmed", hold="it was withdrawn")
    office.take(fleet.run(5))
    assert [a.state for a in office.actions.values()] == ["withdrawn", "awaiting"]
    (incident,) = office.incidents.values()
    assert (incident.state, incident.hold, incident.escalation) == ("acting", "", "")


def test_what_expired_and_was_asked_for_again_is_under_way() -> None:
    office = Office(mode="approve")
    fleet = hung(office)
    (action,) = office.actions.values()
    office.actions[action.id] = msgspec.structs.replace(action, expires_s=fleet.now_s)
    office.take(fleet.run(5))
    (incident,) = office.incidents.values()
    assert (incident.state, incident.hold_rule) == ("confirmed", "tries")
    again = msgspec.structs.replace(action, id="again", created_s=fleet.now_s, expires_s=fleet.now_s + 600)
    office.actions["again"] = again
    office.take(fleet.run(5))
    assert [a.state for a in office.actions.values()] == ["expired", "awaiting"]
    assert next(iter(office.incidents.values())).state == "acting"


def test_the_crash_of_peers_is_explained_by_the_unreachable_node() -> None:
    office = Office()
    fleet = Fleet()
    office.take(fleet.run(30))
    fleet.stopped, fleet.mute = True, {"n2"}
    for node in ("n0", "n1"):
        fleet.happens(node, "training_error", text="RuntimeError: Connection closed by peer", rank=0)
        fleet.happens(node, "process_exit", exit_code=1, rank=0)
    office.take(fleet.run(15))
    assert [(i.fault, i.node) for i in office.incidents.values()] == [("node_unreachable", "n2")]


@pytest.mark.parametrize("mode", ["observe", "approve", "act"])
def test_a_silent_node_of_a_running_job_asks_for_nothing(mode: str) -> None:
    office = Office(mode=mode)
    fleet = Fleet()
    office.take(fleet.run(30))
    fleet.mute = {"n2"}
    office.take(fleet.run(30))
    assert not office.actions
    (incident,) = office.incidents.values()
    assert incident.action == "notify"


def test_a_failed_action_is_asked_for_again_where_the_site_allows_it() -> None:
    office = Office()
    office.settings = msgspec.structs.replace(office.settings, tries_max=2, retry_s=3)
    fleet = hung(office)
    office.report("failed", fleet.now_s)
    office.take(fleet.run(2))
    assert [(i.state, i.hold_rule) for i in office.incidents.values()] == [("confirmed", "tries")]
    office.take(fleet.run(3))
    assert [a.state for a in office.actions.values()] == ["failed", "requested"]
    office.report("failed", fleet.now_s)
    office.take(fleet.run(10))
    assert [a.state for a in office.actions.values()] == ["failed", "failed"]
    assert "attempt 2 of 2" in next(iter(office.incidents.values())).hold


def test_an_action_that_nobody_reports_on_is_given_to_people_until_somebody_does() -> None:
    office = Office()
    office.settings = msgspec.structs.replace(office.settings, report_s=5)
    fleet = hung(office)
    office.report("running", fleet.now_s)
    office.take(fleet.run(7))
    (incident,) = office.incidents.values()
    assert (incident.state, incident.hold_rule) == ("confirmed", "report")
    assert len(office.actions) == 1
    office.report("running", fleet.now_s)
    office.take(fleet.run(1))
    (incident,) = office.incidents.values()
    assert (incident.state, incident.hold) == ("acting", "")


def test_a_mode_for_one_job_overrides_the_others() -> None:
    office = Office(mode="observe")
    office.settings = msgspec.structs.replace(office.settings, modes=[ModeRule(jobs=["j"], mode="approve")])
    hung(office)
    assert [a.state for a in office.actions.values()] == ["awaiting"]


def test_an_action_carries_what_the_rules_said() -> None:
    office = Office()
    office.settings = msgspec.structs.replace(office.settings, jobs=[JobTerms(jobs=["j"], may_restart=False)])
    hung(office)
    (action,) = office.actions.values()
    assert (action.restart, "may not be restarted" in action.summary) == (False, True)
    assert {word.rule for word in action.policy} >= {"fault", "evidence", "may_restart", "mode"}


def slow(now_s: float) -> Judgement:
    verdict = Verdict(
        detector="pcie_degraded",
        fault="pcie_degraded",
        job="j",
        nodes=("n1",),
        node="n1",
        device=0,
        confidence=0.99,
        onset_s=0.0,
        summary="half the lanes",
        evidence=(),
        kinds=frozenset({"link_width", "compute_time"}),
        slowdown_ratio=0.3,
    )
    return Judgement("j", 0, now_s, (verdict,), members=4, heard=4, stepping=True)


def test_a_checkpoint_comes_before_a_planned_exclusion() -> None:
    office = Office()
    office.settings = msgspec.structs.replace(office.settings, checkpoint_wait_s=60)
    office.take([slow(100.0), slow(101.0)])
    (first,) = office.actions.values()
    assert (first.kind, first.preliminary, first.exclude, first.restart) == ("checkpoint_now", True, [], False)
    (incident,) = office.incidents.values()
    assert (incident.state, incident.hold_rule) == ("confirmed", "checkpoint_first")
    office.report("done")
    office.take([slow(102.0), slow(103.0)])
    assert [(a.kind, a.state) for a in office.actions.values()][1:] == [("exclude_node", "requested")]


def test_a_checkpoint_that_nobody_makes_holds_the_exclusion_no_longer_than_allowed() -> None:
    office = Office()
    office.settings = msgspec.structs.replace(office.settings, checkpoint_wait_s=60)
    office.take([slow(100.0), slow(159.0)])
    assert len(office.actions) == 1
    office.take([slow(160.0)])
    assert [(a.kind, a.state) for a in office.actions.values()] == [
        ("checkpoint_now", "expired"),
        ("exclude_node", "requested"),
    ]


def lost(node: str | None, onset_s: float, now_s: float) -> Judgement:
    """The job goes on in attempt 0, as one does whose replicas are replaced; a GPU of the node, if any, is lost."""
    verdict = Verdict(
        detector="gpu_lost",
        fault="gpu_lost",
        job="j",
        nodes=(node or "",),
        node=node,
        device=0,
        confidence=0.99,
        onset_s=onset_s,
        summary="XID 79",
        evidence=(),
        kinds=frozenset({"xid"}),
        fact=True,
    )
    verdicts = (verdict,) if node else ()
    return Judgement("j", 0, now_s, verdicts, members=4, heard=4, stepping=True, advanced_s=now_s - 1.0)


def replaced(office: Office) -> None:
    """The replica on n1 was replaced at 110, and the incident of it is over."""
    office.take([lost("n1", 100.0, 101.0)])
    office.report("done", 110.0)
    office.take([lost(None, 0.0, 112.0), lost(None, 0.0, 125.0)])


def test_where_a_job_goes_on_in_its_attempt_after_a_restart_the_incident_recovers() -> None:
    office = Office()
    replaced(office)
    assert [i.state for i in office.incidents.values()] == ["recovered"]


def test_a_fault_that_begins_after_a_restart_is_acted_on_in_the_same_attempt() -> None:
    office = Office()
    replaced(office)
    office.take([lost("n2", 130.0, 131.0)])
    assert [(a.exclude, a.attempt, a.state) for a in office.actions.values()] == [
        (["n1"], 0, "done"),
        (["n2"], 0, "requested"),
    ]


def test_what_began_before_a_restart_was_done_is_no_new_incident_in_the_same_attempt() -> None:
    office = Office()
    replaced(office)
    office.take([lost("n2", 109.0, 126.0)])
    assert len(office.incidents) == 1
