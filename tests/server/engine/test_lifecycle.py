"""An incident's life: suspected, confirmed, merged, split, back again; never two for one cause, never a storm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.detectors.types import Verdict
from eagle_eye.server.engine.incidents import OPEN_STATES, fold
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Incident
from eagle_eye.server.monitor.announcements import SETTLED_S, UPDATES_MAX, is_due, news_of
from tests.server.engine.test_fusion import verdict

GONE_S = 30.0
POLICY = PolicySettings(verdict_gone_s=GONE_S, reopen_s=900.0, reopens_max=3, reopens_window_s=3600.0)
TWO = frozenset({"standstill", "rank_silence"})


class Case:
    """Judgements of one job, one after the other, with the incidents and the news that follow."""

    def __init__(self, policy: PolicySettings = POLICY) -> None:
        self.policy = policy
        self.now_s = 1_000.0
        self.incidents: dict[str, Incident] = {}
        self.events: list[tuple[str, str]] = []
        self.notes: list[tuple[str, str]] = []
        self.kept_back = 0
        self._ids = count(1)

    def say(self, *verdicts: Verdict, after_s: float = 1.0) -> None:
        self.now_s += after_s
        judgement = Judgement("j", 0, self.now_s, verdicts, members=4, heard=4, stepping=True)
        judgement = replace(judgement, advanced_s=self.now_s)
        changed = fold(self.incidents.values(), judgement, {}, self.policy, lambda _: f"i{next(self._ids)}")
        others = [i for i in self.incidents.values() if i.id not in {c.id for c in changed}]
        due = [i for i in others if is_due(i, self.policy, self.now_s)]
        for incident in (*changed, *due):
            news = news_of(self.incidents.get(incident.id), incident, (), self.policy, self.now_s)
            self.incidents[incident.id] = news.incident
            self.kept_back += news.kept_back
            self.events += [(incident.id, news.event)] if news.event else []
            self.notes += [(incident.id, note.verb) for note in news.notes]

    def come_and_go(self, *verdicts: Verdict, times: int) -> None:
        for _ in range(times):
            self.say(*verdicts)
            self.say(after_s=GONE_S + 2)

    @property
    def open(self) -> list[Incident]:
        return [i for i in self.incidents.values() if i.state in OPEN_STATES]


def slow(fault: str, ratio: float, *nodes: str, confidence: float = 0.8) -> Verdict:
    node = nodes[0] if len(nodes) == 1 else None
    return replace(verdict(fault, node), nodes=nodes, slowdown_ratio=ratio, confidence=confidence)


def hang(node: str | None = "n1", confidence: float = 0.95) -> Verdict:
    return verdict("hang", node, kinds=TWO, confidence=confidence)


@pytest.mark.parametrize(
    ("claim", "state"),
    [
        (verdict("gpu_lost", fact=True, confidence=0.5), "confirmed"),
        (hang(), "confirmed"),
        (hang(confidence=0.85), "suspected"),
        (verdict("hang", "n1", confidence=0.99), "suspected"),  # one kind of evidence
        (verdict("hang", None, confidence=0.5), "confirmed"),  # that the job stands still is seen, not inferred
        (slow("thermal_throttle", 0.1, "n1", "n2", confidence=0.95), "suspected"),
        (verdict("storage_stall", None, confidence=0.95), "confirmed"),
    ],
)
def test_it_is_confirmed_once_the_evidence_would_do_to_act_on(claim: Verdict, state: str) -> None:
    case = Case()
    case.say(claim)
    assert [i.state for i in case.open] == [state]


def test_a_confirmed_incident_is_never_suspected_again_while_it_lasts() -> None:
    case = Case()
    case.say(hang())
    case.say(verdict("hang", "n1", confidence=0.3))
    assert [(i.state, i.kinds) for i in case.open] == [("confirmed", ["hang"])]


def test_what_comes_back_is_the_same_incident_as_it_is_seen_now() -> None:
    case = Case()
    case.come_and_go(hang(), times=1)
    case.say(hang(confidence=0.6))
    (incident,) = case.incidents.values()
    assert (incident.state, incident.flaps, incident.confidence) == ("suspected", 1, 0.6)
    assert [event for _, event in case.events] == ["opened", "resolved", "opened"]
    assert incident.since_s == case.now_s > incident.detected_s


def test_what_comes_back_on_another_node_is_another_incident() -> None:
    case = Case()
    case.come_and_go(hang("n1"), times=1)
    case.say(hang("n2"))
    assert [(i.node, i.state) for i in case.incidents.values()] == [("n1", "recovered"), ("n2", "confirmed")]


@pytest.mark.parametrize(("before", "after"), [("n1", None), (None, "n1")])
def test_what_comes_back_before_its_culprit_is_known_is_the_same_incident(
    before: str | None, after: str | None
) -> None:
    case = Case()
    case.come_and_go(hang(before), times=1)
    case.say(hang(after))
    assert [(i.node, i.flaps) for i in case.incidents.values()] == [(after, 1)]


def test_what_comes_back_late_is_another_incident() -> None:
    case = Case()
    case.come_and_go(hang(), times=1)
    case.say(hang(), after_s=POLICY.reopen_s + 1)
    assert len(case.incidents) == 2


def test_what_comes_and_goes_is_reported_so_many_times_and_then_stays_open() -> None:
    case = Case()
    case.come_and_go(hang(), times=30)
    (incident,) = case.incidents.values()
    assert (incident.state, incident.flapping, incident.flaps) == ("confirmed", True, 29)
    assert [event for _, event in case.events].count("opened") == 1 + POLICY.reopens_max
    assert case.kept_back == 2 * (29 - POLICY.reopens_max)
    assert ("i1", "flapping") in case.notes


def test_what_was_flapping_recovers_once_it_has_been_quiet() -> None:
    case = Case()
    case.come_and_go(hang(), times=6)
    case.say(after_s=POLICY.reopen_s)
    (incident,) = case.incidents.values()
    assert (incident.state, incident.flapping) == ("recovered", False)
    assert case.events[-1] == ("i1", "resolved")


def test_what_is_seen_for_long_without_a_break_is_no_longer_flapping() -> None:
    case = Case()
    case.come_and_go(hang(), times=5)
    for _ in range(200):
        case.say(hang(), after_s=GONE_S - 5)
    assert [i.flapping for i in case.open] == [False]


def test_single_nodes_are_merged_into_the_trouble_of_their_rack() -> None:
    case = Case()
    case.say(slow("thermal_throttle", 0.05, "n1"), slow("thermal_throttle", 0.05, "n2"))
    case.say(slow("thermal_throttle", 0.06, "n1", "n2", "n3"))
    first, second, rack = case.incidents.values()
    assert [(i.state, i.merged_into) for i in (first, second)] == [("closed", rack.id)] * 2
    assert (rack.merged, rack.state) == ([first.id, second.id], "suspected")
    assert [case.events.count((i.id, "resolved")) for i in (first, second)] == [1, 1]


def test_a_node_that_costs_far_more_than_its_rack_is_split_off() -> None:
    case = Case()
    case.say(slow("power_throttle", 0.04, "n1", "n2"))
    case.say(slow("power_throttle", 0.5, "n1"))
    rack, own = case.incidents.values()
    assert (own.split_from, own.node) == (rack.id, "n1")
    assert (own.id, "split") in case.notes


def test_the_slowness_of_a_node_gives_way_to_its_hang() -> None:
    case = Case()
    case.say(slow("pcie_degraded", 0.1, "n1"))
    case.say(hang("n1"))
    before, after = case.incidents.values()
    assert (before.state, before.merged_into) == ("closed", after.id)
    assert after.onset_s == 100.0, "a checkpoint from before the hang is good, whenever the slowness began"


def test_what_is_being_acted_on_is_not_merged() -> None:
    case = Case()
    case.say(slow("pcie_degraded", 0.1, "n1"))
    case.incidents["i1"] = msgspec.structs.replace(case.incidents["i1"], state="acting")
    case.say(hang("n1"))
    assert [i.state for i in case.incidents.values()] == ["acting", "confirmed"]


def test_a_victim_stays_with_the_culprit_until_it_is_sure() -> None:
    case = Case()
    culprit, victim = slow("straggler", 0.2, "n1", confidence=0.95), slow("straggler", 0.1, "n2")
    case.say(victim)
    case.say(culprit, victim)
    assert [i.merged_into for i in case.incidents.values()] == ["i2", ""]
    case.say(victim)
    assert [i.id for i in case.open] == ["i2"]
    case.say(culprit, replace(victim, confidence=0.95))
    assert [(i.id, i.split_from) for i in case.open] == [("i2", ""), ("i3", "i2")]
    case.say(culprit, victim)
    assert [i.id for i in case.open] == ["i2", "i3"], "what was split once is not merged again"


def test_who_saw_the_sign_has_seen_the_trouble() -> None:
    case = Case()
    case.say(slow("pcie_degraded", 0.1, "n1"))
    case.incidents["i1"] = msgspec.structs.replace(case.incidents["i1"], acknowledged_by="ada")
    case.say(hang("n1"))
    assert case.incidents["i2"].acknowledged_by == "ada"


def test_a_story_that_changes_all_the_time_is_told_again_when_it_has_settled() -> None:
    case = Case()
    for second in range(3 * UPDATES_MAX):
        case.say(hang("n1" if second % 2 else "n2"))
    assert [event for _, event in case.events].count("updated") == UPDATES_MAX
    before = len(case.events)
    for _ in range(int(SETTLED_S) + 2):
        case.say(hang("n2"))
    assert case.events[before:] == [("i1", "updated")]


def test_a_story_that_settles_and_changes_again_and_again_is_told_more_and_more_rarely() -> None:
    case = Case()
    for round_ in range(3 * UPDATES_MAX):
        case.say(hang("n1" if round_ % 2 else "n2"))
        for _ in range(int(SETTLED_S) + 2):
            case.say(hang("n1" if round_ % 2 else "n2"))
    hours = (case.now_s - 1_000.0) / 3600
    assert hours < 1
    assert [event for _, event in case.events].count("updated") <= UPDATES_MAX + 6


CLAIMS = st.one_of(
    st.builds(hang, st.sampled_from([None, "n1", "n2"]), st.sampled_from([0.5, 0.95])),
    st.builds(
        lambda fault, node, sure: slow(fault, 0.1, node, confidence=sure),
        st.sampled_from(["straggler", "thermal_throttle", "nic_degraded"]),
        st.sampled_from(["n1", "n2", "n3"]),
        st.sampled_from([0.5, 0.95]),
    ),
    st.just(slow("thermal_throttle", 0.05, "n1", "n2")),
    st.builds(lambda node: verdict("node_anomaly", node, kinds=frozenset({"learned"})), st.sampled_from(["n1", "n2"])),
    st.just(verdict("storage_stall", None, confidence=0.95)),
    st.just(verdict("throughput_drop", None, slowdown_ratio=0.1)),
)
ROUNDS = st.lists(st.tuples(st.lists(CLAIMS, max_size=4), st.sampled_from([1.0, 10.0, 40.0])), max_size=60)


def families(incidents: Iterable[Incident]) -> list[str]:
    return [incident.family for incident in incidents]


@settings(max_examples=60)
@given(ROUNDS)
def test_no_cause_has_two_open_incidents_and_every_merged_one_says_where_it_went(
    rounds: list[tuple[list[Verdict], float]],
) -> None:
    case = Case()
    for verdicts, after_s in rounds:
        before = dict(case.incidents)
        case.say(*verdicts, after_s=after_s)
        assert len(families(case.open)) == len(set(families(case.open)))
        for incident in case.incidents.values():
            if incident.merged_into:
                assert incident.state == "closed"
                assert incident.id in case.incidents[incident.merged_into].merged
            old = before.get(incident.id)
            if old is not None and old.state in ("confirmed", "acting"):
                assert incident.state != "suspected"
            if old is not None and old.state in ("closed", "false"):
                assert incident == old


@settings(max_examples=25)
@given(st.lists(CLAIMS, min_size=1, max_size=5), st.lists(st.integers(0, 4), min_size=3, max_size=8))
def test_whatever_comes_and_goes_there_is_no_storm(claims: list[Verdict], pattern: list[int]) -> None:
    case = Case()
    steps = 240
    for step in range(steps):
        shown = claims[: pattern[step % len(pattern)]]
        case.say(*shown, after_s=(1.0, GONE_S + 2)[step % 2])
    hours = (case.now_s - 1_000.0) / 3600
    causes = {(i.family, i.node) for i in case.incidents.values()}
    # Of one cause: it opens, comes back reopens_max times in a window, its story changes UPDATES_MAX times.
    of_each = (hours + 1) * (2 * (POLICY.reopens_max + 1) + UPDATES_MAX + 6)
    assert len(case.events) <= of_each * max(len(causes), 1)


def test_what_names_one_node_and_then_another_comes_back_with_either() -> None:
    case = Case()
    for _ in range(10):
        case.say(hang("n2", 0.5))
        case.say(hang("n1", 0.5))
        case.say(after_s=GONE_S + 2)
    (incident,) = case.incidents.values()
    assert incident.flapping


def test_what_asks_for_nothing_is_recorded_and_reported_once_it_asks_for_something() -> None:
    case = Case()
    idle = replace(slow("straggler", 0.0, "n1"), asks="none")
    case.say(idle)
    case.say(idle)
    assert [i.asks for i in case.open] == ["none"]
    assert case.events == []
    case.say(slow("straggler", 0.2, "n1"))
    case.say(slow("straggler", 0.2, "n1"))
    assert [event for _, event in case.events] == ["opened"]


def test_what_asked_for_nothing_ends_as_quietly() -> None:
    case = Case()
    case.say(replace(slow("straggler", 0.0, "n1"), asks="none"))
    case.say(after_s=GONE_S + 2)
    assert case.open == []
    assert case.events == []
