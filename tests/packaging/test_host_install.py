"""The packages as a host gets them: built, then installed, upgraded, taken back and purged in an empty Debian."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.host_build import RELEASE_S, REPOSITORY

TOOLS = ("debootstrap", "dpkg-deb", "rpmbuild", "lintian")
MIRROR = os.environ.get("EAGLE_EYE_TEST_DEBIAN_MIRROR", "")  # "": debootstrap's own
PYTHONS = {"bookworm": "3.11", "trixie": "3.13"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("EAGLE_EYE_TEST_PACKAGES") != "1" or os.geteuid() != 0 or not all(map(shutil.which, TOOLS)),
        reason="EAGLE_EYE_TEST_PACKAGES=1, as root, with debootstrap, dpkg-dev, rpm and lintian (make test-full)",
    ),
]


def run(*command: object, **more: object) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        **more,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return str(done.stdout)


def build(out: Path, *options: str) -> Path:
    """Have build.py make packages; return their folder."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(RELEASE_S)}
    run(sys.executable, "packaging/host/build.py", "--out", out, *options, cwd=REPOSITORY, env=environment)
    return out


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that build.py makes of the agent."""
    return build(tmp_path_factory.mktemp("agents"), "--package", "agent")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's .deb and .rpm for each Debian."""
    return build(tmp_path_factory.mktemp("servers"), "--package", "server", "--python", *PYTHONS.values())


@pytest.fixture(scope="module", params=list(PYTHONS))
def debian(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """An empty Debian with its Python, no service manager running, and that Python's version."""
    root = tmp_path_factory.mktemp("root") / request.param
    run("debootstrap", "--variant=minbase", "--include=python3,adduser", request.param, root, *filter(None, [MIRROR]))
    run("mount", "-t", "proc", "proc", root / "proc")
    try:
        yield root, PYTHONS[request.param]
    finally:
        run("umount", root / "proc")


def inside(root: Path, *command: str) -> str:
    return run("chroot", root, *command, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"})


def install(root: Path, package: Path) -> None:
    shutil.copy(package, root / "package.deb")
    inside(root, "dpkg", "--force-confold", "-i", "/package.deb")


def later(package: Path, folder: Path) -> Path:
    """The package as a later version with another default configuration."""
    tree = folder / "later"
    run("dpkg-deb", "-R", package, tree)
    control = tree / "DEBIAN/control"
    control.write_text(control.read_text().replace("Version: ", "Version: 99."))
    with next((tree / "etc/eagle-eye").iterdir()).open("a") as configuration:
        configuration.write("# a new default\n")
    run("dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, folder / "later.deb")
    return folder / "later.deb"


def test_an_agent_comes_works_is_upgraded_goes_back_and_leaves_nothing(
    agents: Path, debian: tuple[Path, str], tmp_path: Path
) -> None:
    root, _python = debian
    (package,) = agents.glob("*.deb")
    install(root, package)
    enabled = root / "etc/systemd/system/multi-user.target.wants/eagle-eye-agent.service"
    assert enabled.is_symlink()
    frame = json.loads(inside(root, "eagle-eye", "agent", "--print", "--once", "--node", "n1"))
    assert frame["rows"]["node"]["-1"]["node_memory_used_ratio"] > 0
    assert inside(root, "dpkg", "--verify", "eagle-eye-agent") == ""
    configuration = root / "etc/eagle-eye/agent.toml"
    configuration.write_text('server = "http://server:8470"\n')
    for version in (later(package, tmp_path), package):
        install(root, version)
        assert configuration.read_text() == 'server = "http://server:8470"\n'
        assert inside(root, "eagle-eye", "--version").startswith("eagle-eye ")
    inside(root, "dpkg", "--remove", "eagle-eye-agent")
    assert not (root / "usr/lib/eagle-eye-agent").exists()
    assert configuration.exists()
    inside(root, "dpkg", "--purge", "eagle-eye-agent")
    left = run("find", root, "-xdev", "-name", "*eagle*", "-not", "-path", "*/var/log/*").split()
    assert left == []


def test_a_server_comes_with_its_user_makes_tokens_as_it_and_purging_takes_its_records(
    servers: Path, debian: tuple[Path, str]
) -> None:
    root, python = debian
    (package,) = servers.glob(f"*+python{python}_*.deb")
    install(root, package)
    file = "/etc/eagle-eye/server.toml"
    assert inside(root, "stat", "-c", "%U:%G %a", file) == "root:eagle-eye 640\n"
    assert inside(root, "dpkg", "--verify", "eagle-eye-server") == ""
    user = ("runuser", "-u", "eagle-eye", "--", "eagle-eye")
    assert 'data_dir = "/var/lib/eagle-eye-server"' in inside(root, *user, "server", "--config", file, "--print-config")
    assert inside(root, *user, "tokens", "create", "--scope", "admin", "--config", file)
    assert inside(root, "stat", "-c", "%U", "/var/lib/eagle-eye-server/records.db") == "eagle-eye\n"
    inside(root, *user, "simulate", "/tmp/trace", "--fault", "none", "--nodes", "2", "--minutes", "3")
    inside(root, *user, "backtest", "/tmp/trace")
    enabled = root / "etc/systemd/system/multi-user.target.wants/eagle-eye-orchestrate@slurm.service"
    enabled.symlink_to("/usr/lib/systemd/system/eagle-eye-orchestrate@.service")
    inside(root, "dpkg", "--remove", "eagle-eye-server")
    assert (root / "var/lib/eagle-eye-server/records.db").exists()
    inside(root, "dpkg", "--purge", "eagle-eye-server")
    assert not enabled.is_symlink()
    assert not (root / "var/lib/eagle-eye-server").exists()


def test_with_both_the_command_is_the_servers_and_each_can_go_first(
    agents: Path, servers: Path, debian: tuple[Path, str]
) -> None:
    root, python = debian
    for package in (*agents.glob("*.deb"), *servers.glob(f"*+python{python}_*.deb")):
        install(root, package)
    assert inside(root, "readlink", "-f", "/usr/bin/eagle-eye") == "/usr/lib/eagle-eye-server/eagle-eye\n"
    inside(root, "dpkg", "--purge", "eagle-eye-server")
    assert inside(root, "readlink", "-f", "/usr/bin/eagle-eye") == "/usr/lib/eagle-eye-agent/eagle-eye\n"
    inside(root, "dpkg", "--purge", "eagle-eye-agent")
    assert not (root / "usr/bin/eagle-eye").exists()


def test_an_agents_rpm_comes_works_and_leaves(agents: Path, debian: tuple[Path, str]) -> None:
    root, _python = debian
    (package,) = agents.glob("*.rpm")
    # Debian's own packages are none to rpm: what they would satisfy is not asked.
    rpm = ("rpm", "--root", root, "--nodeps")
    run(*rpm, "--install", package)
    assert inside(root, "eagle-eye", "--version").startswith("eagle-eye ")
    assert list((root / "usr/lib/eagle-eye-agent").rglob("*.pyc"))
    (root / "etc/eagle-eye/agent.toml").write_text('server = "http://server:8470"\n')
    run(*rpm, "--upgrade", "--replacepkgs", package)
    assert (root / "etc/eagle-eye/agent.toml").read_text() == 'server = "http://server:8470"\n'
    assert list((root / "usr/lib/eagle-eye-agent").rglob("*.pyc"))
    run(*rpm, "--erase", "eagle-eye-agent")
    assert not (root / "usr/lib/eagle-eye-agent").exists()
    assert not (root / "usr/bin/eagle-eye").exists()
    shutil.rmtree(root / "etc/eagle-eye", ignore_errors=True)  # rpm keeps a changed configuration as .rpmsave
    shutil.rmtree(root / "var/lib/eagle-eye-agent", ignore_errors=True)


def test_a_servers_rpm_comes_with_its_user_makes_tokens_as_it_and_leaves_its_records(
    servers: Path, debian: tuple[Path, str]
) -> None:
    root, python = debian
    (package,) = servers.glob(f"*.python{python}.*.rpm")
    rpm = ("rpm", "--root", root, "--nodeps")
    run(*rpm, "--install", package)
    assert run(*rpm, "--verify", "eagle-eye-server") == ""
    file, state = "/etc/eagle-eye/server.toml", "/var/lib/eagle-eye-server"
    assert inside(root, "stat", "-c", "%U:%G %a", file, state) == "root:eagle-eye 640\neagle-eye:eagle-eye 700\n"
    user = ("runuser", "-u", "eagle-eye", "--", "eagle-eye")
    assert inside(root, *user, "tokens", "create", "--scope", "admin", "--config", file)
    assert inside(root, *user, "orchestrate", "slurm", "--help")
    run(*rpm, "--erase", "eagle-eye-server")
    assert not (root / "usr/lib/eagle-eye-server").exists()
    assert not (root / "usr/bin/eagle-eye").exists()
    assert (root / "var/lib/eagle-eye-server/records.db").exists()
    shutil.rmtree(root / "var/lib/eagle-eye-server")  # rpm has no purging


def test_lintian_finds_neither_errors_nor_warnings(agents: Path, servers: Path) -> None:
    packages = [*agents.glob("*.deb"), *servers.glob("*.deb")]
    said = run("lintian", "--fail-on", "error,warning", "--display-info", "--tag-display-limit", "0", *packages)
    assert [line for line in said.splitlines() if "unused-override" in line] == []
