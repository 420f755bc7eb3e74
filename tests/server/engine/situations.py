"""Incidents, past actions and situations for policy's tests, one by one and for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from eagle_eye.detectors.faults import FAULTS
from eagle_eye.server.engine.rules import Situation
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Action, Incident

NOW_S = 1_000_000.0


def incident(**changes: Any) -> Incident:
    fields: dict[str, Any] = {
        "id": "inc",
        "job": "j",
        "attempt": 1,
        "fault": "hang",
        "nodes": ["n1"],
        "node": "n1",
        "device": 0,
        "confidence": 0.97,
        "state": "confirmed",
        "onset_s": NOW_S - 5,
        "detected_s": NOW_S,
        "updated_s": NOW_S,
        "ended_s": None,
        "detectors": ["hang"],
        "summary": "",
        "evidence": [],
        "action": "none",
        "family": "stop",
        "kinds": ["standstill", "rank_silence"],
    }
    return Incident(**{**fields, **changes})


def past(**changes: Any) -> Action:
    fields: dict[str, Any] = {
        "id": "act",
        "incident_id": "old",
        "kind": "exclude_node",
        "job": "j",
        "attempt": 0,
        "exclude": ["n9"],
        "restart": True,
        "fault": "hang",
        "confidence": 1.0,
        "onset_s": NOW_S - 100,
        "detected_s": NOW_S - 100,
        "expires_s": NOW_S + 100,
        "repair": "none",
        "summary": "",
        "evidence": [],
        "ranks": [],
        "state": "done",
        "created_s": NOW_S - 100,
        "updated_s": NOW_S - 100,
    }
    return Action(**{**fields, **changes})


def situation(**changes: Any) -> Situation:
    fields: dict[str, Any] = {
        "settings": PolicySettings(mode="act"),
        "actions": (),
        "fleet_size": 100,
        "members": 8,
        "job_state": "running",
        "restart_owner": "",
        "blind": "",
        "now_s": NOW_S,
    }
    return Situation(**{**fields, **changes})


actions = st.builds(
    past,
    id=st.uuids().map(str),
    job=st.sampled_from(["j", "k"]),
    attempt=st.integers(0, 2),
    exclude=st.lists(st.sampled_from(["a", "b", "c"]), max_size=2),
    state=st.sampled_from(["requested", "done", "failed", "expired", "would_act", "withdrawn"]),
    created_s=st.floats(NOW_S - 200_000, NOW_S),
)
incidents = st.builds(
    incident,
    fault=st.sampled_from([fault.name for fault in FAULTS]),
    node=st.sampled_from([None, "n1"]),
    confidence=st.floats(0, 1),
    fact=st.booleans(),
    kinds=st.lists(st.sampled_from(["a", "b", "c"]), unique=True),
    slowdown_ratio=st.floats(0, 3),
)
