from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.checks.runner import CHECKS
from eagle_eye.detectors.faults import BY_NAME, FAULTS
from eagle_eye.server.engine.ledger import (
    FAMILIES,
    Offer,
    ReturnRequest,
    fault_of,
    is_ours,
    phase,
    probation,
    related,
    returning,
    suite,
    unproven,
)
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import CheckOutcome, Node
from tests.server.engine.situations import NOW_S, past

READY, SILENT, NONE = Offer("ready"), Offer("unable", "its agent was not heard for 90 s"), Offer("none", "no agent")
SETTINGS = PolicySettings(probation_s=100, probation_s_max=1_000)
OURS = Node(node="n1", state="excluded", reason="gpu_lost: inc_1", updated_s=NOW_S, by="server", fault="gpu_lost")


def node(**more: Any) -> Node:
    fields = {name: getattr(OURS, name) for name in OURS.__struct_fields__}
    return Node(**{**fields, **more})


def way(out: Node, offer: Offer = READY, times: int = 0, settings: PolicySettings = SETTINGS, **how: Any) -> str:
    done = [past(id=str(number), exclude=["n1"], updated_s=NOW_S) for number in range(times)]
    answer = returning(out, ReturnRequest("alice", **how), offer, done, settings, NOW_S + 1)
    assert (answer.way != "check") == bool(answer.detail), "a refusal says why, and so does a return without a check"
    return answer.word or answer.way


@pytest.mark.parametrize(
    ("shown", "more"),
    [
        ("in_service", {"state": "in_service"}),
        ("watched", {"state": "in_service", "watched_until_s": NOW_S + 1}),
        ("in_service", {"state": "in_service", "watched_until_s": NOW_S}),
        ("excluded", {}),
        ("draining", {"state": "draining"}),
        ("checking", {"check_id": "chk_1"}),
        ("checking", {"check_id": "chk_1", "state": "draining"}),
    ],
)
def test_the_phase_says_where_a_node_is_on_its_way(shown: str, more: dict[str, Any]) -> None:
    assert phase(node(**more), NOW_S) == shown


@pytest.mark.parametrize(
    ("offer", "setting", "flags", "expected"),
    [
        (READY, "wanted", {}, "check"),
        (NONE, "wanted", {}, "return"),
        (SILENT, "wanted", {}, "cannot_check"),
        (READY, "required", {}, "check"),
        (NONE, "required", {}, "cannot_check"),
        (READY, "off", {}, "return"),
        (READY, "off", {"check": True}, "check"),
        (NONE, "wanted", {"check": True}, "cannot_check"),
        (SILENT, "required", {"force": True}, "return"),
    ],
)
def test_what_took_a_node_out_is_ruled_out_before_it_returns(
    offer: Offer, setting: Any, flags: dict[str, bool], expected: str
) -> None:
    assert way(OURS, offer, settings=PolicySettings(readmit_check=setting), **flags) == expected


def test_what_a_person_took_out_he_puts_back_as_it_is_unless_checks_are_required() -> None:
    mine = node(by="alice", fault="", reason="new cable")
    assert way(mine) == "return"
    assert way(mine, settings=PolicySettings(readmit_check="required")) == "check"


def test_what_somebody_else_took_out_is_not_touched_without_force() -> None:
    theirs = node(by="slurm", fault="", reason="bob: firmware")
    assert (way(theirs), way(theirs, force=True)) == ("not_ours", "return")


def test_no_check_brings_a_suspect_of_silent_corruption_back_and_force_needs_a_reason() -> None:
    suspect = node(fault="silent_data_corruption")
    assert way(suspect, check=True) == "by_hand"
    assert way(suspect, force=True) == "reason"
    assert way(suspect, force=True, reason="GPU 3 replaced") == "return"


def test_a_relapse_counts_as_one_exclusion_more() -> None:
    done = [past(id=str(number), exclude=["n1"], updated_s=NOW_S) for number in range(2)]
    assert probation("n1", done, SETTINGS, NOW_S + 1).until_s == NOW_S + 100
    assert probation("n1", done, SETTINGS, NOW_S + 1, [NOW_S]).until_s == NOW_S + 200
    long_ago = NOW_S - SETTINGS.flapping_window_s
    assert probation("n1", done, SETTINGS, NOW_S + 1, [long_ago]).until_s == NOW_S + 100
    assert way(node(relapsed=[NOW_S]), times=1) == "probation"


def test_records_from_before_say_in_their_reason_whose_they_are() -> None:
    old = node(by="", fault="", reason="silent_data_corruption: inc_1")
    assert (fault_of(old), is_ours(old)) == ("silent_data_corruption", True)
    person = node(by="", fault="", reason="exclude by local")
    assert (fault_of(person), is_ours(person)) == ("", False)
    words = node(by="alice", fault="", reason="hang: looked at it")
    assert (fault_of(words), is_ours(words)) == ("", False)


names = st.sampled_from([fault.name for fault in FAULTS])


@given(
    st.sampled_from([READY, SILENT, NONE]),
    names | st.just(""),
    st.sampled_from(["server", "alice", "slurm", ""]),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["required", "wanted", "off"]),
)
def test_without_force_nothing_returns_against_the_rules(
    offer: Offer, fault: str, by: str, times: int, check: bool, setting: Any
) -> None:
    out = node(fault=fault, by=by, reason="" if by else f"{fault}: inc")
    done = [past(id=str(number), exclude=["n1"], updated_s=NOW_S) for number in range(times)]
    settings = PolicySettings(probation_s=100, readmit_check=setting)
    answer = returning(out, ReturnRequest("alice", check=check), offer, done, settings, NOW_S + 1)
    if answer.way != "refuse":
        assert fault != "silent_data_corruption"
        assert by != "slurm"
        assert times < 2
        assert answer.way == "return" or offer.state == "ready"
        assert answer.way == "check" or not (check or setting == "required")


def test_every_suite_names_checks_that_there_are_and_faults_that_there_are() -> None:
    known = {check.name for check in CHECKS}
    assert set(FAMILIES) <= set(BY_NAME)
    for name in ("", *BY_NAME):
        wanted = suite(name)
        assert set(wanted.checks) <= known
        named = set(wanted.checks) or known
        assert all(group and set(group) <= named for group in wanted.proof)
        assert 5 <= wanted.deadline_s <= 900
        assert wanted.gemm_s <= 60


@pytest.mark.parametrize(
    ("fault", "passed", "doubted"),
    [
        ("gpu_memory_error", ("gpu_facts", "memory"), ""),
        ("gpu_memory_error", ("memory",), "gpu_facts"),  # on the CPU: no GPU was seen
        ("nic_degraded", ("gemm", "disk"), "ib_write_bw"),
        ("nvlink_degraded", ("gpu_facts", "all_reduce"), ""),
        ("nvlink_degraded", ("gpu_facts",), "nccl_tests or all_reduce"),
        ("hang", ("disk",), ""),
        ("", (), ""),
    ],
)
def test_what_has_passed_must_say_something_of_the_fault(fault: str, passed: tuple[str, ...], doubted: str) -> None:
    outcomes = [CheckOutcome(name, "passed") for name in passed] + [CheckOutcome("dcgm", "could_not_check")]
    said = unproven(fault, outcomes)
    assert (doubted in said) if doubted else said == ""


def test_faults_of_one_part_are_related_and_one_of_no_part_to_all() -> None:
    assert related("gpu_lost", "thermal_throttle")
    assert not related("gpu_lost", "nic_degraded")
    assert related("hang", "nic_degraded")
    assert related("gpu_lost", "straggler")
