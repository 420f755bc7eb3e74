"""The active check's data types: a check, its inputs, and its three possible answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle_eye.checks.thresholds import Threshold

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
