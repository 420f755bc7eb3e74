"""The file of a run: whole after every item, so that an interrupted run is reported and can be gone on with."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.recovery.figures import Session, figures
from benchmarks.recovery.outcome import Outcome
from benchmarks.recovery.plan import Item, faults_in
from benchmarks.result_file import write_result


class Kept(msgspec.Struct, kw_only=True):
    """Everything that was measured so far."""

    plan: dict[str, Any]
    settings: dict[str, Any]
    sessions: list[Session] = []
    outcomes: list[Outcome] = []
    without: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    figures: dict[str, Any] = {}


def opened(file: Path | None, items: Sequence[Item], seed: int, settings: dict[str, Any]) -> Kept:
    """Return what an earlier run of the same plan and settings has measured, or an empty one.

    Raises ValueError where the file holds another one: it would be lost.
    """
    digest = hashlib.sha256(msgspec.json.encode([list(items), settings])).hexdigest()[:12]
    plan = {"faults": faults_in(items), "items": len(items), "seed": seed, "digest": digest}
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_average": list(os.getloadavg()),
    }
    if file is None or not file.exists():
        return Kept(plan=plan, settings=settings, machine=machine)
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=Kept)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} is no result of this benchmark ({error}); name another file") from None
    if kept.plan["digest"] != digest:
        raise ValueError(
            f"{file} holds another plan ({kept.plan['items']} items, seed {kept.plan['seed']}) or other settings;"
            " name another file, or remove it"
        )
    return kept


def keep(file: Path | None, kept: Kept) -> None:
    """The figures are those of all outcomes, and on disk where there is a file."""
    kept.figures = figures(kept.outcomes, kept.sessions)
    if file is not None:
        write_result(file, kept)


def _processor() -> str:
    with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(found, platform.machine())
