"""The version: pyproject.toml has it, and what cannot read that repeats it.

PYTHONPATH=packaging python -m release.version [0.2.0]

Without a version it says it, and where something else is repeated; with one it writes it everywhere, and closes the
changelog's section of what is unreleased.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from release.libraries import ROOT, ReleaseError, project

VERSION = r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?"
# An image's tag, a package's or archive's file name, the chart, and what the compose file calls its images.
REPEATED = re.compile(
    rf"(\beagle[-_]eye(?:-[a-z]+)*[:_-]v?|^version: |^appVersion: \"?|\bVERSION: )({VERSION})", re.MULTILINE
)
# The past, which keeps its numbers, and what is of other versions on purpose.
ELSEWHERE = ("CHANGELOG.md", "docs/decisions/", "packaging/release/", "tests/", "benchmarks/")
READ = (".md", ".yaml", ".yml", ".toml", ".tpl", ".Dockerfile", ".sh")
CHANGELOG = ROOT / "CHANGELOG.md"
UNRELEASED = "## Unreleased\n"


class Repetition(NamedTuple):
    """One place that says a version."""

    file: Path
    line: int
    version: str


def main(argv: Sequence[str] | None = None) -> int:
    """Say the version or write another; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m release.version", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("new", nargs="?")
    new: str | None = parser.parse_args(argv).new
    try:
        if new:
            write(new)
        wrong = [each for each in repetitions() if each.version != project().version]
    except ReleaseError as error:
        print(f"release.version: {error}", file=sys.stderr)
        return 1
    print(project().version)
    for each in wrong:
        print(f"{each.file.relative_to(ROOT)}:{each.line} says {each.version}", file=sys.stderr)
    return 1 if wrong else 0


def repetitions() -> list[Repetition]:
    """Return every place outside pyproject.toml that says a version of ours."""
    return [
        Repetition(file, text.count("\n", 0, found.start()) + 1, found[2])
        for file, text in _texts()
        for found in REPEATED.finditer(text)
    ]


def write(new: str) -> None:
    """Make ``new`` the version everywhere. Raises ReleaseError where it is none or the changelog lacks it."""
    if not re.fullmatch(VERSION, new):
        raise ReleaseError(f"{new!r} is no version; expected one such as 0.2.0 or 0.2.0rc1")
    changes = CHANGELOG.read_text(encoding="utf-8")
    if UNRELEASED not in changes:
        raise ReleaseError(f"{CHANGELOG.name} has no section {UNRELEASED.strip()!r}: what is new in {new}?")
    for file, text in _texts():
        changed = REPEATED.sub(lambda found: found[1] + new, text)
        if changed != text:
            file.write_text(changed, encoding="utf-8")
    pyproject = ROOT / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    pyproject.write_text(text.replace(f'version = "{project().version}"', f'version = "{new}"', 1), encoding="utf-8")
    today = datetime.now(timezone.utc).date().isoformat()
    CHANGELOG.write_text(changes.replace(UNRELEASED, f"{UNRELEASED}\n## {new} - {today}\n", 1), encoding="utf-8")


def _texts() -> Iterator[tuple[Path, str]]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"this is no clone: {done.stderr.strip()}")
    for name in done.stdout.split("\0"):
        file = ROOT / name
        if name.endswith(READ) and not name.startswith(ELSEWHERE) and name != "pyproject.toml" and file.is_file():
            yield file, file.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
