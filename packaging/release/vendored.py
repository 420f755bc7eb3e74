"""Libraries whose code lies in this repository, as the table in the vendor folder's README names them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from release.errors import ReleaseError
from release.libraries import ROOT

FOLDER = ROOT / "server/eagle_eye/server/web/page/vendor"
PORTION = "server"  # whoever ships this one ships them
ROW = re.compile(
    r"\| `(?P<folder>[\w.-]+)` \| `(?P<package>[\w.@/-]+)` [^|]*\| (?P<version>[\w.-]+) \| (?P<licence>[^|]+) \|"
)


class Vendored(NamedTuple):
    """One library, from npm."""

    folder: Path
    name: str
    version: str
    licence: str


def vendored() -> list[Vendored]:
    """Return the libraries; raise ReleaseError where table and folders differ, or one has no licence file."""
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    found = [
        Vendored(FOLDER / row["folder"], row["package"], row["version"], row["licence"].strip())
        for row in ROW.finditer(table)
    ]
    there = {folder.name for folder in FOLDER.iterdir() if folder.is_dir()}
    if there != {each.folder.name for each in found}:
        raise ReleaseError(
            f"{FOLDER / 'README.md'} and the folders beside it ({', '.join(sorted(there))}) name different libraries"
        )
    for each in found:
        if not (each.folder / "LICENSE").is_file():
            raise ReleaseError(f"{each.folder} has no LICENSE: its authors ask for it to come along")
    return found
