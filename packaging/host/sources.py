"""Which files of the repository a package is made of."""

from __future__ import annotations

import subprocess
from pathlib import Path

from recipes import REPOSITORY

CACHES = ("__pycache__", ".mypy_cache", ".ruff_cache")


def files(folder: str, repository: Path = REPOSITORY) -> list[Path]:
    """Return the files below a folder of the repository, sorted: what git tracks, as it is now.

    What is not a clone, such as an unpacked sdist, holds nothing else: there it is all but caches. Raises
    FileNotFoundError where the folder has none, CalledProcessError where git does not answer.
    """
    if (repository / ".git").exists():
        command = ["git", "-C", str(repository), "ls-files", "-z", "--", folder]
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        found = [repository / name for name in listed if name]
    else:
        found = [path for path in (repository / folder).rglob("*") if not set(CACHES) & set(path.parts)]
    there = sorted(path for path in found if path.is_file())
    if not there:
        raise FileNotFoundError(f"{repository / folder} has no files: is this the whole repository?")
    return there
