"""Writes a bill of materials for each artefact in a folder and for each container image, then the folder's SHA256SUMS.

PYTHONPATH=packaging python -m release.describe dist
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from release.artefacts import images, in_files
from release.bill import SUFFIX, bill
from release.build import epoch_s
from release.errors import ReleaseError

SUMS = "SHA256SUMS"


def main(argv: Sequence[str] | None = None) -> int:
    """Describe the folder; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m release.describe", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(argv).folder
    try:
        describe(folder)
    except ReleaseError as error:
        print(f"release.describe: {error}", file=sys.stderr)
        return 1
    print(folder / SUMS)
    return 0


def describe(folder: Path) -> None:
    """Write the bills and the sums. Raises ReleaseError for a file of which nobody knows what is in it."""
    seconds = epoch_s()
    files = [file for file in sorted(folder.iterdir()) if not file.name.endswith(SUFFIX) and file.name != SUMS]
    if not files:
        raise ReleaseError(f"{folder} is empty: make dist")
    for artefact in (*in_files(files), *images()):
        name = artefact.name if artefact.file else f"{artefact.name}-image"
        (folder / f"{name}{SUFFIX}").write_text(bill(artefact, seconds), encoding="utf-8")
    listed = [file for file in sorted(folder.iterdir()) if file.name != SUMS]
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in listed)
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
