"""Slurm asked by commands: programs that answer, fail, hang, flood and are not there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.server.jobs import slurm
from eagle_eye.server.jobs.slurm import Squeue
from eagle_eye.server.jobs.source import SlurmSettings, Snapshot, SourceFailed
from tests.server.builders import NOW, FakeClock

LINE = "17|N/A|RUNNING|0|1000|NONE|UNLIMITED|N/A|ada|n[1-2]|"
ENVIRON = {"PATH": "/usr/bin:/bin", "SQUEUE_FORMAT": "%i", "SECRET": "x"}


def squeue(folder: Path, script: str, sinfo: str = "echo 'n1|idle|none|'", **more: Any) -> Squeue:
    for name, body in (("squeue", script), ("sinfo", sinfo)):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    settings = SlurmSettings(
        **{"use": "squeue", "squeue": f"{folder}/squeue", "sinfo": f"{folder}/sinfo", "format": "text", **more}
    )
    return Squeue(settings, FakeClock(), ENVIRON)


def ask(source: Squeue) -> Snapshot:
    return asyncio.run(source.read_snapshot(with_nodes=True))


def test_one_call_each_asks_for_all_jobs_and_all_nodes(tmp_path: Path) -> None:
    script = f"echo \"$@\" >> {tmp_path}/calls; echo '{LINE}'"
    found = ask(squeue(tmp_path, script))
    assert [(job.id, job.nodes) for job in found.jobs] == [("17", ("n1", "n2"))]
    assert found.nodes is not None
    assert [node.name for node in found.nodes] == ["n1"]
    assert found.asked_s == NOW
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--all --states=all --noheader --Format=JobID:|,HetJobID:|" in call


def test_what_would_change_the_output_is_not_in_the_environment(tmp_path: Path) -> None:
    script = f"env > {tmp_path}/env; echo '{LINE}'"
    ask(squeue(tmp_path, script, conf="/etc/slurm/other.conf"))
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert {"SQUEUE_FORMAT", "SECRET"} & names == set()
    assert {"PATH", "SLURM_CONF", "SLURM_TIME_FORMAT"} <= names


@pytest.mark.parametrize(("version", "form"), [("slurm-wlm 22.05.8", "--noheader"), ("slurm 24.11.3", "--json")])
def test_json_is_asked_for_where_it_says_more(tmp_path: Path, version: str, form: str) -> None:
    script = f"""case "$1" in --version) echo '{version}';; *)
    echo "$@" >> {tmp_path}/calls; case "$*" in *--json) echo '{{"jobs": []}}';; *) echo '{LINE}';; esac;; esac"""
    ask(squeue(tmp_path, script, format="auto"))
    assert form in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    ("script", "reason", "words"),
    [
        (
            "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
            "refused",
            "Unable to contact",
        ),
        (f"echo '{LINE}'; exit 1", "refused", "nothing on stderr"),
        ("exec sleep 60", "timeout", "job_sources.slurm.timeout_s"),
        ("yes x", "oversized", "more than 100000 bytes"),
    ],
)
def test_whatever_is_no_whole_answer_is_a_failure(
    tmp_path: Path, script: str, reason: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "OUTPUT_BYTES_MAX", 100_000)
    with pytest.raises(SourceFailed, match=words) as failed:
        ask(squeue(tmp_path, script, timeout_s=0.3 if reason == "timeout" else 10.0))
    assert failed.value.reason == reason


def test_a_command_that_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(SourceFailed, match=r"No such file.*job_sources\.slurm\.squeue"):
        ask(squeue(tmp_path, "", squeue=f"{tmp_path}/absent"))


def test_a_command_that_hangs_leaves_no_process_behind(tmp_path: Path) -> None:
    script = f"sleep 61.5 & echo $! > {tmp_path}/child; wait"
    with pytest.raises(SourceFailed):
        ask(squeue(tmp_path, script, timeout_s=0.5))
    child = int((tmp_path / "child").read_text())
    until_s = time.monotonic() + 5
    while _lives(child) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_it_is_asked_again_at_once_when_a_fault_waits(tmp_path: Path) -> None:
    source = squeue(tmp_path, f"echo '{LINE}'", every_s=600.0)

    async def asked() -> int:
        sooner = asyncio.Event()
        count = 0
        async for _ in source.snapshots(sooner):
            count += 1
            if count == 3:
                return count
            sooner.set()
        return count

    assert asyncio.run(asyncio.wait_for(asked(), 10)) == 3
