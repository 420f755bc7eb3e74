"""Hosts, sites and children's answers as the checks get them, and tools on PATH that say what a test wants."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import strategies as st

from eagle_eye.checks import child
from eagle_eye.checks.check import CheckedGpu, CheckOptions, Host, Site, by_the_site
from eagle_eye.checks.child import Children, WorkerProgress

HEALTHY_FACTS = {
    "remap_pending": 0.0,
    "ecc_uncorrected_total": 0.0,
    "pcie_link_width": 16.0,
    "pcie_link_width_max": 16.0,
    "pcie_link_generation": 5.0,
    "pcie_link_generation_max": 5.0,
    "utilization_ratio": 1.0,
    "throttle_reasons": 4.0,  # the software power cap: ordinary
    "memory_used_bytes": 6e8,
    "memory_total_bytes": 8.5e10,
}


def nested(*names: str) -> st.SearchStrategy[Any]:
    """Return plain data of any shape whose dictionaries have these keys."""
    leaves = st.none() | st.integers() | st.floats() | st.text()
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(names), inner))


def output_with(*names: str) -> st.SearchStrategy[bytes]:
    """Return what a child or a tool may print: anything, or JSON whose objects have these keys."""
    return st.binary(max_size=400) | nested(*names).map(lambda value: json.dumps(value).encode())


def gpu(
    row: int,
    facts: Mapping[str, float] = MappingProxyType({}),
    processes: tuple[int, ...] | None = (),
    instances: int = 0,
) -> CheckedGpu:
    return CheckedGpu(
        row=row,
        uuid=f"GPU-{row}",
        model="H100",
        facts={**HEALTHY_FACTS, **facts},
        processes=processes,
        instances=instances,
    )


def host(gpus: int = 0) -> Host:
    return Host(gpus=tuple(gpu(row) for row in range(gpus)))


def asked(
    on: Host | None = None, *, quick: bool = True, within_s: float = 10.0, thresholds: tuple[str, ...] = ()
) -> CheckOptions:
    site = Site(thresholds=by_the_site(thresholds), folder=Path("/var/tmp"), torch_python="/no/python", sdc_s=4.0)
    return CheckOptions(host=on or host(), site=site, quick=quick, until_s=time.monotonic() + within_s)


def children(*courses: WorkerProgress, status: int | None = 0, starved: bool = False) -> Children:
    return Children(courses=courses, status=status, ended_s=100.0, starved=starved)


def answered(values: Mapping[str, float]) -> WorkerProgress:
    return WorkerProgress("working", 99.9, values)


def answering(monkeypatch: pytest.MonkeyPatch, made: Children) -> None:
    """Have every child answer so, without starting one."""
    monkeypatch.setattr(child, "run", lambda *_args, **_more: made)


def tool(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a tool on PATH, before all others."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return path
