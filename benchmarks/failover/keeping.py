"""The file of a run: whole after every takeover, so that an interrupted run can be gone on with."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.failover.figures import Outcome, figures
from benchmarks.result_file import write_result


class Kept(msgspec.Struct, kw_only=True):
    """Everything that was measured so far."""

    settings: dict[str, Any]
    machine: dict[str, Any] = {}
    outcomes: list[Outcome] = []
    figures: dict[str, Any] = {}


def opened(file: Path | None, settings: dict[str, Any]) -> Kept:
    """Return what an earlier run with these settings has measured, or an empty one.

    Raises ValueError where the file holds another one: it would be lost.
    """
    if file is None or not file.exists():
        return Kept(settings=settings, machine={"cores": os.cpu_count(), "kernel": platform.release()})
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=Kept)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} is no result of this benchmark ({error}); name another file") from None
    if kept.settings != settings:
        raise ValueError(f"{file} was measured with {kept.settings}, not {settings}; name another file, or remove it")
    return kept


def keep(file: Path | None, kept: Kept) -> None:
    """The figures are those of all outcomes, and on disk where there is a file."""
    kept.figures = figures(kept.outcomes)
    if file is not None:
        write_result(file, kept)
