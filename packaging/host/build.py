"""Builds the host packages: eagle-eye-agent and eagle-eye-server, each a .deb and an .rpm.

    .venv/bin/python packaging/host/build.py [--package agent server] [--format deb rpm] [--python 3.11 3.12 3.13]
                                             [--architecture amd64|arm64] [--out dist]

Runs in the environment of `make venv`. Needs pip and the package registry for the libraries' wheels (pinned by
requirements.lock), dpkg-deb for a .deb, rpmbuild for an .rpm (Debian: apt-get install dpkg-dev rpm). The agent's
package brings libraries for all Pythons from 3.10 on; the server's are large, so there is one package for each Python.
Built twice from one commit, packages are the same to the byte (SOURCE_DATE_EPOCH, else the commit's time).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from formats import deb, rpm
from libraries import LibraryError
from recipes import ARCHITECTURES, RECIPES, REPOSITORY, SERVER
from tree import stage

FORMATS = {"deb": ("dpkg-deb", deb), "rpm": ("rpmbuild", rpm)}
# Debian 12 has 3.11; Ubuntu 24.04 and RHEL 9 and 10 have 3.12; Debian 13 has 3.13.
SERVER_PYTHONS = {"deb": ["3.11", "3.12", "3.13"], "rpm": ["3.12"]}


def main() -> int:
    """Build what was asked for, print each package's path and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--package", nargs="+", choices=sorted(RECIPES), default=sorted(RECIPES), help="which (both)")
    add("--format", nargs="+", choices=sorted(FORMATS), default=sorted(FORMATS), help="what (both)")
    add("--python", nargs="+", choices=SERVER.pythons, help="server packages for these (of Debian, Ubuntu and RHEL)")
    add("--architecture", choices=sorted(ARCHITECTURES), default="amd64", help="of which processor (amd64)")
    add("--out", type=Path, default=REPOSITORY / "dist", help="folder of the packages (dist)")
    args = parser.parse_args()
    for kind in args.format:
        if shutil.which(FORMATS[kind][0]) is None:
            print(f"{FORMATS[kind][0]} is not installed: apt-get install dpkg-dev rpm", file=sys.stderr)
            return 2
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        for name in args.package:
            for pythons, formats in _variants(name, args.format, args.python):
                _build(name, pythons, formats, args.architecture, args.out)
    except (LibraryError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} failed: {(error.stderr or b'').decode()[-2000:]}", file=sys.stderr)
        return 1
    return 0


def _variants(name: str, formats: list[str], wished: list[str] | None) -> list[tuple[tuple[str, ...], list[str]]]:
    """Return the trees to be laid out: for which Pythons, and what is made of each."""
    recipe = RECIPES[name]
    if not recipe.each_python:
        return [(recipe.pythons, formats)]
    wanted = {kind: wished or SERVER_PYTHONS[kind] for kind in formats}
    return [
        ((python,), kinds)
        for python in recipe.pythons
        if (kinds := [kind for kind in formats if python in wanted[kind]])
    ]


def _build(name: str, pythons: tuple[str, ...], formats: list[str], architecture: str, out: Path) -> None:
    recipe, processor = RECIPES[name], ARCHITECTURES[architecture]
    python = pythons[0] if recipe.each_python else ""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        stage(tree, recipe, pythons, processor)
        for kind in formats:
            print(FORMATS[kind][1](tree, recipe, python, processor, out.resolve(), Path(scratch)), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
