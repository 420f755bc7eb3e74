"""What the host packages are: a table that everything else reads, and which files of the repository are in them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
MAINTAINER = "The Eagle Eye authors <eagle-eye@eagle-eye.invalid>"
HOMEPAGE = "https://eagle-eye.invalid/"


class Architecture(NamedTuple):
    """One processor as Debian, RPM and wheels call it."""

    deb: str
    rpm: str


ARCHITECTURES = {
    "amd64": Architecture("amd64", "x86_64"),
    "arm64": Architecture("arm64", "aarch64"),
}


class Recipe(NamedTuple):
    """One package. ``pythons``: those that it can bring libraries for, oldest first.

    With ``each_python`` there is a package for each of them, because its libraries are large; else one brings all.
    ``service`` is started by Debian's packages; ``units`` are all. ``user`` is the system's user that the package
    makes, "" for none; the first of ``states`` is its home. They hold what services keep; purging removes them.
    """

    name: str
    summary: str
    description: tuple[str, ...]
    portions: tuple[str, ...]
    extras: tuple[str, ...]
    pythons: tuple[str, ...]
    each_python: bool
    configuration: str
    configuration_mode: int
    service: str
    units: tuple[str, ...]
    user: str
    states: tuple[str, ...]
    priority: int

    @property
    def home(self) -> Path:
        """Return the package's own folder."""
        return Path("usr/lib") / self.name


AGENT = Recipe(
    name="eagle-eye-agent",
    summary="watches a GPU host and its training processes for Eagle Eye",
    description=(
        "A small daemon for every GPU host. It reads the driver, the kernel's log, the",
        "network's ports and the training processes, and reports to the server.",
        "With the store that keeps jobs' checkpoints in this host's memory.",
    ),
    portions=("schema", "agent", "checks", "checkpoint", "client", "cli"),
    extras=("agent", "checkpoint-store"),
    pythons=("3.10", "3.11", "3.12", "3.13", "3.14"),
    each_python=False,
    configuration="agent.toml",
    configuration_mode=0o644,
    service="eagle-eye-agent.service",
    units=("eagle-eye-agent.service", "eagle-eye-checkpoint-store@.service", "eagle-eye-checkpoints.slice"),
    user="",
    states=("/var/lib/eagle-eye-agent", "/run/eagle-eye"),
    priority=10,
)

SERVER = Recipe(
    name="eagle-eye-server",
    summary="finds the faulty node of a distributed training job",
    description=(
        "The server of Eagle Eye: it takes the frames of all agents, finds the faulty",
        "node and tells subscribers. With the commands of its operators, and the",
        "orchestrators that have Slurm, Kubernetes or a program carry out what it asks.",
    ),
    portions=(
        *("schema", "agent", "checks", "checkpoint", "client", "cli"),
        *("server", "detectors", "orchestrators", "planning", "simulator", "learning"),
    ),
    extras=("agent", "checkpoint-store", "server", "postgresql", "orchestrators"),
    pythons=("3.11", "3.12", "3.13", "3.14"),
    each_python=True,
    configuration="server.toml",
    configuration_mode=0o640,
    service="eagle-eye-server.service",
    units=("eagle-eye-server.service", "eagle-eye-orchestrate@.service"),
    user="eagle-eye",
    states=("/var/lib/eagle-eye-server", "/var/lib/eagle-eye"),
    priority=20,
)

RECIPES = {recipe.name.removeprefix("eagle-eye-"): recipe for recipe in (AGENT, SERVER)}


def version() -> str:
    """Return the project's version."""
    found = re.search(r'^version = "([^"]+)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("pyproject.toml names no version")
    return found[1]


def epoch_s() -> int:
    """Return the time that all files of a package bear, Unix seconds: SOURCE_DATE_EPOCH, else the last commit's.

    Outside a clone, where nobody says it, it is that of pyproject.toml.
    """
    said = os.environ.get("SOURCE_DATE_EPOCH", "")
    if said:
        return int(said)
    command = ["git", "-C", str(REPOSITORY), "log", "-1", "--format=%ct"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return int((REPOSITORY / "pyproject.toml").stat().st_mtime)


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
