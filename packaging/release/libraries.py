"""The libraries that are shipped: the locked ones that extras bring, and those whose code lies in this repository.

Read from pyproject.toml, requirements.lock, installed metadata, and the table in the vendor folder's README.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


class ReleaseError(Exception):
    """The repository cannot be released as it is; the message says what to mend."""


ROOT = Path(__file__).parents[2]
# The lock has torch's CPU build. PyPI's other one asks for CUDA's libraries, which NVIDIA licenses to its installer.
CUDA = re.compile(r"(nvidia|cuda)-(?!ml-py)|triton$")
OLDEST = "3.10"  # Ubuntu 22.04's
RUN_ON_OLDEST = ("", "agent", "checkpoint-store")


class Library(NamedTuple):
    """One locked library. ``extras`` are those that bring it, "" where every installation does."""

    name: str
    version: str
    extras: tuple[str, ...]
    needs: tuple[str, ...]


class Project(msgspec.Struct):
    """What pyproject.toml says under ``[project]``, as far as it is of interest here."""

    version: str
    license: str
    dependencies: list[str]
    optional_dependencies: dict[str, list[str]] = msgspec.field(name="optional-dependencies")


class _File(msgspec.Struct):
    project: Project


def project() -> Project:
    """Return what pyproject.toml says."""
    return msgspec.toml.decode((ROOT / "pyproject.toml").read_bytes(), type=_File).project


def extras() -> tuple[str, ...]:
    """Return the extras that users install: all but ``dev``."""
    return tuple(sorted(set(project().optional_dependencies) - {"dev"}))


def locked() -> dict[str, str]:
    """Return the locked version of each library, by canonical name."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def brought_by(wanted: Iterable[str], pythons: Iterable[str]) -> list[Library]:
    """Return the libraries that the extras bring on Linux, by name, with what every installation brings.

    ``pythons`` are versions such as "3.13": what any of them needs is in. Raises ReleaseError for a library that is not
    locked or not installed.
    """
    versions = locked()
    pythons = tuple(pythons)
    brought: dict[str, set[str]] = {}
    needs: dict[str, set[str]] = {}
    asked_for = project()
    starts = {"": asked_for.dependencies} | {extra: asked_for.optional_dependencies[extra] for extra in wanted}
    for extra, requirements in starts.items():
        environments = _environments(extra, pythons)
        todo = list(_applying(requirements, "", environments))
        while todo:
            name, asked = todo.pop()
            if extra in brought.setdefault(name, set()) and not asked:
                continue
            brought[name].add(extra)
            if name not in versions:
                raise ReleaseError(f"{name} is not in requirements.lock, but the extra {extra or 'of all'} brings it")
            following = [each for part in ("", *asked) for each in _applying(_required(name), part, environments)]
            needs.setdefault(name, set()).update(each for each, _ in following)
            todo.extend(each for each in following if extra not in brought.get(each[0], ()))
    by_name = sorted(brought.items())
    return [Library(name, versions[name], tuple(sorted(by)), tuple(sorted(needs[name]))) for name, by in by_name]


def direct(wanted: Iterable[str], pythons: Iterable[str]) -> list[str]:
    """Return the names of the libraries that pyproject.toml itself asks for."""
    pythons, asked_for = tuple(pythons), project()
    lists = {"": asked_for.dependencies} | {extra: asked_for.optional_dependencies[extra] for extra in wanted}
    return sorted(
        {name for extra, each in lists.items() for name, _ in _applying(each, "", _environments(extra, pythons))}
    )


def _required(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ReleaseError(f"{name} is not installed here, so what it needs is unknown: make venv") from error


def _applying(
    requirements: Iterable[str], extra: str, environments: list[dict[str, str]]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return what applies in any of the environments: the name, and which extras are asked of it."""
    for each in map(Requirement, requirements):
        name = canonicalize_name(each.name)
        if CUDA.match(name):
            continue
        if each.marker is None:
            if not extra:
                yield name, tuple(sorted(each.extras))
        elif any(each.marker.evaluate({**environment, "extra": extra}) for environment in environments):
            yield name, tuple(sorted(each.extras))


def _environments(extra: str, pythons: Iterable[str]) -> list[dict[str, str]]:
    """Return the environments that the extra may be installed in."""
    return [_environment(python) for python in pythons if python != OLDEST or extra in RUN_ON_OLDEST]


def _environment(python: str) -> dict[str, str]:
    """Return the markers of a GPU host's or a server's Python, whatever runs here."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


VENDOR = ROOT / "server/eagle_eye/server/web/page/vendor"
PORTION = "server"  # whoever ships this one ships them
VENDORED_ROW = re.compile(
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
    table = (VENDOR / "README.md").read_text(encoding="utf-8")
    found = [
        Vendored(VENDOR / row["folder"], row["package"], row["version"], row["licence"].strip())
        for row in VENDORED_ROW.finditer(table)
    ]
    there = {folder.name for folder in VENDOR.iterdir() if folder.is_dir()}
    if there != {each.folder.name for each in found}:
        raise ReleaseError(
            f"{VENDOR / 'README.md'} and the folders beside it ({', '.join(sorted(there))}) name different libraries"
        )
    for each in found:
        if not (each.folder / "LICENSE").is_file():
            raise ReleaseError(f"{each.folder} has no LICENSE: its authors ask for it to come along")
    return found
