from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.agent.collector import CollectFailed, Unsupported
from eagle_eye.agent.collectors.host import TEMPERATURES_EVERY_S, TemperatureCollector
from tests.agent.fakes import FakeClock


class Sensors:
    """A /sys with thermal zones and hwmon chips; temperatures as text, as the kernel writes them."""

    def __init__(self, sys: Path, clock: FakeClock) -> None:
        self.sys = sys
        self.clock = clock
        self.collector = TemperatureCollector(sys, clock.monotonic_s)

    def zone(self, number: int, kind: str, text: str) -> Path:
        folder = self.sys / f"class/thermal/thermal_zone{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "type").write_text(kind + "\n")
        (folder / "temp").write_text(text)
        return folder / "temp"

    def chip(self, number: int, name: str, *texts: str) -> None:
        folder = self.sys / f"class/hwmon/hwmon{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "name").write_text(name + "\n")
        for index, text in enumerate(texts, 1):
            (folder / f"temp{index}_input").write_text(text)

    def celsius(self, after_s: float = TEMPERATURES_EVERY_S) -> float | None:
        self.clock.advance(after_s)
        return self.collector.collect(self.clock.now_s()).node.get("node_temperature_celsius")


@pytest.fixture
def sensors(tmp_path: Path, clock: FakeClock) -> Sensors:
    return Sensors(tmp_path, clock)


def test_the_hottest_sensor_is_told(sensors: Sensors) -> None:
    sensors.zone(0, "x86_pkg_temp", "61000\n")
    sensors.zone(1, "acpitz", "-20500\n")
    sensors.chip(0, "coretemp", "58000\n", "63250\n")
    assert sensors.celsius() == 63.25


def test_disks_and_network_cards_are_not_the_node(sensors: Sensors) -> None:
    sensors.zone(0, "x86_pkg_temp", "50000\n")
    sensors.zone(1, "nvme0", "90000\n")
    sensors.chip(0, "nvme", "91000\n")
    sensors.chip(1, "mlx5", "105000\n")
    assert sensors.celsius() == 50.0


@pytest.mark.parametrize("text", ["255000\n", "-128000\n", "0x1f\n", "", "nan\n", "9" * 50, "٣\n", "\xff"])
def test_a_sensor_that_is_not_connected_counts_for_nothing(sensors: Sensors, text: str) -> None:
    sensors.zone(0, "x86_pkg_temp", "50000\n")
    sensors.zone(1, "board", text)
    assert sensors.celsius() == 50.0
    assert sensors.collector.collect(1.0).problem == ""


def test_sensors_are_read_now_and_then_and_repeated_in_between(sensors: Sensors) -> None:
    zone = sensors.zone(0, "x86_pkg_temp", "50000\n")
    assert sensors.celsius() == 50.0
    zone.write_text("70000\n")
    assert sensors.celsius(1.0) == 50.0
    assert sensors.celsius() == 70.0


def test_a_sensor_that_fails_is_named_and_the_others_are_told(sensors: Sensors) -> None:
    sensors.zone(0, "x86_pkg_temp", "50000\n")
    hot = sensors.zone(1, "x86_pkg_temp", "80000\n")
    sensors.celsius()
    hot.unlink()
    assert sensors.celsius() == 50.0
    assert sensors.collector.collect(1.0).problem.startswith("1 of 2 temperature sensors do not answer")


def test_when_no_sensor_answers_it_fails_and_recovers(sensors: Sensors) -> None:
    zone = sensors.zone(0, "x86_pkg_temp", "50000\n")
    sensors.celsius()
    zone.unlink()
    for _ in range(3):
        with pytest.raises(CollectFailed, match=r"do not answer|are gone"):
            sensors.celsius()
    sensors.zone(7, "x86_pkg_temp", "55000\n")  # the driver was loaded anew
    assert sensors.celsius() == 55.0


def test_a_machine_without_sensors_is_unsupported(sensors: Sensors) -> None:
    with pytest.raises(Unsupported, match="virtual machine"):
        sensors.celsius()
