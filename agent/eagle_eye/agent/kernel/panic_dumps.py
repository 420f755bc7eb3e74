"""Finds panics of earlier boots in the dumps in persistent storage. Touches: the folders given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from eagle_eye.agent.kernel.messages import panic

DUMPS_MAX = 256
DUMP_BYTES_MAX = 1 << 20
DEPTH_MAX = 3  # systemd-pstore: /var/lib/systemd/pstore/<time>/<part>/dmesg.txt

Panics = dict[str, tuple[str, float]]  # by the dump's line: message, and Unix seconds


def panics(folders: Sequence[Path], oldest_s: float) -> tuple[Panics, str]:
    """Return the panics whose dumps were written since ``oldest_s``, and what could not be read, "" if nothing.

    The parts of one dump are in one folder and are one panic.
    """
    all_found: Panics = {}
    problem = ""
    for folder in folders:
        dumps: dict[Path, list[Path]] = {}
        try:
            for file in _dumps(folder, DEPTH_MAX):
                dumps.setdefault(file.parent, []).append(file)
        except OSError as error:
            problem = problem or f"{folder}: {error.strerror or error}"
        for files in dumps.values():
            try:
                found = _panics(files, oldest_s)
            except OSError as error:
                problem = problem or f"{error.filename or folder}: {error.strerror or error}"
                continue
            for line, reported in found.items():
                all_found.setdefault(line, reported)
    return all_found, problem


def _dumps(folder: Path, depth: int) -> list[Path]:
    """Return the dumps under a folder, none where the folder does not exist. Raises OSError."""
    found: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and depth > 1:
                    found += _dumps(Path(entry.path), depth - 1)
                elif entry.name.startswith(("dmesg", "console-")) and entry.is_file(follow_symlinks=False):
                    found.append(Path(entry.path))
                if len(found) >= DUMPS_MAX:
                    break
    except FileNotFoundError:
        return []
    return sorted(found[:DUMPS_MAX])


def _panics(files: Sequence[Path], oldest_s: float) -> Panics:
    """Return the panics in one folder's dumps: text and time (Unix seconds) by line. Raises OSError."""
    found: Panics = {}
    unnamed: list[tuple[str, float]] = []
    for file in files:
        with file.open("rb") as dump:
            time_s = os.fstat(dump.fileno()).st_mtime
            seen = panic(dump.read(DUMP_BYTES_MAX)) if time_s >= oldest_s else None
        if seen is not None and seen.line:
            found.setdefault(seen.line, (seen.text, time_s))
        elif seen is not None:
            unnamed.append((seen.text, time_s))
    if unnamed and not found:
        text, time_s = max(unnamed, key=lambda item: (len(item[0]), item[1]))
        found[f"{text} at {time_s:.0f}"] = (text, time_s)
    return found
