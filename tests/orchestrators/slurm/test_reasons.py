"""The reasons of our drains: what they say, and that nobody's hand in them goes unseen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.detectors.faults import FAULTS
from eagle_eye.orchestrators.protocol import Cause
from eagle_eye.orchestrators.slurm.decisions import REASON_CHARS_MAX, SLOWNESS, USER_FAULTS, drain_of, reason_of

CAUSE = Cause("inc-7", "act-9", "gpu_lost", "n3: XID 79 on GPU 3", "replace")


def test_it_begins_with_our_name_and_says_incident_owner_and_whose_problem() -> None:
    reason = reason_of(CAUSE, "eagle-eye")
    begins = "eagle-eye [node_problem] incident:inc-7 action:act-9 by:eagle-eye gpu_lost: n3: XID 79 on GPU 3 #"
    assert reason.startswith(begins)


@pytest.mark.parametrize(("fault", "tag"), [("gpu_lost", "node_problem"), ("process_crash", "user_problem")])
def test_a_fault_of_the_program_is_tagged_as_its_users(fault: str, tag: str) -> None:
    drain = drain_of(reason_of(Cause("i", "a", fault, "s"), "eagle-eye"))
    assert drain is not None
    assert drain.tag == tag


def test_every_fault_that_is_told_apart_is_one_that_exists() -> None:
    assert {fault.name for fault in FAULTS} >= USER_FAULTS | SLOWNESS


@given(st.text(), st.text(), st.text(), st.text(), st.text(min_size=1))
def test_whatever_is_given_it_is_one_short_plain_line_that_is_read_back(
    incident: str, action: str, fault: str, summary: str, owner: str
) -> None:
    reason = reason_of(Cause(incident, action, fault, summary), owner)
    assert len(reason) <= REASON_CHARS_MAX
    assert reason.isascii()
    assert reason.isprintable()
    assert not set(reason) & set("'\"`$\\|<>&=\n")
    assert drain_of(reason) is not None


@given(st.integers(0, 400), st.text(min_size=1, max_size=20))
def test_a_reason_that_somebody_wrote_into_is_not_ours(place: int, text: str) -> None:
    reason = reason_of(CAUSE, "eagle-eye")
    assert drain_of(reason[:place] + text + reason[place:]) is None


@given(st.integers(0, 200))
def test_a_reason_of_which_something_is_missing_is_not_ours(place: int) -> None:
    reason = reason_of(CAUSE, "eagle-eye")
    if place < len(reason):
        assert drain_of(reason[:place] + reason[place + 1 :]) is None


@pytest.mark.parametrize("reason", ["", "bad fan", "eagle-eye", "eagle-eye: out", "NHC: check_fs failed"])
def test_what_others_write_is_not_ours(reason: str) -> None:
    assert drain_of(reason) is None
