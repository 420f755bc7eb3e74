from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle_eye.cli import main as cli
from eagle_eye.schema.configuration import ConfigurationError


def returning(result: int | BaseException) -> SimpleNamespace:
    def run(_args: argparse.Namespace) -> int:
        if isinstance(result, BaseException):
            raise result
        return result

    return SimpleNamespace(configure=lambda _parser: None, run=run)


def call(monkeypatch: pytest.MonkeyPatch, result: int | BaseException) -> int:
    monkeypatch.setattr(cli, "load", lambda _command: returning(result))
    return cli.main(["nodes"])


@pytest.mark.parametrize(
    ("result", "code", "message"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (ConfigurationError("policy.mode: expected observe"), 2, "eagle-eye nodes: policy.mode: expected observe\n"),
        (RuntimeError("two\nlines"), 1, "eagle-eye nodes: two lines\n"),
        (ValueError(), 1, "eagle-eye nodes: ValueError\n"),
        (KeyboardInterrupt(), 130, ""),
        (SystemExit(2), 2, ""),
    ],
)
def test_whatever_a_command_does_becomes_an_exit_code_and_at_most_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    result: int | BaseException,
    code: int,
    message: str,
) -> None:
    assert call(monkeypatch, result) == code
    assert capsys.readouterr().err == message


def test_the_traceback_is_there_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_EYE_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        call(monkeypatch, RuntimeError("x"))


def test_a_missing_dependency_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(_command: cli.Command) -> cli.Subcommand:
        raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")

    monkeypatch.setattr(cli, "load", absent)
    assert cli.main(["server"]) == 1
    assert capsys.readouterr().err == 'eagle-eye server: needs: pip install "eagle-eye[server]" (no module uvicorn)\n'


def test_a_dependency_that_is_missed_while_it_runs_says_so_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, ModuleNotFoundError("No module named 'rich'", name="rich")) == 1
    assert capsys.readouterr().err == 'eagle-eye nodes: needs: pip install "eagle-eye[server]" (no module rich)\n'


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "subscriptions" in capsys.readouterr().err
    assert cli.main(["--help"]) == 0
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("eagle-eye ")
    assert cli.main(["fly"]) == 2
    assert "'fly' is unknown" in capsys.readouterr().err


def test_help_groups_the_commands_by_task_and_says_what_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    groups = ["try it out:", "run:", "look:", "act:", "administer:"]
    assert [line for line in lines if line in groups] == groups
    assert any(line.startswith("first: eagle-eye demo") for line in lines[: lines.index(groups[0])])
    listed = [line.split()[0] for line in lines[lines.index(groups[0]) :] if line.startswith("  ")]
    assert sorted(listed) == sorted(command.name for command in cli.COMMANDS)


@pytest.mark.parametrize("command", [command for command in cli.COMMANDS if command.name != "demo"])
def test_every_command_has_help(command: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        cli.load(command)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed: pip install 'eagle-eye[{command.extra}]'")
    assert cli.main([command.name, "--help"]) == 0
    assert f"eagle-eye {command.name}" in capsys.readouterr().out


def test_finding_a_command_loads_no_heavy_module() -> None:
    look = (
        "import sys; from eagle_eye.cli.main import main; main(['--version']); main(['nodes', '--help']);"
        "print(sorted({'numpy', 'fastapi', 'httpx', 'torch', 'rich', 'uvicorn', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_output_that_nobody_reads_is_no_error_of_ours(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "eagle_eye.cli.main", "server", "--print-config", "--data", str(tmp_path)]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (cli.FAILED, "")


def test_no_commands_help_waits_for_torch_or_scikit_learn() -> None:
    program = (
        "import sys; from eagle_eye.cli import main\n"
        "for command in main.COMMANDS: main.load(command)\n"
        "print(*sorted({'torch', 'sklearn', 'pandas'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
