"""The node itself: processors, memory, disks, networks. Touches: /proc, through psutil where it parses better."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from eagle_eye.agent.collector import Observed, Unsupported

_PRESSURES = {
    "cpu": "node_cpu_pressure_ratio",
    "memory": "node_memory_pressure_ratio",
    "io": "node_io_pressure_ratio",
}


class HostCollector:
    """Levels at once, rates from the second collection on; what this kernel does not tell is absent."""

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
        self._before: dict[str, float] = {}
        self._before_s = 0.0
        self._physical: dict[str, bool] = {}

    def collect(self, now_s: float) -> Observed:  # noqa: ARG002 - rates are taken on the monotonic clock
        """Return the node's row. Raises Unsupported on a system without /proc."""
        if not (self._proc / "stat").exists():
            raise Unsupported(f"no {self._proc}/stat: not Linux")
        counters = self._counters()
        counters_s = self._monotonic_s()
        row = self._levels()
        if self._before:
            row.update(self._rates(counters, counters_s - self._before_s))
        self._before, self._before_s = counters, counters_s
        return Observed(node=row)

    def close(self) -> None:
        """Nothing is held."""

    def _levels(self) -> dict[str, float]:
        row: dict[str, float] = {}
        memory = psutil.virtual_memory()
        if memory.total > 0:
            row["node_memory_used_ratio"] = 1.0 - memory.available / memory.total
        blocked = _field(self._read("stat"), "procs_blocked")
        if blocked is not None:
            row["node_blocked_tasks"] = blocked
        return row

    def _counters(self) -> dict[str, float]:
        counters = _cpu_jiffies(self._read("stat"))
        for resource in _PRESSURES:
            total_us = pressure_us(self._read(f"pressure/{resource}"))
            if total_us is not None:
                counters[f"pressure {resource}"] = total_us / 1e6
        disks = [d for name, d in psutil.disk_io_counters(perdisk=True).items() if self._is_disk(name)]
        if disks:
            counters["disk read"] = float(sum(disk.read_bytes for disk in disks))
            counters["disk write"] = float(sum(disk.write_bytes for disk in disks))
        networks = [n for name, n in psutil.net_io_counters(pernic=True).items() if name != "lo"]
        if networks:
            counters["network rx"] = float(sum(network.bytes_recv for network in networks))
            counters["network tx"] = float(sum(network.bytes_sent for network in networks))
        retransmits = tcp_retransmits(self._read("net/snmp"))
        if retransmits is not None:
            counters["tcp retransmits"] = retransmits
        return counters

    def _rates(self, counters: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
        grown = {
            name: value - self._before[name]
            for name, value in counters.items()
            if name in self._before and value >= self._before[name]  # a counter that went back started anew
        }
        row: dict[str, float] = {}
        jiffies = grown.get("cpu total", 0.0)
        if jiffies > 0.0:
            idle, iowait = grown.get("cpu idle", 0.0), grown.get("cpu iowait", 0.0)
            steal = grown.get("cpu steal", 0.0)
            row["node_cpu_utilization_ratio"] = _ratio((jiffies - idle - iowait - steal) / jiffies)
            row["node_cpu_steal_ratio"] = _ratio(steal / jiffies)
            row["node_iowait_ratio"] = _ratio(iowait / jiffies)
        if elapsed_s <= 0.0:
            return row
        for resource, metric in _PRESSURES.items():
            if f"pressure {resource}" in grown:
                row[metric] = _ratio(grown[f"pressure {resource}"] / elapsed_s)
        for counter, metric in (
            ("disk read", "node_disk_read_bytes_per_second"),
            ("disk write", "node_disk_write_bytes_per_second"),
            ("network rx", "node_network_rx_bytes_per_second"),
            ("network tx", "node_network_tx_bytes_per_second"),
            ("tcp retransmits", "node_tcp_retransmits_per_second"),
        ):
            if counter in grown:
                row[metric] = grown[counter] / elapsed_s
        return row

    def _is_disk(self, name: str) -> bool:
        """Whether the device is a disk of its own: partitions, loops and mapped devices would count twice."""
        if name not in self._physical:
            self._physical[name] = (self._sys / "block" / name / "device").exists()
        return self._physical[name]

    def _read(self, name: str) -> str:
        try:
            return (self._proc / name).read_text(encoding="ascii", errors="replace")
        except OSError:  # this kernel does not tell; the metric is absent
            return ""


def pressure_us(text: str) -> float | None:
    """Return the microseconds for which some task was stalled; None where the kernel does not tell."""
    for line in text.splitlines():
        if line.startswith("some "):
            for word in line.split():
                if word.startswith("total=") and word[6:].isdecimal():
                    return float(word[6:])
    return None


def tcp_retransmits(text: str) -> float | None:
    """Return the TCP segments sent again since boot; None where the text does not tell."""
    lines = [line.split() for line in text.splitlines() if line.startswith("Tcp:")]
    if len(lines) == 2 and "RetransSegs" in lines[0]:  # names, then values
        column = lines[0].index("RetransSegs")
        if column < len(lines[1]) and lines[1][column].isdecimal():
            return float(lines[1][column])
    return None


def _cpu_jiffies(text: str) -> dict[str, float]:
    """Return the jiffies of all CPUs; guest time is part of user time already."""
    words = text.partition("\n")[0].split()
    if len(words) < 8 or words[0] != "cpu" or not all(word.isdecimal() for word in words[1:]):
        return {}
    user, nice, system, idle, iowait, irq, softirq, *rest = (float(word) for word in words[1:])
    steal = rest[0] if rest else 0.0
    return {
        "cpu total": user + nice + system + idle + iowait + irq + softirq + steal,
        "cpu idle": idle,
        "cpu iowait": iowait,
        "cpu steal": steal,
    }


def _field(text: str, name: str) -> float | None:
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdecimal():
            return float(words[1])
    return None


def _ratio(value: float) -> float:
    return min(1.0, max(0.0, value))  # jiffies and clocks are read at slightly different moments
