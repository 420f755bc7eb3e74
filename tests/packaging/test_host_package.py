from __future__ import annotations

import functools
import gzip
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.host_build import FOLDER, RELEASE_S, REPOSITORY, module

recipes, tree_module, build, manual = map(module, ("recipes", "tree", "build", "manual"))

no_dpkg = pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="apt-get install dpkg-dev")
no_rpm = pytest.mark.skipif(not shutil.which("rpmbuild"), reason="apt-get install rpm")


@pytest.fixture(autouse=True, scope="module")
def release() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", str(RELEASE_S))
        yield


@pytest.fixture(scope="module")
def make(release: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a package, once, of the agent's or the server's files without their libraries, which the network has."""
    folder = tmp_path_factory.mktemp("packages")

    @functools.cache
    def made(kind: str, recipe: Any, *, again: bool = False) -> Path:
        scratch = folder / f"{recipe.name}-{kind}-{again}"
        tree = scratch / "tree"
        home = tree / recipe.home
        for name in tree_module.PROGRAMS:
            tree_module._copy(FOLDER / name, home / name)
        (home / "python3.11/bin").mkdir(parents=True)
        (home / "python3.11/bin/python3").symlink_to("/usr/bin/python3.11")
        tree_module._copy(FOLDER / recipe.configuration, tree / "etc/eagle-eye" / recipe.configuration)
        for unit in recipe.units:
            tree_module._write(tree / tree_module.UNITS / unit, b"")
        tree_module._document(tree, recipe)
        tree_module._settle(tree, recipe)
        python = "3.11" if recipe.each_python else ""
        out = folder / f"out-{again}"
        out.mkdir(exist_ok=True)
        package: Path = getattr(build, kind)(tree, recipe, python, recipes.ARCHITECTURES["amd64"], out, scratch)
        return package

    return made


def said(*command: str | Path) -> str:
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True).stdout


@no_dpkg
def test_the_agents_deb_says_what_it_needs_and_which_file_is_the_administrators(make: Callable[..., Path]) -> None:
    package = make("deb", recipes.AGENT)
    assert said("dpkg-deb", "--field", package, "Depends") == "python3 (>= 3.10), libc6 (>= 2.28)\n"
    assert said("dpkg-deb", "--info", package, "conffiles") == "/etc/eagle-eye/agent.toml\n"


@no_dpkg
def test_the_servers_deb_is_of_one_python_and_an_upgrade_of_the_distribution_upgrades_it(
    make: Callable[..., Path],
) -> None:
    package = make("deb", recipes.SERVER)
    assert said("dpkg-deb", "--field", package, "Depends") == "python3.11, libc6 (>= 2.28), adduser\n"
    version = said("dpkg-deb", "--field", package, "Version").strip()
    assert version == f"{recipes.version()}+python3.11"
    subprocess.run(
        ["dpkg", "--compare-versions", version, "lt", version.replace("3.11", "3.13")], check=True, timeout=10
    )


@no_dpkg
def test_files_are_roots_and_only_the_servers_configuration_is_closed(make: Callable[..., Path]) -> None:
    lines = said("dpkg-deb", "--contents", make("deb", recipes.SERVER)).splitlines()
    listed = {line.split()[5]: line.split()[:2] for line in lines}
    assert {owner for _mode, owner in listed.values()} == {"root/root"}
    assert listed["./etc/eagle-eye/server.toml"][0] == "-rw-r-----"
    assert listed["./usr/lib/eagle-eye-server/eagle-eye"][0] == "-rwxr-xr-x"
    plain = [mode for name, (mode, _owner) in listed.items() if mode[0] == "-" and "/eagle-eye-server/" not in name]
    assert set(plain) == {"-rw-r--r--", "-rw-r-----"}


@no_dpkg
@pytest.mark.parametrize("recipe", [recipes.AGENT, recipes.SERVER], ids=["agent", "server"])
def test_each_file_but_the_configuration_has_a_sum_that_dpkg_verifies(
    make: Callable[..., Path], recipe: Any, tmp_path: Path
) -> None:
    package = make("deb", recipe)
    subprocess.run(["dpkg-deb", "--raw-extract", package, tmp_path], check=True)
    subprocess.run(["md5sum", "--check", "--quiet", "DEBIAN/md5sums"], cwd=tmp_path, check=True)
    summed = {line.partition("  ")[2] for line in (tmp_path / "DEBIAN/md5sums").read_text().splitlines()}
    there = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()}
    assert summed == {str(path) for path in there if path.parts[0] not in ("DEBIAN", "etc")}


@no_dpkg
@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm"])
@pytest.mark.parametrize("recipe", [recipes.AGENT, recipes.SERVER], ids=["agent", "server"])
def test_a_maintainer_script_is_shell_and_names_its_own_package(
    make: Callable[..., Path], recipe: Any, name: str
) -> None:
    script = said("dpkg-deb", "--info", make("deb", recipe), name)
    subprocess.run(["sh", "-n"], input=script, text=True, check=True, timeout=10)
    assert f"name={recipe.name}\n" in script
    assert build.USER_MARK not in script


@no_rpm
def test_the_rpm_keeps_the_administrators_file_and_takes_a_newer_python_beside_an_old_one(
    make: Callable[..., Path],
) -> None:
    package = make("rpm", recipes.AGENT)
    assert said("rpm", "-qp", "--configfiles", package) == "/etc/eagle-eye/agent.toml\n"
    flags = said("rpm", "-qp", "--qf", "[%{FILEFLAGS:fflags} %{FILENAMES}\n]", package)
    assert "cn /etc/eagle-eye/agent.toml\n" in flags  # configuration, noreplace
    assert "(python3 >= 3.10 or python3.14 or python3.13 or python3.12 or" in said("rpm", "-qp", "--requires", package)


@no_rpm
def test_the_servers_rpm_gives_its_folders_and_configuration_to_its_user(make: Callable[..., Path]) -> None:
    owners = said(
        *("rpm", "-qp", "--qf", "[%{FILEUSERNAME}:%{FILEGROUPNAME} %{FILEMODES:octal} %{FILENAMES}\n]"),
        make("rpm", recipes.SERVER),
    )
    assert "eagle-eye:eagle-eye 40700 /var/lib/eagle-eye-server\n" in owners
    assert "root:eagle-eye 100640 /etc/eagle-eye/server.toml\n" in owners


@pytest.mark.parametrize(
    "kind", [pytest.param("deb", marks=no_dpkg), pytest.param("rpm", marks=no_rpm)], ids=["deb", "rpm"]
)
def test_built_twice_it_is_the_same_to_the_byte(make: Callable[..., Path], kind: str) -> None:
    assert make(kind, recipes.SERVER).read_bytes() == make(kind, recipes.SERVER, again=True).read_bytes()


def wheel(folder: Path, name: str, *members: str) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for member in members:
            archive.writestr(member, "x")
    return path


def test_of_a_wheel_come_what_programs_read_and_neither_tests_nor_scripts(tmp_path: Path) -> None:
    path = wheel(
        tmp_path,
        "some-1.0-py3-none-any.whl",
        *("some/__init__.py", "some/tests/test_it.py", "some-1.0.data/scripts/some", "some-1.0.data/purelib/more.py"),
    )
    tree_module.unpack(path, tmp_path / "out")
    found = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert found == {"some/__init__.py", "more.py"}


def test_a_wheel_that_would_write_elsewhere_is_refused(tmp_path: Path) -> None:
    path = wheel(tmp_path, "some-1.0-py3-none-any.whl", "../evil.py")
    with pytest.raises(tree_module.LibraryError, match=r"wants to write \.\./evil\.py"):
        tree_module.unpack(path, tmp_path / "out")


def test_what_is_asked_of_pip_follows_the_python_of_the_package_not_the_builders() -> None:
    assert "tomli>=2" in tree_module._requirements(recipes.AGENT, "3.10")
    assert not any(name.startswith("tomli") for name in tree_module._requirements(recipes.AGENT, "3.11"))


def test_a_library_that_names_no_licence_stops_the_build(tmp_path: Path) -> None:
    metadata = tmp_path / "usr/lib/x/lib/some-1.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Name: some\nVersion: 1.0\n")
    with pytest.raises(ValueError, match=r"some 1\.0 names no licence"):
        tree_module._copyright(tmp_path / "usr/lib/x")


def test_each_unit_of_the_repository_is_in_one_package() -> None:
    packed = [unit for recipe in recipes.RECIPES.values() for unit in recipe.units]
    assert sorted(packed) == sorted(path.name for path in (REPOSITORY / "packaging/systemd").iterdir())


def test_documents_come_along_but_for_those_of_contributors(tmp_path: Path) -> None:
    tree_module._document(tmp_path, recipes.AGENT)
    documents = tmp_path / "usr/share/doc/eagle-eye-agent/docs"
    assert (documents / "reference/agent.md").is_file()
    assert not (documents / "decisions").exists()


def test_the_manual_page_tells_of_the_commands_that_the_package_can_carry_out() -> None:
    agents = manual.manual("eagle-eye-agent", recipes.AGENT.portions, "1.0")
    servers = manual.manual("eagle-eye-server", recipes.SERVER.portions, "1.0")
    for name in ("doctor", "checkpoint"):
        assert f'.SS "eagle\\-eye {name}"' in agents
    assert '.SS "eagle\\-eye server"' not in agents
    for name in ("server", "orchestrate", "tokens", "nodes", "backup", "agent", "check"):
        assert f'.SS "eagle\\-eye {name}"' in servers
    assert "\\-\\-print\\-config" in servers


def test_the_manual_page_is_of_this_tree_whichever_is_installed(tmp_path: Path) -> None:
    other = tmp_path / "eagle_eye/cli/main.py"
    other.parent.mkdir(parents=True)
    other.write_text("raise SystemExit('the other one')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import manual; print(manual.main.__file__, manual.guide.__file__)"],
        cwd=FOLDER,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    ours = REPOSITORY / "cli/eagle_eye/cli"
    assert done.stdout.split() == [str(ours / "main.py"), str(ours / "guide.py")]


def git(repository: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(repository), *words], check=True, capture_output=True)


def test_of_a_clone_come_the_files_that_git_tracks_as_they_are_now(tmp_path: Path) -> None:
    for name in ("room/kept.py", "room/gone.py", "room/scratch.py", "room/__pycache__/kept.pyc"):
        tree_module._write(tmp_path / name, b"committed")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "room/kept.py", "room/gone.py")
    (tmp_path / "room/gone.py").unlink()
    assert recipes.files("room", tmp_path) == [tmp_path / "room/kept.py"]


def test_of_an_unpacked_sdist_come_all_files_but_caches(tmp_path: Path) -> None:
    for name in ("room/kept.py", "room/__pycache__/kept.pyc"):
        tree_module._write(tmp_path / name, b"")
    assert recipes.files("room", tmp_path) == [tmp_path / "room/kept.py"]


def test_a_room_that_is_not_there_stops_the_build(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no files: is this the whole repository"):
        recipes.files("room", tmp_path)


@pytest.mark.skipif(not shutil.which("groff"), reason="apt-get install groff-base")
def test_the_manual_page_is_roff_without_mistakes(tmp_path: Path) -> None:
    page = tmp_path / "page.1.gz"
    page.write_bytes(gzip.compress(manual.manual("eagle-eye-server", recipes.SERVER.portions, "1.0").encode()))
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z"],
        input=gzip.decompress(page.read_bytes()),
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
