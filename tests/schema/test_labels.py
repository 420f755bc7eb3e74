"""One label for each state, metric and reason of throttling, wherever people read it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from eagle_eye.schema.labels import (
    METRIC_LABELS,
    STATE_LABELS,
    chart_label,
    metric_label,
    shown_state,
    state_label,
    throttled_by,
)
from eagle_eye.schema.metrics import METRICS
from eagle_eye.server.charts.plots import STAND_INS
from eagle_eye.server.model.records import (
    ActionState,
    DeliveryState,
    EvidenceState,
    IncidentState,
    NodeCheckState,
    NodeState,
)

ROOT = Path(__file__).parents[2]
KINDS = (IncidentState, ActionState, DeliveryState, EvidenceState, NodeCheckState, NodeState)


@pytest.mark.parametrize("kind", KINDS)
def test_two_states_of_a_record_have_two_labels(kind: object) -> None:
    states = get_args(kind)
    assert len({state_label(state) for state in states}) == len(states)


def test_a_label_is_no_stable_name_of_another_state() -> None:
    states = {state for kind in KINDS for state in get_args(kind)}
    assert not states & set(STATE_LABELS.values()) - {"running"}


@pytest.mark.parametrize(
    ("incident", "action", "shown"),
    [
        ("acting", "awaiting", "awaiting approval"),
        ("acting", "requested", "action requested"),
        ("acting", "running", "action running"),
        ("acting", "done", "action done"),
        ("acting", "", "action requested"),
        ("confirmed", "expired", "confirmed"),
        ("recovered", "awaiting", "recovered"),
    ],
)
def test_an_incident_is_shown_as_far_as_its_action_has_come(incident: str, action: str, shown: str) -> None:
    assert state_label(shown_state(incident, action)) == shown


def named_by_detectors() -> set[str]:
    """Return the names that detectors write into their evidence."""
    found = set()
    for file in (ROOT / "detectors/eagle_eye").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Evidence":
                found |= {
                    arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                }
    return found


def test_every_metric_that_is_shown_has_a_title_of_its_own() -> None:
    shown = {spec.name for spec in METRICS} | set(STAND_INS) | named_by_detectors()
    assert "gpu_idle_seconds" in shown
    assert [name for name in sorted(shown) if metric_label(name) == name.replace("_", " ")] == []
    assert len(set(METRIC_LABELS.values())) == len(METRIC_LABELS)


def test_what_is_derived_from_a_metric_is_titled_after_it() -> None:
    assert metric_label("train_loss_usual") == "Loss, usual"
    assert metric_label("train_grad_norm_not_finite_ranks") == "Gradient norm, ranks where it is not finite"
    assert metric_label("gpu_sm_active_ratio_over_before") == "SMs active, relative to before"
    assert metric_label("made_up_usual") == "made up usual"


def test_a_chart_of_a_lag_or_an_increase_says_so() -> None:
    assert chart_label("nccl_sequence", "behind") == "NCCL collectives enqueued, behind the furthest rank"
    assert chart_label("gpu_pcie_replays_total", "growth") == "PCIe replays, increase since the chart begins"
    assert chart_label("gpu_power_watts", "value") == "GPU power"


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        (0x0, "no reason"),
        (0x48, "hardware slowdown, hardware thermal slowdown"),
        (0x600, "bits 0x600"),
        (0x1001, "idle GPU, bits 0x1000"),
    ],
)
def test_bits_of_throttling_are_read_in_words(bits: int, said: str) -> None:
    assert throttled_by(bits) == said
