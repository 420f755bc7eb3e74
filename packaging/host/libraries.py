"""The libraries of a package: wheels in requirements.lock's versions, unpacked, for Pythons that need not be here."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

import tomllib
from recipes import REPOSITORY, Architecture, Recipe

# What no program of ours reads: tests of libraries, headers, sources and archives for compiling against them.
LEFT_OUT = re.compile(r"example\.py$|[^/]+/tests/|pyarrow/(include|src)/|[^/]+\.data/(scripts|data|headers)/|.+\.a$")
_OLDER_THAN = re.compile(r"(?P<requirement>[^;]+); *python_version *< *'(?P<python>[\d.]+)'")
_NORMAL = re.compile(r"[-_.]+")


class LibraryError(Exception):
    """Libraries are not to be had as requirements.lock says; the message says which and why."""


def download(recipe: Recipe, python: str, architecture: Architecture, folder: Path) -> list[Path]:
    """Return the wheels that the recipe needs on that Python. Raises LibraryError."""
    platforms = [f"{tag}_{architecture.rpm}" for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}", f"--dest={folder}"),
        *(f"--platform={platform}" for platform in platforms),
        *("--constraint", str(REPOSITORY / "requirements.lock")),
        *_requirements(recipe, python),
    )
    wheels = sorted(folder.glob("*.whl"))
    locked = _locked()
    unknown = [wheel.name for wheel in wheels if name_and_version(wheel) not in locked]
    if unknown:
        raise LibraryError(f"these are not in requirements.lock: {', '.join(unknown)}")
    return wheels


def unpack(wheel: Path, folder: Path) -> None:
    """Lay a wheel's files out in the folder, but for those that nobody reads. Raises LibraryError."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = PurePosixPath(re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", member.filename))
            if member.is_dir() or LEFT_OUT.match(member.filename):
                continue
            if path.is_absolute() or ".." in path.parts:
                raise LibraryError(f"{wheel.name} wants to write {member.filename}")
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


def fits_all(wheel: Path) -> bool:
    """Return whether all our Pythons can use the wheel on its processor."""
    return wheel.name.endswith("-none-any.whl") or "-abi3-" in wheel.name


def name_and_version(wheel: Path) -> tuple[str, str]:
    """Return the wheel's distribution, spelled one way, and its version."""
    name, version = wheel.name.split("-")[:2]
    return _NORMAL.sub("-", name).lower(), version


def _requirements(recipe: Recipe, python: str) -> list[str]:
    """Return what pyproject.toml asks for. pip would read its markers for the Python that runs it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"]]
    for extra in recipe.extras:
        asked += project["optional-dependencies"][extra]
    wanted = []
    for requirement in asked:
        conditional = _OLDER_THAN.fullmatch(requirement)
        if conditional is None:
            wanted.append(requirement)
        elif _number(python) < _number(conditional["python"]):
            wanted.append(conditional["requirement"].strip())
    return sorted(set(wanted))


def _locked() -> set[tuple[str, str]]:
    lock = (REPOSITORY / "requirements.lock").read_text()
    found = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", lock, re.MULTILINE)
    return {(_NORMAL.sub("-", name).lower(), version) for name, version in found}


def _number(python: str) -> tuple[int, ...]:
    return tuple(map(int, python.split(".")))


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise LibraryError(f"pip failed: {done.stderr[-2000:]}")
