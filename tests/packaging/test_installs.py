"""The wheel in empty environments, each extra by itself: it installs, imports and says what else a command needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.utils import canonicalize_name

from eagle_eye.cli.main import COMMANDS, Command, version
from release import build, libraries

REPOSITORY = Path(__file__).parents[2]
GATE = "EAGLE_EYE_TEST_PACKAGES"
RUNTIME = (
    "agent",
    "checkpoint",
    "checkpoint-store",
    "client",
    "ml",
    "nvrx",
    "orchestrators",
    "postgresql",
    "reports",
    "server",
)
# Which extras a module needs: the first line that it begins with. What imports torch runs beside the training job.
NEEDS = (
    ("agent.nvrx_health", {"agent", "nvrx"}),
    ("agent", {"agent"}),
    ("checkpoint", {"checkpoint"}),
    ("checkpoint.command", set[str]()),
    ("checks", {"agent"}),
    ("cli", set[str]()),
    ("cli.backtest", {"server"}),
    ("cli.completion", {"server"}),
    ("client", set[str]()),
    ("client.frames", {"client"}),
    ("cli.replaying", {"server"}),
    ("cli.html_reports", {"server", "reports"}),
    ("demo.pipeline_train", {"ml", "checkpoint"}),
    ("demo.train", {"ml", "checkpoint"}),
    ("demo", {"agent", "server", "orchestrators", "checkpoint"}),
    ("detectors", {"server"}),
    ("learning.command", set[str]()),
    ("learning.features", {"server", "ml"}),
    ("learning.model", {"server", "ml"}),
    ("learning.training", {"server", "ml"}),
    ("learning", {"ml"}),
    ("orchestrators.launch.elastic", {"orchestrators", "ml"}),
    ("orchestrators.launch.store", {"orchestrators", "ml"}),
    ("orchestrators", {"orchestrators"}),
    ("planning", set[str]()),
    ("schema", set[str]()),
    ("server", {"server"}),
    ("simulator", {"server"}),
    ("traces", set[str]()),
    ("traces.trace_frames", {"client"}),
    ("traces.trace_plot", {"client", "reports"}),
    ("traces.verdict_frames", {"client", "server"}),
)
# What asks a server or a host's own files, and needs nothing beside the base to do so.
LIGHT = {
    *("nodes", "jobs", "incidents", "actions", "audit", "goodput", "ledger", "tickets", "policy", "deliveries"),
    *("subscriptions", "check", "checkpoint", "plan", "accounts", "silences", "cells", "sessions"),
}
NOWHERE = "http://127.0.0.1:9"
# These find out what they lack when they run.
RUNNING = {
    "record": ("out", "--job", "j", "--since", "1", "--until", "2"),
    "import": ("out", "--prometheus", NOWHERE, "--job", "j", "--since", "1", "--until", "2"),
    "replay": ("trace", "--server", NOWHERE),
    "train": ("trace", "--out", "model"),
    "orchestrate": ("slurm", "--help"),
}
IMPORT = """
import importlib, json, os, sys
wrong = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception as error:
        wrong[name] = f"{type(error).__name__}: {error}"
sys.stdout = sys.__stdout__
print(json.dumps(wrong))
"""

INSTALLED = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"


class Site(NamedTuple):
    """One environment with the wheel and some extras."""

    home: Path
    extras: frozenset[str]

    def run(self, program: str, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, far from this repository and its variables."""
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "LC_ALL": "C.UTF-8"}
        line = [str(self.home / "bin" / program), *words]
        return subprocess.run(
            line, cwd=self.home, env=environ, input=given, capture_output=True, text=True, check=False, timeout=120
        )

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``eagle-eye``."""
        return self.run("eagle-eye", *words)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist and the wheel by their suffix."""
    if GATE not in os.environ:
        pytest.skip(f"installing takes minutes: make test-full does it, or {GATE}=1 make test")
    return {file.suffix: file for file in build.build(tmp_path_factory.mktemp("dist"))}


def installed(home: Path, what: str, python: str = sys.executable) -> Site:
    """Return a new environment with this, in locked versions and with pip's own opinion of it."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(home)], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home / "bin/python")]
    lock = ("--constraint", str(REPOSITORY / "requirements.lock"))
    done = subprocess.run([*pip, "install", "--quiet", *lock, what], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    checked = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    return Site(home, frozenset(filter(None, what.partition("[")[2].rstrip("]").split(","))))


@pytest.fixture(scope="module", params=["", *RUNTIME, ",".join(RUNTIME)], ids=lambda extras: extras or "none")
def site(
    request: pytest.FixtureRequest, built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """The wheel with no extra, with each by itself, and with all of them."""
    home = tmp_path_factory.mktemp("site")
    extras = f"[{request.param}]" if request.param else ""
    yield installed(home, f"{built['.whl']}{extras}")
    shutil.rmtree(home)


def modules() -> list[str]:
    """Return all our modules but what Python itself imports at its start, and Alembic while it migrates."""
    rooms = [folder for folder in REPOSITORY.iterdir() if (folder / "eagle_eye").is_dir()]
    files = [(file, room) for room in rooms for file in (room / "eagle_eye").rglob("*.py")]
    return [
        ".".join(file.relative_to(room).with_suffix("").parts)
        for file, room in files
        if file.stem != "sitecustomize" and file.parts[-2:] != ("migrations", "env.py")
    ]


def needs(module: str) -> set[str]:
    """Return the extras without which a module cannot be imported."""
    short = module.removeprefix("eagle_eye.")
    fitting = [(prefix, extras) for prefix, extras in NEEDS if short == prefix or short.startswith(f"{prefix}.")]
    return max(fitting, key=lambda each: len(each[0]))[1]


def wanted(command: Command) -> set[str]:
    return set(command.extra.split(","))


def imports(site: Site) -> dict[str, str]:
    """Return what went wrong with each module that the site's extras should suffice for."""
    names = sorted(name for name in modules() if needs(name) <= site.extras)
    done = site.run("python", "-W", "ignore", "-c", IMPORT, given=json.dumps(names))
    assert done.returncode == 0, done.stderr
    wrong: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return wrong


def test_each_extra_is_tried() -> None:
    assert set(RUNTIME) == set(libraries.extras())


def test_every_module_has_extras_that_suffice() -> None:
    assert {name for name in modules() if not needs(name) <= set(RUNTIME)} == set()


def test_every_module_that_belongs_to_the_extras_is_imported(site: Site) -> None:
    assert imports(site) == {}


def test_what_is_installed_is_what_a_bill_of_materials_lists(site: Site) -> None:
    done = site.run("python", "-c", INSTALLED)
    numbers: dict[str, str] = json.loads(done.stdout)
    found: dict[str, str] = {canonicalize_name(name): number.partition("+")[0] for name, number in numbers.items()}
    assert found.pop("eagle-eye") == version()
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert found == {library.name: library.version for library in libraries.brought_by(site.extras, [python])}


def test_the_command_says_its_version_and_what_it_can_do(site: Site) -> None:
    assert site.command("--version").stdout == f"eagle-eye {version()}\n"
    overview = site.command("--help")
    assert overview.returncode == 0
    assert [command.name for command in COMMANDS if command.name not in overview.stdout] == []


def test_a_command_has_help_or_says_in_one_line_which_extra_it_needs(site: Site) -> None:
    for command in COMMANDS:
        enough = wanted(command) <= site.extras or command.name in LIGHT
        done = site.command(command.name, *(("--help",) if enough else RUNNING.get(command.name, ("--help",))))
        if enough:
            assert (done.returncode, done.stderr) == (0, ""), command.name
        elif site.extras and done.returncode == 0:
            continue  # another extra has brought what its help asks for
        else:
            assert done.returncode == 1, command.name
            assert done.stderr.startswith(
                f'eagle-eye {command.name}: needs: pip install "eagle-eye[{command.extra}]" (no'
            )
            assert done.stderr.count("\n") == 1


def test_the_sdist_installs_too(built: dict[str, Path], tmp_path: Path) -> None:
    site = installed(tmp_path / "site", f"{built['.gz']}[agent]")
    assert imports(site) == {}
    assert site.command("--version").stdout == f"eagle-eye {version()}\n"


def test_what_developers_install_is_of_one_mind(built: dict[str, Path], tmp_path: Path) -> None:
    assert installed(tmp_path / "site", f"{built['.whl']}[dev]").command("--version").returncode == 0


def test_the_agent_runs_on_the_oldest_python(built: dict[str, Path], tmp_path: Path) -> None:
    python = shutil.which(f"python{libraries.OLDEST}")
    if python is None or subprocess.run([python, "--version"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"python{libraries.OLDEST} is not installed: pyenv install {libraries.OLDEST}, and put it on PATH")
    site = installed(tmp_path / "site", f"{built['.whl']}[agent]", python)
    assert imports(site) == {}
    assert site.command("agent", "--help").returncode == 0
