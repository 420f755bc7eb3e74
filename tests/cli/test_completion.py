"""What a shell completes: scripts made of the parsers, run by the shells that are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("shtab", reason="shtab is not installed: pip install 'eagle-eye[server]'")

from eagle_eye.cli import completion
from eagle_eye.cli.main import COMMANDS, main

# What the shell would offer for the words so far, one a line.
ASK = {
    "bash": """
source {script}
COMP_WORDS=({words} "{last}"); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
function compopt() {{ :; }}
complete -p eagle-eye > /dev/null || exit 9
{function} eagle-eye "{last}" "${{COMP_WORDS[COMP_CWORD - 1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
""",
    "fish": "source {script}; complete --do-complete '{words} {last}'",
}


def offered(shell: str, folder: Path, words: str, last: str = "") -> set[str]:
    """Return what the shell offers after ``words``, for a word that begins with ``last``."""
    file = folder / "script"
    file.write_text(completion.script(shell))
    function = next((line.split("-F ")[1].split()[0] for line in file.read_text().splitlines() if " -F " in line), "")
    text = ASK[shell].format(script=file, words=words, last=last, function=function)
    done = subprocess.run([shell, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    return {line.split("\t")[0].strip() for line in done.stdout.splitlines() if line.strip()}


def installed(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_offers_commands_verbs_and_options(shell: str, tmp_path: Path) -> None:
    installed(shell)
    assert {command.name for command in COMMANDS} <= offered(shell, tmp_path, "eagle-eye")
    assert offered(shell, tmp_path, "eagle-eye", "inc") == {"incidents"}
    assert {"list", "show"} <= offered(shell, tmp_path, "eagle-eye incidents")
    assert "--config" in offered(shell, tmp_path, "eagle-eye doctor", "--")


def test_bash_offers_files_where_a_file_is_expected(tmp_path: Path) -> None:
    (tmp_path / "agent.toml").write_text("")
    assert str(tmp_path / "agent.toml") in offered("bash", tmp_path, "eagle-eye doctor --config", f"{tmp_path}/a")


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_reads_its_script(shell: str, tmp_path: Path) -> None:
    installed(shell)
    (tmp_path / "script").write_text(completion.script(shell))
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=60)


def test_another_shell_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcl"]) == 2
    assert "bash" in capsys.readouterr().err
