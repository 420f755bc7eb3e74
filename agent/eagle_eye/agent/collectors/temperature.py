"""Reads processor and board temperatures. Touches: thermal zones and CPU sensors under /sys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from eagle_eye.agent.files.foreign import content
from eagle_eye.agent.loop.collector import CollectFailed, Observed, Unsupported

READ_EVERY_S = 10.0  # temperature changes slowly, and an ACPI zone may cost milliseconds in the firmware
SENSORS_MAX = 256  # four sockets of 60 cores
NUMBER_BYTES_MAX = 32
NAME_BYTES_MAX = 256
# Readings outside come from disconnected sensors: they report -128, 0 K or 255.
CELSIUS_MIN = -40.0
CELSIUS_MAX = 150.0

# hwmon drivers of processors and boards. Those of disks and network cards send the device a command per reading.
_CHIPS = frozenset({"coretemp", "k10temp", "zenpower", "acpitz", "cpu_thermal", "soc_thermal", "scpi_sensors"})
# Thermal zones that belong to devices of their own, not to the node.
_OTHER_ZONES = ("nvme", "mlx", "iwlwifi", "ath", "gpu", "bnxt", "i40e", "ice")


class TemperatureCollector:
    """The hottest thermal zone or CPU sensor; read every READ_EVERY_S and repeated in between.

    Sensors are discovered once, and again when none answers any more. A failing one is named in ``problem``, and the
    hottest of the others is reported.
    """

    name = "temperature"

    def __init__(self, sys: Path = Path("/sys"), monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._sys = sys
        self._monotonic_s = monotonic_s
        self._sensors: list[str] = []
        self._ever = False
        self._due_s = -math.inf
        self._seen = Observed()

    def collect(self, now_s: float) -> Observed:  # noqa: ARG002 - sensors say what is now
        """Return the node's row. Raises Unsupported without a sensor, CollectFailed when none answers."""
        monotonic_s = self._monotonic_s()
        if monotonic_s >= self._due_s:
            self._due_s = monotonic_s + READ_EVERY_S
            self._seen = Observed()
            self._read()
        if not self._seen.node:
            raise CollectFailed(self._seen.problem)
        return Observed(node=dict(self._seen.node), problem=self._seen.problem)

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _read(self) -> None:
        if not self._sensors:
            self._sensors = _sensors(self._sys)
        if not self._sensors:
            if not self._ever:
                raise Unsupported("no thermal zone and no CPU sensor: a virtual machine, or their drivers are missing")
            self._seen.problem = "the temperature sensors are gone"
            return
        self._ever = True
        read = {sensor: _celsius(sensor) for sensor in self._sensors}
        known = [value for value in read.values() if value is not None]
        failed = [sensor for sensor, value in read.items() if value is None]
        if failed:
            self._seen.problem = f"{len(failed)} of {len(read)} temperature sensors do not answer, first {failed[0]}"
        if known:
            self._seen.node = {"node_temperature_celsius": max(known)}
        else:
            self._sensors = []  # a reloaded driver has other numbers: the sensors are discovered again


def _sensors(sys: Path) -> list[str]:
    """Return the files of the sensors that answer now: one that never did is not connected."""
    zones = _listed(sys / "class/thermal", "thermal_zone*")
    found = [str(zone / "temp") for zone in zones if not _text(zone / "type").lower().startswith(_OTHER_ZONES)]
    for chip in _listed(sys / "class/hwmon", "hwmon*"):
        if _text(chip / "name") in _CHIPS:
            found += [str(file) for file in _listed(chip, "temp*_input")]
    return [sensor for sensor in found[:SENSORS_MAX] if _celsius(sensor) is not None]


def _listed(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))[:SENSORS_MAX]
    except OSError:  # the driver was unloaded meanwhile
        return []


def _text(file: Path) -> str:
    try:
        return content(str(file), NAME_BYTES_MAX).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _celsius(sensor: str) -> float | None:
    """Return a sensor's temperature in Celsius; None where it fails or is disconnected."""
    try:
        text = content(sensor, NUMBER_BYTES_MAX)
        celsius = int(text) / 1e3
    except (OSError, ValueError):
        return None
    return celsius if CELSIUS_MIN < celsius < CELSIUS_MAX else None
