"""One word for one state, wherever people read it."""

from __future__ import annotations

from typing import get_args

import pytest

from eagle_eye.schema.labels import STATE_LABELS, label, shown_state
from eagle_eye.server.model.records import (
    ActionState,
    DeliveryState,
    EvidenceState,
    IncidentState,
    NodeCheckState,
    NodeState,
)

KINDS = (IncidentState, ActionState, DeliveryState, EvidenceState, NodeCheckState, NodeState)


@pytest.mark.parametrize("kind", KINDS)
def test_two_states_of_a_record_have_two_labels(kind: object) -> None:
    states = get_args(kind)
    assert len({label(state) for state in states}) == len(states)


def test_a_label_is_no_stable_name_of_another_state() -> None:
    states = {state for kind in KINDS for state in get_args(kind)}
    assert not states & set(STATE_LABELS.values()) - {"running"}


@pytest.mark.parametrize(
    ("incident", "action", "shown"),
    [
        ("acting", "awaiting", "awaiting approval"),
        ("acting", "requested", "action under way"),
        ("confirmed", "expired", "confirmed"),
        ("recovered", "awaiting", "recovered"),
    ],
)
def test_an_incident_whose_action_awaits_a_person_says_so(incident: str, action: str, shown: str) -> None:
    assert label(shown_state(incident, action)) == shown
