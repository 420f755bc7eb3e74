"""The wheel and the sdist: what is in them, and that they are the same wherever they are built."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from eagle_eye.cli.main import version

pytestmark = pytest.mark.slow  # distributions are built

REPOSITORY = Path(__file__).parents[2]
ROOMS = (
    *("schema", "agent", "server", "detectors", "orchestrators", "cli", "demo", "simulator", "learning", "checks"),
    *("checkpoint", "planning", "client", "traces"),
)
EPOCH = "1700000000"


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this is no clone, and git says what belongs to a release: {done.stderr.strip()}")
    return [name for name in done.stdout.split("\0") if name and (REPOSITORY / name).is_file()]


def for_contributors(name: str) -> bool:
    return name.endswith("/README.md") and "/vendor/" not in name


def build(root: Path, out: Path, umask: int) -> dict[str, Path]:
    done = subprocess.run(
        [sys.executable, "-m", "release.build", "--out", str(out)],
        cwd=root,
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "PYTHONPATH": "packaging"},
        capture_output=True,
        text=True,
        check=False,
        umask=umask,
    )
    assert done.returncode == 0, done.stderr
    return {Path(line).suffix: Path(line) for line in done.stdout.splitlines()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    tracked()
    return build(REPOSITORY, tmp_path_factory.mktemp("dist"), 0o022)


@pytest.fixture(scope="module")
def in_wheel(built: dict[str, Path]) -> set[str]:
    with zipfile.ZipFile(built[".whl"]) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_every_file_of_the_package_and_no_other(in_wheel: set[str]) -> None:
    rooms = tuple(f"{room}/eagle_eye/" for room in ROOMS)
    ours = {name.partition("/")[2] for name in tracked() if name.startswith(rooms) and not for_contributors(name)}
    assert {name for name in in_wheel if ".dist-info/" not in name} == ours
    assert {PurePosixPath(name).parts[0] for name in in_wheel} == {"eagle_eye", f"eagle_eye-{version()}.dist-info"}


def test_the_wheel_brings_what_programs_read_beside_their_code(in_wheel: set[str]) -> None:
    for name in (
        "server/web/page/index.html",
        "server/web/page/app/main.js",
        "server/web/page/vendor/preact/preact.mjs",
        "server/web/page/vendor/uPlot/uPlot.esm.js",
        "server/ingest/remote_write/mapping.toml",
        "agent/nvml/simulated.c",
    ):
        assert f"eagle_eye/{name}" in in_wheel


def test_the_wheel_brings_its_licence_and_those_of_the_code_that_it_holds(in_wheel: set[str]) -> None:
    vendor = "server/eagle_eye/server/web/page/vendor"
    licences = {name.partition("/licenses/")[2] for name in in_wheel if "/licenses/" in name}
    assert licences == {"LICENSE", f"{vendor}/preact/LICENSE", f"{vendor}/uPlot/LICENSE"}


def test_the_sdist_holds_all_that_git_tracks(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert names == {*tracked(), "PKG-INFO"}


def test_the_unpacked_sdist_in_another_folder_under_another_umask_builds_to_the_same_bytes(
    built: dict[str, Path], tmp_path: Path
) -> None:
    with tarfile.open(built[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (sources,) = tmp_path.iterdir()
    (sources / "PKG-INFO").unlink()
    for file in sources.rglob("*"):
        file.chmod(file.stat().st_mode & 0o700)
    subprocess.run(["git", "init", "--quiet"], cwd=sources, check=True)
    subprocess.run(["git", "add", "--all", "--force"], cwd=sources, check=True)
    (sources / "server/eagle_eye/server/untracked.py").touch()
    again = build(sources, tmp_path / "dist", 0o077)
    assert {kind: digest(file) for kind, file in again.items()} == {kind: digest(file) for kind, file in built.items()}


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
