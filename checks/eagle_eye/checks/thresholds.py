"""Every threshold of the checks: its value, its unit, its source. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

BY_THE_SITE = "given by the site"
_NO_DEFAULT = "none: it depends on the hardware, so the site gives it (--threshold)"


@dataclass(frozen=True)
class Threshold:
    """One threshold. ``value`` None: none unless set by the site. ``at_least``: less is sick; else more is."""

    name: str
    value: float | None
    unit: str
    at_least: bool
    source: str

    def broken_by(self, value: float) -> bool:
        """Whether a measured value is on the wrong side."""
        if self.value is None:
            return False
        return value < self.value if self.at_least else value > self.value


_ALL = (
    Threshold("clock.offset_seconds", 1.0, "s", False, "ours: logs of nodes further apart cannot be laid together"),
    Threshold(
        "disk.sync_seconds",
        1.0,
        "s",
        False,
        "ours: healthy disks answer in milliseconds (flash) to tens of them (rotating)",
    ),
    Threshold("disk.write_bytes_per_second", None, "B/s", True, _NO_DEFAULT),
    Threshold(
        "gemm.throughput_ratio",
        0.75,
        "1",
        True,
        "ours: GPUs of one model differ by 8% on average, at most 22% without a fault (Sinha et al., SC 2022)",
    ),
    Threshold("gemm.flops_per_second", None, "1/s", True, _NO_DEFAULT),
    Threshold(
        "gemm.throttled_ratio",
        0.5,
        "1",
        False,
        "ours: a GPU that brakes for heat or its supply in most looks under load, and not just for a moment",
    ),
    Threshold("memory.throughput_ratio", 0.75, "1", True, "ours: as for gemm; memory clocks of one model differ less"),
    Threshold("memory.bytes_per_second", None, "B/s", True, _NO_DEFAULT),
    Threshold("all_reduce.bus_bytes_per_second", None, "B/s", True, _NO_DEFAULT),
    Threshold("nccl_tests.bus_bytes_per_second", None, "B/s", True, _NO_DEFAULT),
    Threshold(
        "ib_write_bw.throughput_ratio", 0.5, "1", True, "ours: ports of one rate on other PCIe roots differ by less"
    ),
    Threshold("ib_write_bw.bytes_per_second", None, "B/s", True, _NO_DEFAULT),
)
THRESHOLDS: Mapping[str, Threshold] = MappingProxyType({threshold.name: threshold for threshold in _ALL})


class BadThreshold(Exception):
    """Not NAME=VALUE with a known name and a positive number; the message says which."""


def by_the_site(given: Sequence[str]) -> Mapping[str, Threshold]:
    """Return all thresholds, with the site's NAME=VALUE in place of the defaults. Raises BadThreshold."""
    found = dict(THRESHOLDS)
    for text in given:
        name, _, number = text.partition("=")
        if name not in found:
            raise BadThreshold(f"expected one of {', '.join(THRESHOLDS)}, got {name[:80]!r}")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0.0):
            raise BadThreshold(f"{name}: expected a positive number in {found[name].unit}, got {number[:40]!r}")
        found[name] = dataclasses.replace(found[name], value=value, source=BY_THE_SITE)
    return found


def against_peers(values: Mapping[str, float], groups: Mapping[str, str]) -> dict[str, float]:
    """Return each device's value as a ratio of the median of the others of its group; those without peers are missing.

    ``groups``: the device's model or rate; only like devices are compared.
    """
    ratios = {}
    for device, value in values.items():
        others = [other for name, other in values.items() if name != device and groups.get(name) == groups.get(device)]
        if others and (centre := median(others)) > 0.0:
            ratios[device] = value / centre
    return ratios
