"""What is documented of device types, and what detectors make of it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from eagle_eye.detectors.device_types import DEVICE_TYPES, DeviceType, PublishedFigure, device_type
from eagle_eye.detectors.hardware.nvlink_degraded import NvlinkDegraded
from eagle_eye.detectors.signs.documented import (
    BRAKING_FROM_C,
    MEMORY_LIMIT_C,
    NVLINK_BYTES_PER_SECOND,
    braking_from_c,
    memory_limits_c,
    nvlink_bytes_per_second,
)
from eagle_eye.detectors.slowness.power_throttle import PowerThrottle
from eagle_eye.detectors.slowness.thermal_throttle import ThermalThrottle
from eagle_eye.detectors.types import Window
from eagle_eye.schema.metrics import Scope, names
from tests.detectors.slow_stories import hot, job, one, without
from tests.detectors.windows import Story

PCIE, SXM, GB200 = "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA GB200"


def called(story: Story, name: str) -> Window:
    """Return the window of the story on such GPUs."""
    return story.window(models=(name,), model_of=np.zeros(len(story.series), dtype=np.intp))


def figures(kind: DeviceType) -> list[PublishedFigure]:
    own = [getattr(kind, one.name) for one in fields(kind)]
    rack = [getattr(kind.rack, one.name) for one in fields(kind.rack)] if kind.rack else []
    return [figure for figure in (*own, *rack) if isinstance(figure, PublishedFigure)]


@pytest.mark.parametrize("kind", DEVICE_TYPES, ids=lambda kind: kind.name)
def test_every_figure_is_positive_and_has_an_address_where_it_stands(kind: DeviceType) -> None:
    assert all(figure.value > 0 and "https://" in figure.source for figure in figures(kind))
    assert "https://" in kind.counters_source


@pytest.mark.parametrize("kind", DEVICE_TYPES, ids=lambda kind: kind.name)
def test_temperatures_rise_from_the_limit_of_operation_to_the_shutdown(kind: DeviceType) -> None:
    limits = [one.value for one in (kind.max_operating_c, kind.slowdown_c, kind.shutdown_c) if one is not None]
    assert limits == sorted(set(limits))


def test_every_counter_is_one_of_the_catalogue() -> None:
    assert frozenset().union(*(kind.counters for kind in DEVICE_TYPES)) <= set(names(Scope.DEVICE))


def test_no_name_is_of_two_types() -> None:
    reported = [name for kind in DEVICE_TYPES for name in kind.names]
    assert len(reported) == len(set(reported))


def test_a_rack_holds_whole_trays() -> None:
    rack = device_type(GB200).rack  # type: ignore[union-attr]
    assert rack is not None
    assert rack.compute_trays is not None
    assert rack.gpus.value / rack.compute_trays.value == 4


@pytest.mark.parametrize("name", [PCIE, "H100 PCIe"])
def test_a_type_is_found_by_nvmls_name_with_or_without_the_brand(name: str) -> None:
    assert device_type(name) is next(kind for kind in DEVICE_TYPES if kind.name == "H100 PCIe")


@pytest.mark.parametrize("name", ["", "H100", "NVIDIA H100 PCIe 2", "Simulated H100 80GB HBM3", "nvidia h100 pcie"])
def test_a_name_that_is_merely_alike_has_no_type(name: str) -> None:
    assert device_type(name) is None


def test_a_window_without_names_has_lines_of_ours() -> None:
    window = job().window()
    assert braking_from_c(window, 0) == BRAKING_FROM_C
    assert nvlink_bytes_per_second(window, 0) == NVLINK_BYTES_PER_SECOND
    assert memory_limits_c(window).tolist() == [MEMORY_LIMIT_C] * len(window.series)


def test_what_is_not_documented_of_a_type_is_a_line_of_ours() -> None:
    assert braking_from_c(called(job(), SXM), 0) == BRAKING_FROM_C


def test_series_have_the_figures_of_their_own_type() -> None:
    story = job(nodes=1, gpus=2)
    window = story.window(models=("", PCIE), model_of=np.array([1, 0]))
    assert [braking_from_c(window, column) for column in (0, 1)] == [84.0, BRAKING_FROM_C]
    assert memory_limits_c(window).tolist() == [95.0, MEMORY_LIMIT_C]


def test_a_gpu_below_the_documented_limit_is_not_at_it() -> None:
    """83 C is at the limit of an unknown board, and not of one that may work at 87 C."""

    def story() -> Story:
        return without(hot(job(), celsius=83.0), "gpu_throttle_reasons")

    assert one(ThermalThrottle().detect(called(story(), "unheard of"))).confidence >= 0.9
    assert one(ThermalThrottle().detect(called(story(), PCIE))).confidence < 0.9


def test_evidence_shows_the_documented_line() -> None:
    verdict = one(ThermalThrottle().detect(called(hot(job()), PCIE)))
    shown = next(item for item in verdict.evidence if item.metric == "gpu_temperature_celsius")
    assert shown.threshold == 84.0


def test_power_is_suspected_up_to_the_documented_limit() -> None:
    def story() -> Story:
        """All GPUs are at 83 C, one of them capped."""
        made = job()
        made.device["gpu_temperature_celsius"][:] = 83.0
        made.device["gpu_sm_clock_hertz"][-20:, 5] *= 0.8
        made.device["gpu_power_watts"][-20:, 5] *= 0.8
        made.device["gpu_throttle_reasons"][-20:, 5] = 0x80
        return made

    assert PowerThrottle().detect(called(story(), "unheard of")) == []
    assert one(PowerThrottle().detect(called(story(), PCIE))).node == "n1"


def lost_links(name: str, **changes: Any) -> Any:
    story = job(nodes=4, gpus=4)
    story.device["gpu_nvlinks_active"][-20:, 4:8] = 12.0
    return one(NvlinkDegraded().detect(called(without(story, "train_"), name, **changes)))


def test_links_of_twice_the_rate_are_half_as_busy() -> None:
    assert lost_links(GB200).slowdown_ratio == pytest.approx(lost_links(SXM).slowdown_ratio / 2)


def test_a_tray_of_a_rack_has_no_nvswitch_of_its_own() -> None:
    assert "likely its NVSwitch" in lost_links(SXM).summary
    assert "its rack's NVLink switches" in lost_links(GB200).summary
