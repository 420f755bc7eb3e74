"""Evidence before the kill: who is asked, what waits for it, and what does not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.respond import Book, Gathering, Response, reason_to_wait, respond
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Action, EvidenceRequest, EvidenceState, Incident
from tests.server.engine.frames import Fleet
from tests.server.engine.situations import NOW_S, incident

WAIT_S = 5.0


class Office:
    """Keeps the records that ``respond`` returns, and knows whose agents gather."""

    def __init__(self, mode: Any = "act", wait_s: float = WAIT_S, able: tuple[str, ...] = ("n0", "n1", "n2")) -> None:
        self.settings = PolicySettings(mode=mode, verdict_gone_s=10)
        self.wait_s = wait_s
        self.able = dict.fromkeys(able)
        self.heard_s: dict[str, float] = {}
        self.nodes_max = 32
        self.incidents: dict[str, Incident] = {}
        self.actions: dict[str, Action] = {}
        self.evidence: dict[str, EvidenceRequest] = {}
        self._ids = itertools.count(1)

    def _new_ids(self) -> tuple[Callable[[], str], Callable[[object], str], Callable[[object], str]]:
        def of(prefix: str) -> Callable[..., str]:
            return lambda *_: f"{prefix}{next(self._ids)}"

        return of("ev"), of("inc"), of("act")

    def take(self, judgements: list[Judgement]) -> list[Response]:
        responses = []
        for judgement in judgements:
            known = [i for i in self.incidents.values() if i.state in ("suspected", "confirmed", "acting", "recovered")]
            heard_s = {node: self.heard_s.get(node, judgement.now_s) for node in self.able}
            gathering = Gathering(heard_s, list(self.evidence.values()), self.wait_s, nodes_max=self.nodes_max)
            book = Book(known, list(self.actions.values()), gathering=gathering)
            response = respond(judgement, book, self.settings, 10, "", *self._new_ids())
            self.incidents.update({i.id: i for i in response.incidents})
            self.actions.update({a.id: a for a in response.actions})
            self.evidence.update({e.id: e for e in response.evidence})
            responses.append(response)
        return responses

    def answered(self, state: EvidenceState = "received") -> None:
        self.evidence = {e.id: msgspec.structs.replace(e, state=state) for e in self.evidence.values()}

    @property
    def hold(self) -> str:
        (incident,) = self.incidents.values()
        return incident.hold


def until_asked(office: Office, fleet: Fleet) -> None:
    """Run a second at a time until the first request or action."""
    for _ in range(120):
        office.take(fleet.run(1))
        if office.evidence or office.actions:
            return
    raise AssertionError("nothing was ever asked")


def hung(office: Office) -> Fleet:
    fleet = Fleet()
    office.take(fleet.run(30))
    fleet.stopped, fleet.silent_s = True, {"n1": 9.0}
    until_asked(office, fleet)
    return fleet


def test_the_accused_nodes_agent_is_asked_and_the_action_waits_for_it() -> None:
    office = Office()
    hung(office)
    (asked,) = office.evidence.values()
    assert (asked.node, asked.job, asked.attempt, asked.kind, asked.state) == ("n1", "j", 0, "evidence", "asked")
    assert office.actions == {}
    assert "evidence is gathered on n1" in office.hold


def test_the_action_goes_as_soon_as_the_evidence_is_here() -> None:
    office = Office()
    fleet = hung(office)
    office.take(fleet.run(2))
    assert office.actions == {}
    office.answered()
    office.take(fleet.run(1))
    (action,) = office.actions.values()
    assert (action.kind, action.exclude, action.state) == ("exclude_node", ["n1"], "requested")
    assert office.hold == ""


@pytest.mark.parametrize("state", ["failed", "expired"])
def test_an_agent_that_has_nothing_is_not_waited_for(state: EvidenceState) -> None:
    office = Office()
    fleet = hung(office)
    office.answered(state)
    office.take(fleet.run(1))
    assert len(office.actions) == 1


def test_the_action_waits_no_longer_than_configured() -> None:
    office = Office()
    fleet = hung(office)
    office.take(fleet.run(int(WAIT_S) - 1))
    assert office.actions == {}
    office.take(fleet.run(1))
    assert len(office.actions) == 1


def test_a_clock_that_is_set_back_holds_nothing() -> None:
    office = Office()
    fleet = hung(office)
    office.evidence = {e.id: msgspec.structs.replace(e, created_s=e.created_s + 3600) for e in office.evidence.values()}
    office.take(fleet.run(1))
    assert len(office.actions) == 1


def test_nobody_is_asked_twice_for_one_incident() -> None:
    office = Office()
    fleet = hung(office)
    office.take(fleet.run(30))
    assert len(office.evidence) == 1


def test_without_waiting_both_are_asked_for_at_once() -> None:
    office = Office(wait_s=0.0)
    hung(office)
    assert (len(office.evidence), len(office.actions)) == (1, 1)


def test_a_node_whose_agent_gathers_nothing_is_neither_asked_nor_waited_for() -> None:
    office = Office(able=("n0", "n2"))
    hung(office)
    assert (office.evidence, len(office.actions)) == ({}, 1)


def test_a_silent_agent_is_asked_but_not_waited_for() -> None:
    office = Office()
    office.heard_s = {"n1": 0.0}
    hung(office)
    assert (len(office.evidence), len(office.actions)) == (1, 1)


def test_a_lost_gpu_is_a_fact_and_waits_for_nothing() -> None:
    office = Office()
    fleet = Fleet()
    office.take(fleet.run(30))
    fleet.happens("n1", "xid", code=79)
    fleet.stopped = True
    until_asked(office, fleet)
    assert [e.node for e in office.evidence.values()] == ["n1"]
    assert len(office.actions) == 1


def test_every_node_that_leaves_with_the_restart_is_asked() -> None:
    office = Office()
    fleet = Fleet(nodes=8)
    office.take(fleet.run(30))
    for node in ("n1", "n2"):
        fleet.happens(node, "xid", code=79)
    until_asked(office, fleet)
    assert [e.node for e in office.evidence.values()] == ["n1", "n2"]


@pytest.mark.parametrize(("mode", "state"), [("observe", "would_act"), ("approve", "awaiting")])
def test_what_stops_no_job_yet_does_not_wait_but_is_asked_for(mode: str, state: str) -> None:
    office = Office(mode=mode)
    hung(office)
    assert [action.state for action in office.actions.values()] == [state]
    assert len(office.evidence) == 1


def test_a_persons_own_request_holds_nothing_back() -> None:
    office = Office()
    fleet = hung(office)
    office.answered()
    (server,) = office.evidence.values()
    office.evidence["by_hand"] = msgspec.structs.replace(server, id="by_hand", state="asked", asked_by="tok-1")
    office.take(fleet.run(1))
    assert len(office.actions) == 1


def test_a_hang_without_culprit_asks_the_whole_job_up_to_the_limit() -> None:
    office = Office()
    office.nodes_max = 2
    fleet = Fleet()
    office.take(fleet.run(30))
    fleet.stopped = True
    until_asked(office, fleet)
    assert [e.node for e in office.evidence.values()] == ["n0", "n1"]


@pytest.mark.parametrize(("fault", "waits"), [("hang", True), ("node_unreachable", False)])
def test_a_node_that_is_silent_by_the_incidents_own_claim_is_not_waited_for(fault: str, waits: bool) -> None:
    unheard = incident(fault=fault, kinds=["silence", "standstill"])
    asked = EvidenceRequest(
        id="ev", incident_id=unheard.id, node="n1", job="j", attempt=1, kind="evidence", state="asked",
        within_seconds=WAIT_S, asked_by="server", created_s=NOW_S, expires_s=NOW_S + WAIT_S, updated_s=NOW_S,
    )  # fmt: skip
    gathering = Gathering({"n1": NOW_S - 3.0}, [], WAIT_S)
    assert bool(reason_to_wait(unheard, [asked], gathering, NOW_S)) == waits
