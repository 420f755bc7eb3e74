"""Builds the wheel and the sdist of what git tracks, to the byte the same in any folder, at any time, under any umask.

    PYTHONPATH=packaging python -m release.build [--out dist]

SOURCE_DATE_EPOCH is the time that all files in them bear; the last commit's where it is not set. What is new and not
tracked is left out and named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from release.libraries import ROOT, ReleaseError, project

EPOCH = "SOURCE_DATE_EPOCH"


def main(argv: Sequence[str] | None = None) -> int:
    """Build both and print where they are; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m release.build", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args(argv)
    try:
        for file in build(args.out.resolve()):
            print(file)
        changed = _git("status", "--porcelain").splitlines()
    except ReleaseError as error:
        print(f"release.build: {error}", file=sys.stderr)
        return 1
    if changed:
        print(
            f"release.build: {len(changed)} files differ from the last commit (git status): commit before a release",
            file=sys.stderr,
        )
    return 0


def build(out: Path) -> list[Path]:
    """Return the sdist and the wheel, made in ``out``. Raises ReleaseError when they cannot be made."""
    seconds = epoch_s()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        sources = Path(scratch) / "eagle-eye"
        stage(sources)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "hatchling",
                "build",
                "--directory",
                str(out),
                "--target",
                "sdist",
                "--target",
                "wheel",
            ],
            cwd=sources,
            env={**os.environ, EPOCH: str(seconds)},
            capture_output=True,
            text=True,
            check=False,
            umask=0o022,
        )
    if done.returncode != 0:
        raise ReleaseError(f"hatchling failed: {done.stderr.strip() or done.stdout.strip()}")
    stem = f"eagle_eye-{project().version}"
    return [out / f"{stem}.tar.gz", out / f"{stem}-py3-none-any.whl"]


def epoch_s() -> int:
    """Return the time that all artefacts bear, in Unix seconds."""
    text = os.environ.get(EPOCH, "") or _git("log", "-1", "--format=%ct").strip()
    if not text.isdigit():
        raise ReleaseError(f"{EPOCH} is {text!r}; expected Unix seconds, such as 1700000000")
    return int(text)


def stage(target: Path) -> None:
    """Copy what git tracks, as it is now, with a plain file's or a program's mode."""
    for name in _git("ls-files", "-z").split("\0"):
        source = ROOT / name
        if name and source.is_file():
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
            copy.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ReleaseError("git is not installed; it says which files are ours: apt-get install git") from error
    if done.returncode != 0:
        raise ReleaseError(f"git {words[0]} failed; a release is built in a clone: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
