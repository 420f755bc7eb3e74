from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.slow
no_python = pytest.mark.skipif(not shutil.which("python3", path="/usr/bin"), reason="apt-get install python3")


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The package of each kind that there is a tool for, built as a release is."""
    kinds = [kind for kind, tool in {"deb": "dpkg-deb", "rpm": "rpmbuild"}.items() if shutil.which(tool)]
    if not kinds:
        return {}
    command = [sys.executable, "packaging/host/build.py", "--out", str(tmp_path_factory.mktemp("dist")), "--format"]
    done = subprocess.run([*command, *kinds], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(kinds, map(Path, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def host(packages: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the .deb, unpacked."""
    if "deb" not in packages:
        pytest.skip("dpkg-deb is not installed: apt-get install dpkg-dev")
    root = tmp_path_factory.mktemp("root")
    subprocess.run(["dpkg-deb", "--extract", str(packages["deb"]), str(root)], check=True)
    return root


def command(host: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "/nonexistent", "HOME": str(host)}
    line = [str(host / "usr/bin/eagle-eye"), *words]
    return subprocess.run(line, env=environ, capture_output=True, text=True, check=False)


@no_python
def test_the_unpacked_package_makes_a_frame_with_the_systems_python_alone(host: Path, tmp_path: Path) -> None:
    done = command(host, "agent", "--print", "--once", "--node", "n1", "--hook-socket", str(tmp_path / "hook.sock"))
    assert done.returncode == 0, done.stderr
    frame = json.loads(done.stdout)
    assert frame["node"] == "n1"
    assert frame["rows"]["node"]["-1"]["node_memory_used_ratio"] > 0


def test_it_brings_libraries_for_every_python_that_it_promises(host: Path) -> None:
    folders = (host / "usr/lib/eagle-eye").glob("python3.*")
    brought = {folder.name for folder in folders if (folder / "msgspec").is_dir()}
    assert brought == {f"python3.{minor}" for minor in range(10, 15)}


def test_it_holds_nothing_that_a_gpu_host_does_not_need(host: Path) -> None:
    assert {folder.name for folder in (host / "usr/lib/eagle-eye/eagle-eye/eagle_eye").iterdir()} == {
        "agent",
        "checks",
        "cli",
        "schema",
    }
    assert not any(host.rglob("numpy"))


def test_running_it_writes_nothing_below_usr(host: Path) -> None:
    before = sorted((host / "usr").rglob("*"))
    command(host, "--version")
    assert sorted((host / "usr").rglob("*")) == before


def test_a_command_of_the_server_says_that_it_is_not_part_of_this_installation(host: Path) -> None:
    done = command(host, "backtest", "x")
    assert done.returncode == 1
    assert "is not part of this installation" in done.stderr


@pytest.fixture(scope="module")
def rpm(packages: dict[str, Path]) -> Path:
    if "rpm" not in packages:
        pytest.skip("rpmbuild is not installed: apt-get install rpm")
    return packages["rpm"]


def test_the_rpm_holds_the_same_files(host: Path, rpm: Path) -> None:
    done = subprocess.run(["rpm", "-qlp", "--qf", "", str(rpm)], capture_output=True, text=True, check=True)
    files = {f"/{file.relative_to(host)}" for file in host.rglob("*") if file.is_file()}
    folders = {f"/{folder.relative_to(host)}" for folder in host.rglob("*") if folder.is_dir()}
    assert files <= set(done.stdout.splitlines()) <= files | folders


def test_the_rpm_takes_a_newer_python_beside_an_old_system_python(rpm: Path) -> None:
    done = subprocess.run(["rpm", "-qRp", str(rpm)], capture_output=True, text=True, check=True)
    assert "(python3 >= 3.10 or python3.12 or python3.11 or python3.13)" in done.stdout
