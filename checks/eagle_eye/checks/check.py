"""The nouns of the active check: what a check is, what it is asked with, and its three answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle_eye.checks.thresholds import Threshold

TEXT_CHARS_MAX = 300  # of any text that a tool, a driver or a process in trouble says

NO_GPU = "this host has no GPU"
ONE_GPU = "one GPU has nobody to reduce with"

State = Literal["passed", "sick", "could_not_check"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as NVML tells of it; ``facts`` by name, without those that this GPU or driver does not tell.

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
        """Return it for people, as the agent's rows have it: "gpu 3"."""
        return f"gpu {self.row}"


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the host has. ``gpu_problem``: why its GPUs cannot be seen, empty when they can, or when it has none.

    ``lost`` are GPUs that the driver lists and that answer no more, each with NVML's word. ``simulated``: the GPUs
    are the agent's simulation, and nothing that they say was measured.
    """

    gpus: tuple[Gpu, ...] = ()
    lost: tuple[str, ...] = ()
    gpu_problem: str = ""
    simulated: bool = False
    rdma_devices: tuple[str, ...] = ()

    @property
    def has_gpus(self) -> bool:
        """Whether the host has GPUs, seen or not."""
        return bool(self.gpus or self.lost or self.gpu_problem)


@dataclass(frozen=True, kw_only=True)
class Site:
    """What the site says beside the defaults. ``gpus_expected`` None: not known; ``torch_python``: whose torch.

    ``gemm_s`` None: as long as the check likes. ``sdc_s`` is what the checks for silent corruption have together.
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
    """What a check is run with. ``until_s`` is its deadline on the monotonic clock."""

    host: Host
    site: Site
    quick: bool
    until_s: float
    passed: frozenset[str] = frozenset()  # the checks that have passed before it


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One figure. ``device`` "": of the node. ``threshold`` None: it is told and judges nothing."""

    name: str
    value: float
    unit: str
    device: str = ""
    threshold: float | None = None
    source: str = ""  # where the threshold comes from


@dataclass(frozen=True, kw_only=True)
class Result:
    """One check's answer. ``reason``: why it is sick or could not be checked, or what was seen.

    ``expected``: whether this host should have been able to answer. A check whose hardware or tool the host does not
    have could not be made either, and that keeps nobody from calling the host healthy.
    """

    state: State
    reason: str
    values: tuple[Measured, ...] = ()
    expected: bool = True


@dataclass(frozen=True)
class Check:
    """One check. ``needs`` is for people; ``limit_s`` and ``quick_limit_s`` are what it may take, None: left out.

    ``longer_s`` is how much more than that it may take at this site. ``absent`` returns at once why this host does not
    have what the check is about, or is made with; "" where it has. ``run`` returns, whatever the host does.
    ``loads_gpus``: it would disturb whoever computes there. ``on_request``: it is run only when it is named.
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
class Outcome:
    """One check's result in the report, with what it took."""

    name: str
    state: State
    reason: str
    duration_s: float
    expected: bool
    values: tuple[Measured, ...] = ()


def passed(reason: str, *values: Measured) -> Result:
    """Return that nothing stands against what was checked."""
    return Result(state="passed", reason=reason, values=values)


def sick(reason: str, *values: Measured) -> Result:
    """Return that something does; the reason names what and where."""
    return Result(state="sick", reason=printable(reason), values=values)


def could_not_check(reason: str, *values: Measured) -> Result:
    """Return that nobody can tell, although this host should have been able to answer."""
    return Result(state="could_not_check", reason=printable(reason), values=values)


def not_here(reason: str) -> Result:
    """Return that this host does not have what the check is about, or what it is made with."""
    return Result(state="could_not_check", reason=printable(reason), expected=False)


def printable(text: str) -> str:
    """Return untrusted text as one bounded line."""
    return "".join(char if char.isprintable() else " " for char in text[:TEXT_CHARS_MAX]).strip()
