"""Checkpoint folders ``step_N`` on storage, as recognised by launchers and training programs.

Torch.distributed.checkpoint writes ``.metadata`` last: without it a checkpoint is not complete.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

METADATA = ".metadata"
_NAME = re.compile(r"step_(\d{1,18})", re.ASCII)


class StepFolder(NamedTuple):
    """A checkpoint folder. ``completed_s`` is the Unix time of its metadata; None: not complete."""

    step: int
    path: Path
    completed_s: float | None


def step_of(name: str) -> int | None:
    """Return the step of a folder by its name; None if it is not a checkpoint folder."""
    named = _NAME.fullmatch(name)
    return None if named is None else int(named[1])


def step_folders(directory: Path) -> list[StepFolder]:
    """Return the checkpoint folders in the directory, in no particular order; none if the directory does not exist.

    Raises OSError if it cannot be read: starting from nothing would then be wrong.
    """
    try:
        paths = list(directory.iterdir())
    except FileNotFoundError:
        return []
    named = ((step_of(path.name), path) for path in paths)
    return [StepFolder(step, path, _completed_s(path)) for step, path in named if step is not None]


def _completed_s(folder: Path) -> float | None:
    try:
        return (folder / METADATA).stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
