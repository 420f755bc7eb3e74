"""How evidence is drawn."""

from __future__ import annotations

import pytest

from eagle_eye.schema.action import EvidenceItem
from eagle_eye.server.charts.plots import PANELS_MAX, drawing_of, panels


@pytest.mark.parametrize(
    ("metric", "unit", "shown", "form", "threshold"),
    [
        ("train_compute_seconds", "seconds", "train_compute_seconds", "value", 2.0),
        ("gpu_pcie_replays_total", "replays", "gpu_pcie_replays_total", "growth", 2.0),
        ("gpu_pcie_replays_total", "replays_per_second", "gpu_pcie_replays_total", "growth", None),
        ("train_step_standstill_seconds", "seconds", "train_step", "value", None),
        ("nccl_sequence_lag", "collectives", "nccl_sequence", "behind", None),
        ("train_loss_usual", "1", "train_loss", "value", None),
        ("gpu_sm_active_ratio_over_before", "ratio", "gpu_sm_active_ratio", "value", None),
        ("xid", "", "train_step", "value", None),
        ("gpu_throttle_reasons", "bitmask", "gpu_throttle_reasons", "bits", None),
    ],
)
def test_evidence_is_drawn_by_what_shows_it_and_a_threshold_only_in_its_own_unit(
    metric: str, unit: str, shown: str, form: str, threshold: float | None
) -> None:
    found = drawing_of(metric, 2.0, unit)
    assert found is not None
    assert (found.metric.name, found.form, found.threshold) == (shown, form, threshold)


@pytest.mark.parametrize("metric", ["train_parameter_checksum", "no_such_thing", ""])
def test_what_no_course_shows_is_not_drawn(metric: str) -> None:
    assert drawing_of(metric) is None


def test_a_threshold_of_bits_is_the_mask() -> None:
    found = drawing_of("gpu_throttle_reasons", float(0x60), "bitmask")
    assert found is not None
    assert found.mask == 0x60


def test_each_metric_is_drawn_once_and_the_job_beside_it() -> None:
    items = [
        EvidenceItem("xid", "n1", 3, "79"),
        EvidenceItem("gpu_lost", "n1", 3, "gone"),
        EvidenceItem("gpu_power_watts", "n1", 3, 5.0),
        EvidenceItem("gpu_power_watts", "n1", 3, 5.0, 400.0, 100.0, "watts"),
    ]
    found = panels(items, "stop")
    reported = [(p.drawing.metric.name, p.node, p.drawing.threshold, bool(p.evidence)) for p in found]
    assert reported == [
        ("train_step", "n1", None, True),
        ("gpu_power_watts", "n1", 100.0, True),
        ("gpu_utilization_ratio", None, None, False),
    ]


def test_where_a_device_is_drawn_the_job_is_not_drawn_again() -> None:
    items = [
        EvidenceItem("train_step_standstill_seconds", None, None, 5.0),
        EvidenceItem("rank_silence_seconds", "n1", 0, 5.3),
    ]
    found = panels(items, "stop")
    assert [(p.drawing.metric.name, p.node) for p in found] == [("train_step", "n1"), ("gpu_utilization_ratio", None)]


def test_an_incident_with_much_evidence_has_few_panels() -> None:
    items = [EvidenceItem("gpu_power_watts", f"n{n}", 0, 5.0) for n in range(50)]
    assert len(panels(items, "slow")) == PANELS_MAX + 1
