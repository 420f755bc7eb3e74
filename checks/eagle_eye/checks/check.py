"""The active checks' vocabulary: a check, its inputs and answers, every threshold, the host's verdict. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Literal

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


TEXT_CHARS_MAX = 300  # of any text from a tool, a driver or a failing process

NO_GPU = "this host has no GPU"
ONE_GPU = "one GPU has nobody to reduce with"

State = Literal["passed", "sick", "could_not_check"]


@dataclass(frozen=True, kw_only=True)
class CheckedGpu:
    """One GPU as reported by NVML; ``facts`` by name, without those that this GPU or driver does not support.

    ``processes``: the pids that compute on it; None where the driver does not say.
    """

    row: int
    uuid: str
    model: str
    facts: Mapping[str, float]
    processes: tuple[int, ...] | None = ()
    instances: int = 0

    @property
    def name(self) -> str:
        """Return its name for people, as in the agent's rows: "gpu 3"."""
        return f"gpu {self.row}"


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host's hardware. ``gpu_problem``: why its GPUs are not visible, empty if they are, or if it has none.

    ``lost`` are GPUs that the driver lists but that no longer answer, or for which it asks for a repair, each with
    NVML's words. ``simulated``: the GPUs are the agent's simulation, and their values are not measurements.
    """

    gpus: tuple[CheckedGpu, ...] = ()
    lost: tuple[str, ...] = ()
    gpu_problem: str = ""
    simulated: bool = False
    rdma_devices: tuple[str, ...] = ()

    @property
    def has_gpus(self) -> bool:
        """Whether the host has GPUs, visible or not."""
        return bool(self.gpus or self.lost or self.gpu_problem)


@dataclass(frozen=True, kw_only=True)
class Site:
    """The site's settings. ``gpus_expected`` None: unknown; ``torch_python``: the Python that has torch.

    ``gemm_s`` None: the check's default. ``sdc_s`` is the total time of the checks for silent corruption.
    """

    thresholds: Mapping[str, Threshold]
    folder: Path
    torch_python: str
    sdc_s: float
    gpus_expected: int | None = None
    dcgm_level: int = 1
    all_reduce_perf: str = "all_reduce_perf"
    gemm_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """A check's inputs. ``until_s`` is its deadline on the monotonic clock."""

    host: Host
    site: Site
    quick: bool
    until_s: float
    passed: frozenset[str] = frozenset()  # the checks that have passed before it


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One figure. ``device`` "": of the node. ``threshold`` None: reported only, not judged."""

    name: str
    value: float
    unit: str
    device: str = ""
    threshold: float | None = None
    source: str = ""  # where the threshold comes from


@dataclass(frozen=True, kw_only=True)
class Result:
    """One check's answer. ``reason``: why it is sick or could not be checked, or what was seen.

    ``expected``: whether this host should have been able to answer. A check whose hardware or tool the host lacks does
    not run either, and does not keep the host from being healthy.
    """

    state: State
    reason: str
    values: tuple[Measured, ...] = ()
    expected: bool = True


@dataclass(frozen=True)
class Check:
    """One check. ``needs`` is for people; ``limit_s`` and ``quick_limit_s`` are its time limits, None: left out.

    ``longer_s`` is how much more than that it may take at this site. ``absent`` returns at once why this host does not
    have what the check is about, or is made with; "" where it has. ``run`` returns, whatever the host does.
    ``loads_gpus``: it would disturb a job on the GPUs. ``on_request``: it runs only when named.
    """

    name: str
    needs: str
    measures: str
    limit_s: float
    quick_limit_s: float | None
    absent: Callable[[CheckOptions], str]
    run: Callable[[CheckOptions], Result]
    loads_gpus: bool = False
    longer_s: Callable[[Site], float] = lambda _site: 0.0
    on_request: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """One check's result in the report, with its duration."""

    name: str
    state: State
    reason: str
    duration_s: float
    expected: bool
    values: tuple[Measured, ...] = ()


def passed(reason: str, *values: Measured) -> Result:
    """Return that the check found no fault."""
    return Result(state="passed", reason=reason, values=values)


def sick(reason: str, *values: Measured) -> Result:
    """Return that it found a fault; the reason says what and where."""
    return Result(state="sick", reason=printable(reason), values=values)


def could_not_check(reason: str, *values: Measured) -> Result:
    """Return that the result is unknown, although this host should have been able to answer."""
    return Result(state="could_not_check", reason=printable(reason), values=values)


def not_here(reason: str) -> Result:
    """Return that this host lacks the hardware to check, or the tool."""
    return Result(state="could_not_check", reason=printable(reason), expected=False)


def printable(text: str) -> str:
    """Return untrusted text as one bounded line."""
    return "".join(char if char.isprintable() else " " for char in text[:TEXT_CHARS_MAX]).strip()


Verdict = Literal["healthy", "sick", "cannot_tell"]

# As with ``eagle-eye agent --once --check``: 1 and 2 also come from other failures, 3 only from a verdict. A script
# that acts on 3 keeps a host in service that cannot be judged.
EXIT_CODES: Mapping[Verdict, int] = MappingProxyType({"healthy": 0, "cannot_tell": 1, "sick": 3})


def host_verdict(outcomes: Sequence[CheckResult]) -> Verdict:
    """Return "sick" when one check says so, "healthy" when all that this host can answer have passed, and one has."""
    if any(outcome.state == "sick" for outcome in outcomes):
        return "sick"
    unanswered = any(outcome.state == "could_not_check" and outcome.expected for outcome in outcomes)
    if unanswered or not any(outcome.state == "passed" for outcome in outcomes):
        return "cannot_tell"
    return "healthy"
