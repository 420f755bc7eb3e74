"""The documents' scripts for schedulers: a sick node is taken out, one that nobody can judge never."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import Block, all_blocks

SCRIPTS = {
    f"{number} of {block.page}": block
    for number, block in enumerate(all_blocks("sh"))
    if block.text.startswith("#!") and " eagle-eye " in block.text.replace("\n", " ").replace("(", " ")
}


def called(block: Block, folder: Path, code: int) -> tuple[int, str]:
    """Run the script where ``eagle-eye`` ends with ``code``; return its own and what it told Slurm."""
    for name, does in {
        "eagle-eye": f"echo '2 GPUs instead of 8'; exit {code}",
        "scontrol": "",
        "logger": "cat >/dev/null",
    }.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/calls\n{does}\n')
        program.chmod(0o755)
    script = folder / "script.sh"
    script.write_text(block.text.replace("/run/", f"{folder}/"))
    path = {"PATH": f"{folder}:/usr/bin:/bin", "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        ["sh", str(script)],
        env=path,
        capture_output=True,
        text=True,
        timeout=20.0,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    calls = (folder / "calls").read_text().splitlines()
    return done.returncode, "\n".join(call for call in calls if call.startswith("scontrol update"))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("code", [0, 1, 2, 127])
def test_a_node_that_is_not_sick_stays_whatever_became_of_the_check(name: str, code: int, tmp_path: Path) -> None:
    assert called(SCRIPTS[name], tmp_path, code) == (0, "")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_sick_node_is_taken_out_as_the_script_can(name: str, tmp_path: Path) -> None:
    ended, reported = called(SCRIPTS[name], tmp_path, 3)
    if "exit 1" in SCRIPTS[name].text:
        assert ended == 1
    elif "scontrol update" in SCRIPTS[name].text:
        assert "state=drain reason=" in reported
    else:
        assert (ended, reported) == (0, "")  # it only writes to the log
