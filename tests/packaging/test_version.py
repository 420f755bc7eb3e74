"""The version stands in pyproject.toml; everything else says the same."""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from eagle_eye.agent.loop import agent_version
from eagle_eye.cli import main as cli
from release import describe, libraries
from release import version as release_version
from release.libraries import ReleaseError
from tests.server.builders import running

REPOSITORY = Path(__file__).parents[2]
VERSION = libraries.project().version


@pytest.fixture(scope="module")
def repeating() -> dict[str, set[str]]:
    """What each file here says that repeats the version."""
    found: dict[str, set[str]] = {}
    try:
        for each in release_version.repetitions():
            found.setdefault(str(each.file.relative_to(REPOSITORY)), set()).add(each.version)
    except ReleaseError as error:
        pytest.skip(f"{error}; git says which files are ours")
    return found


@pytest.fixture
def copy(repeating: dict[str, set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small clone with what a version is written into."""
    for name in {*repeating, "pyproject.toml"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n### Added\n- More.\n", encoding="utf-8")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "--all"], cwd=tmp_path, check=True)
    monkeypatch.setattr(release_version, "ROOT", tmp_path)
    monkeypatch.setattr(libraries, "ROOT", tmp_path)
    monkeypatch.setattr(release_version, "CHANGELOG", tmp_path / "CHANGELOG.md")
    return tmp_path


def test_what_is_installed_here_is_of_this_version() -> None:
    assert metadata.version("eagle-eye") == VERSION, "make venv"


def test_programs_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"eagle-eye {VERSION}\n"
    assert agent_version() == VERSION


def test_the_server_says_it(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        assert server.client.get("/openapi.json").json()["info"]["version"] == VERSION
        assert f'eagle_eye_build_info{{version="{VERSION}"}} 1.0' in server.client.get("/metrics").text


def test_host_packages_have_it() -> None:
    assert describe.host_module("recipes").version() == VERSION


def test_images_charts_and_documents_repeat_it(repeating: dict[str, set[str]]) -> None:
    assert {name: versions for name, versions in repeating.items() if versions != {VERSION}} == {}
    some = {"docker-compose.yml", "docs/get-started/containers.md", "packaging/kubernetes/orchestrator.yaml"}
    assert some <= repeating.keys()


def test_one_command_writes_another_everywhere(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release_version.main(["7.8.9rc1"]) == 0
    assert capsys.readouterr().out == "7.8.9rc1\n"
    assert {each.version for each in release_version.repetitions()} == {"7.8.9rc1"}
    assert 'version = "7.8.9rc1"' in (copy / "pyproject.toml").read_text(encoding="utf-8")
    changes = (copy / "CHANGELOG.md").read_text(encoding="utf-8")
    assert changes.startswith("# Changelog\n\n## Unreleased\n\n## 7.8.9rc1 - 20")
    assert changes.endswith("\n\n### Added\n- More.\n")


def test_what_was_forgotten_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compose = copy / "docker-compose.yml"
    text = compose.read_text(encoding="utf-8").replace(f":{VERSION}", ":9.9.9")
    compose.write_text(text, encoding="utf-8")
    assert release_version.main([]) == 1
    line = 1 + text.partition("9.9.9")[0].count("\n")
    assert f"docker-compose.yml:{line} says 9.9.9\n" in capsys.readouterr().err


@pytest.mark.parametrize("new", ["1.2", "v1.2.3", "next"])
def test_what_is_no_version_changes_nothing(copy: Path, new: str) -> None:
    with pytest.raises(ReleaseError, match="is no version; expected one such as"):
        release_version.write(new)
    assert {each.version for each in release_version.repetitions()} == {VERSION}
