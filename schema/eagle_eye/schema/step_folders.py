"""The folders ``step_N`` in which checkpoints lie on storage: what launchers and training programs take for one.

Torch.distributed.checkpoint writes ``.metadata`` last: without it a checkpoint is not complete.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

METADATA = ".metadata"
_NAME = re.compile(r"step_(\d{1,18})", re.ASCII)


class StepFolder(NamedTuple):
    """A folder of a step. ``completed_s`` is the Unix time of its metadata; None: it is not complete."""

    step: int
    path: Path
    completed_s: float | None


def step_of(name: str) -> int | None:
    """Return the step that a folder of this name is of; None where it is no checkpoint's."""
    named = _NAME.fullmatch(name)
    return None if named is None else int(named[1])


def step_folders(directory: Path) -> list[StepFolder]:
    """Return those in the directory, in no particular order; none where there is no directory.

    Raises OSError where it cannot be read: to begin from nothing would then be wrong.
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
