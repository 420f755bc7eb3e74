"""Chooses the checks that test for a fault, and those that must pass before a report clears the node of it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from eagle_eye.server.model.records import CheckOutcome

LONG_GEMM_S = 60.0  # heat and power limits show after a minute under load, not after eight seconds
BRIEF_S = 150.0
SDC_STARTS_S = 120.0  # to load torch twice, open the GPUs, and compute the results
WHOLE_S = 300.0  # everything, with the site's own tools

# Faults of one part of the node; two of one family may share a cause. A fault without a family may be in any part.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "gpu_lost": "gpu",
        "gpu_memory_error": "gpu",
        "gpu_hang": "gpu",
        "silent_data_corruption": "gpu",
        "thermal_throttle": "gpu",
        "power_throttle": "gpu",
        "pcie_degraded": "gpu",
        "nvlink_degraded": "gpu",
        "network_hang": "network",
        "nic_degraded": "network",
    }
)


class Suite(NamedTuple):
    """What ``eagle-eye check`` must run; ``checks`` empty: all of its checks.

    At least one check of each group in ``proof`` must have passed: without them a report may call the node healthy
    although it did not test for this fault, for lack of a tool or the hardware. ``gemm_s`` 0: the check's default;
    ``sdc_s`` likewise.
    """

    checks: tuple[str, ...]
    proof: tuple[tuple[str, ...], ...]
    deadline_s: float
    gemm_s: float = 0.0
    sdc_s: float = 0.0


EVERYTHING = Suite((), (), WHOLE_S)
_GPU = ("gemm", "memory", "gpu_facts", "dcgm")
_SEEN = ("gpu_facts",)  # the driver sees GPUs at all: otherwise they were not under load

_SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "gpu_lost": Suite(_GPU, (_SEEN, ("gemm", "dcgm")), WHOLE_S),
        "gpu_hang": Suite(_GPU, (_SEEN, ("gemm", "dcgm")), WHOLE_S),
        "gpu_memory_error": Suite(_GPU, (_SEEN, ("memory", "dcgm")), WHOLE_S),
        "silent_data_corruption": Suite(_GPU, (_SEEN, ("gemm",), ("memory",)), WHOLE_S, LONG_GEMM_S),
        "thermal_throttle": Suite(("gemm", "gpu_facts"), (_SEEN, ("gemm",)), BRIEF_S, LONG_GEMM_S),
        "power_throttle": Suite(("gemm", "gpu_facts"), (_SEEN, ("gemm",)), BRIEF_S, LONG_GEMM_S),
        "pcie_degraded": Suite(("gemm", "gpu_facts"), (_SEEN, ("gemm",)), BRIEF_S),
        "nvlink_degraded": Suite(
            ("gpu_facts", "nccl_tests", "all_reduce"), (_SEEN, ("nccl_tests", "all_reduce")), BRIEF_S
        ),
        "network_hang": Suite(("ib_write_bw",), (("ib_write_bw",),), BRIEF_S),
        "nic_degraded": Suite(("ib_write_bw",), (("ib_write_bw",),), BRIEF_S),
        "storage_stall": Suite(("disk",), (("disk",),), BRIEF_S),
    }
)


def suite(fault: str, sdc_s: float = 0.0) -> Suite:
    """Return the suite that tests for the fault; everything for a fault without a specific check, and for "".

    With ``sdc_s`` it is the search for silent corruption on a node that is not suspected of anything.
    """
    if sdc_s > 0:
        return Suite(("sdc_gemm", "sdc_all_reduce"), (("sdc_gemm",),), sdc_s + SDC_STARTS_S, sdc_s=sdc_s)
    return _SUITES.get(fault, EVERYTHING)


def unproven(fault: str, outcomes: Iterable[CheckOutcome], sdc_s: float = 0.0) -> str:
    """Return why passed checks do not clear the node of the fault, "" if they do."""
    passed = {outcome.name for outcome in outcomes if outcome.state == "passed"}
    missing = [group for group in suite(fault, sdc_s).proof if not passed & set(group)]
    if not missing:
        return ""
    wanted = ", ".join(" or ".join(group) for group in missing)
    return f"what has passed says nothing of {fault}: {wanted} must have passed (eagle-eye check --list says its needs)"


def related(fault: str, other: str) -> bool:
    """Return whether two faults may share a cause: of one family, or one of them without a family."""
    families = {FAMILIES.get(fault, ""), FAMILIES.get(other, "")}
    return len(families) == 1 or "" in families
