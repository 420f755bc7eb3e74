"""The command as a script calls it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.agent.processes.exit_watcher import is_running
from eagle_eye.checks.check import THRESHOLDS
from eagle_eye.checks.command import host_lock
from eagle_eye.checks.runner import CHECKS
from tests.agent.fakes import until

# The command with a host of the test's choice.
DRIVER = """
import sys
from pathlib import Path
from eagle_eye.checks import command, gpus
from eagle_eye.checks.check import Check, Host, passed, sick
from tests.checks.builders import gpu, host
command.LOCK_PATH = Path(sys.argv[1])
{more}
from eagle_eye.cli.main import main
sys.exit(main(["check", *sys.argv[2:]]))
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def start(lock: Path, *flags: str, more: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(more=more), str(lock), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(lock: Path, *flags: str, more: str = "") -> tuple[int, str, str]:
    with start(lock, *flags, more=more) as process:
        out, complaint = process.communicate(timeout=200)
    return process.returncode, out, complaint


def report(lock: Path, *flags: str, more: str = "") -> tuple[int, dict[str, Any], str]:
    status, out, complaint = check(lock, "--json", *flags, more=more)
    return status, json.loads(out), complaint


ALL = "command.CHECKS = ({},)"
SICK = ALL.format("Check('disk', '', '', 9.0, 9.0, lambda a: '', lambda a: sick('it is broken'))")
GOOD = ALL.format("Check('disk', '', '', 9.0, 9.0, lambda a: '', lambda a: passed('fine'), loads_gpus=True)")
BUSY = "gpus.host = lambda until_s: Host(gpus=(gpu(0, processes=(1,)),))"


def test_a_healthy_host_is_said_to_be_so(lock: Path) -> None:
    status, reported, complaint = report(lock, more=GOOD)
    assert (status, reported["verdict"], complaint) == (0, "healthy", "")
    assert reported["checks"][0]["state"] == "passed"


def test_a_sick_host_ends_with_3(lock: Path) -> None:
    status, out, _ = check(lock, more=SICK)
    assert status == 3
    assert re.fullmatch(r"disk +sick +0\.\d s  it is broken\nsick: disk\n", out)


def test_a_host_whose_gpus_somebody_uses_is_left_alone(lock: Path) -> None:
    status, reported, complaint = report(lock, more=f"{BUSY}\n{GOOD}")
    assert (status, reported["verdict"], reported["refused"], reported["checks"]) == (1, "cannot_tell", True, [])
    assert "gpu 0: process 1" in complaint
    assert "--force" in complaint


def test_force_begins_nevertheless(lock: Path) -> None:
    assert report(lock, "--force", more=f"{BUSY}\n{GOOD}")[1]["verdict"] == "healthy"


def test_a_second_check_is_refused_and_the_host_left_in_service(lock: Path) -> None:
    with host_lock(lock):
        status, reported, complaint = report(lock, more=GOOD)
    assert (status, reported["verdict"]) == (1, "cannot_tell")
    assert "another check runs on this host" in complaint


def test_a_defect_of_ours_accuses_nobody(lock: Path) -> None:
    status, reported, complaint = report(lock, more="gpus.host = None")
    assert (status, reported["verdict"]) == (1, "cannot_tell")
    assert "the command itself failed" in complaint


def test_a_reader_that_has_gone_changes_no_exit_code(lock: Path) -> None:
    with start(lock, "--json", more=SICK) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=60) == 3


def test_gpus_that_should_be_there_are_not_replaced_by_the_cpu(lock: Path) -> None:
    nowhere = "gpus.host = lambda until_s: Host()"
    status, reported, _ = report(lock, "--only", "gemm", "gpu_facts", "--gpus", "8", more=nowhere)
    assert (status, reported["verdict"]) == (1, "cannot_tell")
    assert [each["reason"] for each in reported["checks"]] == ["none of 8 GPUs is seen, by NVML or on the PCI bus"] * 2


@pytest.mark.parametrize(
    "flags",
    [
        ["--only", "nothing"],
        ["--only", "disk", "--skip", "disk"],
        ["--deadline", "1"],
        ["--deadline", "nan"],
        ["--gemm-seconds", "0"],
        ["--gemm-seconds", "3600"],
        ["--threshold", "disk.sync_seconds=never"],
        ["--folder", "/no/such/folder"],
        ["--gpus", "-1"],
        ["--sdc", "--quick"],
        ["--sdc", "--only", "disk"],
        ["--sdc", "--seconds", "0"],
        ["--seconds", "60"],
    ],
)
def test_wrong_usage_ends_with_2(lock: Path, flags: list[str]) -> None:
    status, _, complaint = check(lock, *flags)
    assert status == 2
    assert "expected" in complaint or "invalid choice" in complaint or "leave nothing" in complaint


def test_ending_the_command_ends_what_it_has_begun(lock: Path, tmp_path: Path) -> None:
    (tmp_path / "dcgmi").write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 100\n")
    (tmp_path / "dcgmi").chmod(0o755)
    more = f"import os; os.environ['PATH'] = '{tmp_path}:' + os.environ['PATH']\ngpus.host = lambda until_s: host(1)"
    with start(lock, "--only", "dcgm", more=more) as process:
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n"), 30.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 130
    until(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_the_disk_is_tried_by_the_real_child(lock: Path) -> None:
    # A folder that the package's own tests use may be in memory; the repository's is on a disk.
    status, reported, _ = report(lock, "--only", "disk", "--folder", str(Path(__file__).parent))
    assert (status, reported["checks"][0]["state"]) == (0, "passed")
    figures = {each["name"]: each for each in reported["checks"][0]["values"]}
    assert figures["sync_seconds"]["threshold"] == THRESHOLDS["disk.sync_seconds"].value
    assert figures["write_bytes_per_second"]["unit"] == "B/s"


@pytest.mark.slow
def test_the_cpu_forms_pass_where_there_is_no_gpu(lock: Path) -> None:
    nowhere = "gpus.host = lambda until_s: Host()"
    flags = ("--only", "gemm", "memory", "all_reduce", "--gemm-seconds", "1", "--deadline", "150")
    status, reported, _ = report(lock, *flags, more=nowhere)
    assert [(each["name"], each["state"]) for each in reported["checks"]] == [
        ("gemm", "passed"),
        ("memory", "passed"),
        ("all_reduce", "passed"),
    ]
    assert all("this host has no GPU" in each["reason"] for each in reported["checks"])
    assert (status, reported["verdict"]) == (0, "healthy")


def test_the_command_loads_neither_torch_nor_what_may_be_missing() -> None:
    program = "import sys, eagle_eye.checks.command; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"torch", "numpy", "rich", "pynvml", "psutil"} & set(done.stdout.split()) == set()


def test_every_check_threshold_and_flag_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "check.md").read_text(encoding="utf-8")
    assert [each.name for each in CHECKS if f"| `{each.name}` | {each.needs} |" not in text] == []
    for each in THRESHOLDS.values():
        value = "" if each.value is None else f"{each.value:g}"
        assert f"| `{each.name}` | {value} | {each.unit} |" in text
    shown = subprocess.run(
        [sys.executable, "-m", "eagle_eye.cli.main", "check", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    flags = set(re.findall(r"--[a-z-]+", shown.stdout)) - {"--help"}
    assert flags - set(re.findall(r"--[a-z-]+", text)) == set()
