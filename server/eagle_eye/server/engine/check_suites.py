"""Which checks put a fault to the test, and what must have passed before they say anything about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from eagle_eye.server.model.records import CheckOutcome

LONG_GEMM_S = 60.0  # heat and power limits show after a minute under load, not after eight seconds
BRIEF_S = 150.0
SDC_STARTS_S = 120.0  # for torch to be loaded twice, GPUs to be opened, and results to be worked out
WHOLE_S = 300.0  # everything, with the site's own tools

# Faults of one part of the node; two of one family may be one cause. A fault of no family may be any part's.
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
    """What ``eagle-eye check`` is to run; ``checks`` empty: all that it has.

    Of each group in ``proof`` one check must have passed: a report without them may call the node healthy and say
    nothing of this fault, for want of a tool or of the hardware. ``gemm_s`` 0: as long as the check likes; ``sdc_s``
    likewise.
    """

    checks: tuple[str, ...]
    proof: tuple[tuple[str, ...], ...]
    deadline_s: float
    gemm_s: float = 0.0
    sdc_s: float = 0.0


EVERYTHING = Suite((), (), WHOLE_S)
_GPU = ("gemm", "memory", "gpu_facts", "dcgm")
_SEEN = ("gpu_facts",)  # the driver sees GPUs at all: else they were not what was put to work

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
    """Return what puts the fault to the test; everything for a fault that no check is about, and for "".

    With ``sdc_s`` it is the search for silent corruption of a node of which nothing is suspected.
    """
    if sdc_s > 0:
        return Suite(("sdc_gemm", "sdc_all_reduce"), (("sdc_gemm",),), sdc_s + SDC_STARTS_S, sdc_s=sdc_s)
    return _SUITES.get(fault, EVERYTHING)


def unproven(fault: str, outcomes: Iterable[CheckOutcome], sdc_s: float = 0.0) -> str:
    """Return why passed checks say nothing of the fault, "" where they do."""
    passed = {outcome.name for outcome in outcomes if outcome.state == "passed"}
    missing = [group for group in suite(fault, sdc_s).proof if not passed & set(group)]
    if not missing:
        return ""
    wanted = ", ".join(" or ".join(group) for group in missing)
    return f"what has passed says nothing of {fault}: {wanted} must have passed (eagle-eye check --list says its needs)"


def related(fault: str, other: str) -> bool:
    """Return whether two faults may be of one cause: of one family, or one of them of none."""
    families = {FAMILIES.get(fault, ""), FAMILIES.get(other, "")}
    return len(families) == 1 or "" in families


__all__ = ["EVERYTHING", "FAMILIES", "Suite", "related", "suite", "unproven"]
