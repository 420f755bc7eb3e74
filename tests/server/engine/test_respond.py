"""From judgements to records: one incident per cause, one action per attempt, recovery when the job steps again."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from eagle_eye.server.engine.engine import Judgement
from eagle_eye.server.engine.respond import Book, Response, respond
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.records import Action, Incident
from tests.server.engine.frames import Fleet


class Office:
    """Keeps the records that ``respond`` returns, as the store does."""

    def __init__(self, mode: Any = "act") -> None:
        self.settings = PolicySettings(mode=mode, verdict_gone_s=10)
        self.incidents: dict[str, Incident] = {}
        self.actions: dict[str, Action] = {}
        self._ids = itertools.count(1)

    def take(self, judgements: list[Judgement], blind: str = "") -> list[Response]:
        responses = []
        for judgement in judgements:
            known = [i for i in self.incidents.values() if i.state in ("open", "acting")]
            book = Book(known, list(self.actions.values()))
            response = respond(judgement, book, self.settings, 10, blind, lambda p: f"{p}{next(self._ids)}")
            self.incidents.update({i.id: i for i in response.incidents})
            self.actions.update({a.id: a for a in response.actions})
            responses.append(response)
        return responses

    def report(self, state: Any) -> None:
        (action,) = [a for a in self.actions.values() if a.state in ("requested", "accepted", "running")]
        self.actions[action.id] = msgspec.structs.replace(action, state=state)


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
