"""Host metrics: CPU, memory, disks, networks, temperatures. Touches: /proc, and /sys to tell disks from partitions.

Temperatures are those of processors and boards, from thermal zones and CPU sensors under /sys.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from eagle_eye.agent.collector import CollectFailed, Observed, Unsupported
from eagle_eye.agent.foreign_files import content

# Temperatures.
TEMPERATURES_EVERY_S = 10.0  # temperature changes slowly, and an ACPI zone may cost milliseconds in the firmware
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
    """The hottest thermal zone or CPU sensor; read every TEMPERATURES_EVERY_S and repeated in between.

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
            self._due_s = monotonic_s + TEMPERATURES_EVERY_S
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


# CPU, memory, disks and networks.
FILE_BYTES_MAX = 4 << 20  # per file: /proc/net/dev with 30,000 interfaces, /proc/stat with thousands of CPUs
NAMES_MAX = 4_096  # disks and interfaces tracked; any beyond are left out
SECTOR_BYTES = 512  # in /proc/diskstats, whatever the disk's own sectors are
# Counters that grow faster have jumped: this is more than sixteen 800 Gb/s network cards or a hundred fast disks carry.
BYTES_PER_S_MAX = 2e12

_PRESSURES = {
    "cpu": "node_cpu_pressure_ratio",
    "memory": "node_memory_pressure_ratio",
    "io": "node_io_pressure_ratio",
}
_RATES = {
    "disk read": "node_disk_read_bytes_per_second",
    "disk write": "node_disk_write_bytes_per_second",
    "network rx": "node_network_rx_bytes_per_second",
    "network tx": "node_network_tx_bytes_per_second",
    "tcp retransmits": "node_tcp_retransmits_per_second",
}

Counters = dict[str, dict[str, float]]  # by quantity, then by source: a disk, an interface, or the kernel ("")


class HostCollector:
    """Gauges at once, rates from the second collection on; what this kernel does not expose is absent.

    A rate covers the devices present in both collections, so a disk or interface that comes or goes adds no jump. Where
    a counter decreased (driver reloaded, counter wrapped), the rate is absent this time. ``problem`` names what was
    readable before and no longer is.
    """

    name = "host"

    def __init__(
        self,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc = proc
        self._sys = sys
        self._monotonic_s = monotonic_s
        self._before: Counters = {}
        self._before_s = 0.0
        self._physical: dict[str, bool] = {}
        self._readable: set[str] = set()
        self._missed: list[str] = []

    def collect(self, now_s: float) -> Observed:  # noqa: ARG002 - rates are taken on the monotonic clock
        """Return the node's row. Raises Unsupported on a system without /proc, CollectFailed when /proc has gone."""
        self._missed = []
        stat = self._read("stat")
        if not stat:
            if self._readable:
                raise CollectFailed(f"{self._proc}/stat can no longer be read")
            raise Unsupported(f"no {self._proc}/stat: not Linux")
        row = self._levels(stat)
        counters = self._counters(stat)
        counters_s = self._monotonic_s()
        if self._before:
            row.update(self._rates(counters, counters_s - self._before_s))
        self._before, self._before_s = counters, counters_s
        problem = f"can no longer be read: {', '.join(self._missed)}" if self._missed else ""
        return Observed(node=row, problem=problem)

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _levels(self, stat: str) -> dict[str, float]:
        row: dict[str, float] = {}
        used = memory_used_ratio(self._read("meminfo"))
        if used is not None:
            row["node_memory_used_ratio"] = used
        blocked = _field(stat, "procs_blocked")
        if blocked is not None:
            row["node_blocked_tasks"] = blocked
        return row

    def _counters(self, stat: str) -> Counters:
        counters = {name: {"": value} for name, value in cpu_jiffies(stat).items()}
        for resource in _PRESSURES:
            total_us = pressure_us(self._read(f"pressure/{resource}"))
            if total_us is not None:
                counters[f"pressure {resource}"] = {"": total_us / 1e6}
        disks = {name: sizes for name, sizes in disk_bytes(self._read("diskstats")).items() if self._is_disk(name)}
        counters["disk read"] = {name: read for name, (read, _) in disks.items()}
        counters["disk write"] = {name: written for name, (_, written) in disks.items()}
        networks = {name: sizes for name, sizes in network_bytes(self._read("net/dev")).items() if name != "lo"}
        counters["network rx"] = {name: received for name, (received, _) in networks.items()}
        counters["network tx"] = {name: sent for name, (_, sent) in networks.items()}
        retransmits = tcp_retransmits(self._read("net/snmp"))
        if retransmits is not None:
            counters["tcp retransmits"] = {"": retransmits}
        return counters

    def _rates(self, counters: Counters, elapsed_s: float) -> dict[str, float]:
        grown = {name: grown for name in counters if (grown := self._grown(counters, name)) is not None}
        row: dict[str, float] = {}
        jiffies = grown.get("cpu total", 0.0)
        if jiffies > 0.0 and "cpu idle" in grown and "cpu iowait" in grown and "cpu steal" in grown:
            idle, iowait, steal = grown["cpu idle"], grown["cpu iowait"], grown["cpu steal"]
            row["node_cpu_utilization_ratio"] = _ratio((jiffies - idle - iowait - steal) / jiffies)
            row["node_cpu_steal_ratio"] = _ratio(steal / jiffies)
            row["node_iowait_ratio"] = _ratio(iowait / jiffies)
        if elapsed_s <= 0.0:
            return row
        for resource, metric in _PRESSURES.items():
            if f"pressure {resource}" in grown:
                row[metric] = _ratio(grown[f"pressure {resource}"] / elapsed_s)
        for name, metric in _RATES.items():
            if name in grown and grown[name] <= BYTES_PER_S_MAX * elapsed_s:
                row[metric] = grown[name] / elapsed_s
        return row

    def _grown(self, counters: Counters, name: str) -> float | None:
        """Return the growth of sources present both times; None where there are none, or a counter decreased."""
        before = self._before.get(name, {})
        growths = [value - before[source] for source, value in counters[name].items() if source in before]
        return sum(growths) if growths and min(growths) >= 0.0 else None

    def _is_disk(self, name: str) -> bool:
        """Whether the device is a whole disk: partitions, loops and mapped devices would count twice."""
        if name not in self._physical:
            if len(self._physical) >= NAMES_MAX:
                self._physical.clear()
            self._physical[name] = (self._sys / "block" / name.replace("/", "!") / "device").exists()
        return self._physical[name]

    def _read(self, name: str) -> str:
        try:
            text = content(f"{self._proc}/{name}", FILE_BYTES_MAX).decode("ascii", "replace")
        except OSError:  # this kernel does not expose it; the metric is absent
            text = ""
        if text:
            self._readable.add(name)
        elif name in self._readable:
            self._missed.append(name)
        return text


def pressure_us(text: str) -> float | None:
    """Return the microseconds for which some task was stalled; None where the kernel does not report it."""
    for line in text.splitlines():
        if line.startswith("some "):
            for word in line.split():
                if word.startswith("total="):
                    return _count(word[6:])
    return None


def tcp_retransmits(text: str) -> float | None:
    """Return the TCP segments retransmitted since boot; None where the text has no such counter."""
    lines = [line.split() for line in text.splitlines() if line.startswith("Tcp:")]
    if len(lines) == 2 and "RetransSegs" in lines[0]:  # names, then values
        column = lines[0].index("RetransSegs")
        if column < len(lines[1]):
            return _count(lines[1][column])
    return None


def memory_used_ratio(text: str) -> float | None:
    """Return the fraction of memory not available to programs; None where the text does not say."""
    sizes: dict[str, float] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] in ("MemTotal:", "MemAvailable:") and (size := _count(words[1])) is not None:
            sizes[words[0]] = size
            if len(sizes) == 2:
                break
    if len(sizes) < 2 or sizes["MemTotal:"] <= 0.0:
        return None
    return _ratio(1.0 - sizes["MemAvailable:"] / sizes["MemTotal:"])


def disk_bytes(text: str) -> dict[str, tuple[float, float]]:
    """Return the bytes read from and written to each block device since boot, by name."""
    found: dict[str, tuple[float, float]] = {}
    for line in text.splitlines():
        words = line.split(maxsplit=10)
        if len(words) > 9 and len(found) < NAMES_MAX:
            read, written = _count(words[5]), _count(words[9])
            if read is not None and written is not None:
                found[words[2]] = (read * SECTOR_BYTES, written * SECTOR_BYTES)
    return found


def network_bytes(text: str) -> dict[str, tuple[float, float]]:
    """Return the bytes each interface has received and sent since it was created, by name."""
    found: dict[str, tuple[float, float]] = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split(maxsplit=9)
        if colon and len(words) > 8 and len(found) < NAMES_MAX:
            received, sent = _count(words[0]), _count(words[8])
            if received is not None and sent is not None:
                found[name.strip()] = (received, sent)
    return found


def cpu_jiffies(text: str) -> dict[str, float]:
    """Return the jiffies of all CPUs, empty where the text has none; guest time is already part of user time."""
    words = text.partition("\n")[0].split()
    counts = [_count(word) for word in words[1:9]]
    if len(counts) < 7 or words[0] != "cpu" or None in counts:
        return {}
    user, nice, system, idle, iowait, irq, softirq, *rest = (count for count in counts if count is not None)
    steal = rest[0] if rest else 0.0
    return {
        "cpu total": user + nice + system + idle + iowait + irq + softirq + steal,
        "cpu idle": idle,
        "cpu iowait": iowait,
        "cpu steal": steal,
    }


def _field(text: str, name: str) -> float | None:
    for line in text.splitlines():
        if line.startswith(name):  # the interrupt line is long; most lines are not worth splitting
            words = line.split()
            if len(words) == 2 and words[0] == name:
                return _count(words[1])
    return None


def _count(word: str) -> float | None:
    """Return a word of digits as a number, None where it is not one or is longer than any 64-bit number."""
    return float(word) if word.isascii() and word.isdecimal() and len(word) <= 20 else None


def _ratio(value: float) -> float:
    return min(1.0, max(0.0, value))  # jiffies and clocks are read at slightly different moments
