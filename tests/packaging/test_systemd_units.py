from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from eagle_eye.agent.config import read, server_urls
from eagle_eye.cli import main
from eagle_eye.orchestrators.orchestrate.settings import KINDS
from eagle_eye.server import config as server_configuration

REPOSITORY = Path(__file__).parents[2]
SYSTEMD = REPOSITORY / "packaging/systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
SLICES = sorted(SYSTEMD.glob("*.slice"))
each_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
no_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="apt-get install systemd")


def options(unit: Path, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", unit.read_text(), re.MULTILINE)


@pytest.fixture
def startable(tmp_path: Path) -> list[Path]:
    """The units as they would be installed, starting a program that is here; the template as one of its kind."""
    copies = []
    for unit in UNITS:
        copy = tmp_path / unit.name.replace("@.", "@command.")
        copy.write_text(unit.read_text().replace("/usr/bin/eagle-eye", "/bin/true"))
        copies.append(copy)
    return copies


@no_systemd
def test_systemd_finds_nothing_wrong_with_the_units(startable: list[Path]) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, (*startable, *SLICES))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@no_systemd
def test_what_a_service_could_do_beyond_its_work_is_little(startable: list[Path]) -> None:
    said = {}
    for unit in startable:
        command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
        if found is None:
            pytest.skip("systemd-analyze judges no files before systemd 250")
        said[unit.stem] = float(found[1])
    # systemd's scale: 0 nothing, 10 everything. The agent is root with three capabilities.
    assert said["eagle-eye-agent"] < 4.5
    assert said["eagle-eye-server"] < 2.0
    assert said["eagle-eye-orchestrate@command"] < 2.5
    # It is a user's own program, which writes where he may.
    assert said["eagle-eye-checkpoint-store@command"] < 2.5


@each_unit
def test_the_command_of_a_unit_is_one_that_the_program_takes(unit: Path) -> None:
    (start,) = options(unit, "ExecStart")
    program, name, *rest = shlex.split(start.replace("%i", "command"))
    assert program == "/usr/bin/eagle-eye"
    command = next(known for known in main.COMMANDS if known.name == name)
    main.parser_of(command, main.load(command)).parse_args(rest)


@each_unit
def test_a_configuration_that_is_wrong_is_not_tried_again_but_an_agents(unit: Path) -> None:
    assert options(unit, "RestartPreventExitStatus") == ([] if unit.stem == "eagle-eye-agent" else ["2"])


def test_a_unit_of_the_template_is_named_by_its_kind() -> None:
    template = REPOSITORY / "packaging/systemd/eagle-eye-orchestrate@.service"
    assert options(template, "ExecStart") == [
        "/usr/bin/eagle-eye orchestrate %i --config /etc/eagle-eye/orchestrate-%i.toml"
    ]
    page = (REPOSITORY / "docs/get-started/install-hosts.md").read_text()
    assert [kind.name for kind in KINDS if f"`{kind.name}`" not in page] == []


def test_what_stores_take_is_limited_where_it_stays_charged_once_they_have_ended() -> None:
    (name,) = options(SYSTEMD / "eagle-eye-checkpoint-store@.service", "Slice")
    assert [file.name for file in SLICES] == [name]
    assert options(SYSTEMD / name, "MemoryMax") == ["50%"]
    assert options(SYSTEMD / "eagle-eye-checkpoint-store@.service", "MemoryMax") == []


def test_a_store_runs_as_the_user_whose_ranks_map_its_files_and_ends_without_jobs() -> None:
    store = SYSTEMD / "eagle-eye-checkpoint-store@.service"
    assert options(store, "User") == ["%i"]
    assert options(store, "ExecStart") == ["/usr/bin/eagle-eye checkpoint store --exit-when-idle 600"]
    assert options(store, "Type") == ["notify"]  # a prolog that has started it may start ranks


def test_the_agent_may_ask_for_the_clocks_offset_as_old_and_new_c_libraries_do() -> None:
    allowed = " ".join(options(REPOSITORY / "packaging/systemd/eagle-eye-agent.service", "SystemCallFilter")).split()
    assert {"adjtimex", "clock_adjtime", "ptrace"} <= set(allowed)


def uncommented(name: str, folder: Path) -> Path:
    """The package's configuration with all that it suggests."""
    text = (REPOSITORY / "packaging/host" / name).read_text()
    path = folder / name
    path.write_text(re.sub(r"^# (?=\[?[a-z_.]+\]?( =.*)?$)", "", text, flags=re.MULTILINE))
    return path


def test_the_packages_configuration_of_the_agent_holds_and_so_does_what_it_suggests(tmp_path: Path) -> None:
    assert server_urls(read(REPOSITORY / "packaging/host/agent.toml", {}, {})) == ["http://127.0.0.1:8470"]
    suggested = read(uncommented("agent.toml", tmp_path), {}, {})
    assert suggested.join_token_file == "/etc/eagle-eye/join-token"
    assert suggested.node_check_command == ["eagle-eye", "check", "--gpus", "8"]


def test_the_packages_configuration_of_the_server_holds_and_so_does_what_it_suggests(tmp_path: Path) -> None:
    plain = server_configuration.load(REPOSITORY / "packaging/host/server.toml", {}, {})
    assert (plain.listen, plain.data_dir) == ("127.0.0.1:8470", "/var/lib/eagle-eye-server")
    suggested = server_configuration.load(uncommented("server.toml", tmp_path), {}, {})
    assert (suggested.listen, suggested.policy.mode) == ("0.0.0.0:8470", "observe")
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(REPOSITORY / "packaging/systemd/eagle-eye-server.service")
    assert f"/var/lib/{unit['Service']['StateDirectory']}" == plain.data_dir


def when_it_ends(tmp_path: Path, result: str) -> str:
    """Run what systemd runs when the server has ended; return what it prints."""
    (command,) = options(REPOSITORY / "packaging/systemd/eagle-eye-server.service", "ExecStopPost")
    words = shlex.split(command.replace("/etc/eagle-eye", str(tmp_path)))
    reported = {"SERVICE_RESULT": result, "EXIT_CODE": "killed", "EXIT_STATUS": "KILL", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, env=reported, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_a_server_that_was_told_to_end_says_nothing(tmp_path: Path) -> None:
    assert when_it_ends(tmp_path, "success") == ""


def test_a_server_that_died_is_critical_in_the_journal_and_a_program_of_the_sites_hears_why(tmp_path: Path) -> None:
    said = "<2>Eagle Eye is down (signal, killed KILL): no fault is found and nobody is told until it runs again\n"
    assert when_it_ends(tmp_path, "signal") == said
    program = tmp_path / "server-failed"
    program.write_text('#!/bin/sh\necho "told: $*"\n')
    assert when_it_ends(tmp_path, "signal") == said  # it is not to be run
    program.chmod(0o755)
    assert when_it_ends(tmp_path, "signal") == said + "told: signal killed KILL\n"
