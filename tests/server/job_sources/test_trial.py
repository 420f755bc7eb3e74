"""``eagle-eye server --check-job-sources``: what schedulers say, and what stands in the way, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.cli.main import main
from eagle_eye.server.jobs import keeper
from tests.server.job_sources.fake_http import serving
from tests.server.job_sources.test_kubernetes import ApiServer, pod

TWO_JOBS = "17|N/A|RUNNING|0|1000|1700003600|01:00:00|N/A|ada|n[1-2]|\n18|N/A|PENDING|0|N/A|Priority|N/A|N/A|bob||"
NODES = "n1|idle|none|\nn2|drained|fan\033[2J broken|\nn3|drained|eagle-eye: gpu_lost|"


def configured(folder: Path, squeue: str, sinfo: str = f"printf '%s\n' '{NODES}'", more: str = "") -> str:
    """Return the path of a configuration whose squeue and sinfo are these scripts."""
    for name, body in (("squeue", squeue), ("sinfo", sinfo)):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    commands = f'squeue = "{folder}/squeue"\nsinfo = "{folder}/sinfo"\nformat = "text"\n'
    file = folder / "server.toml"
    file.write_text(f'data_dir = "{folder}/data"\n[job_sources.slurm]\nuse = "squeue"\n{commands}{more}')
    return str(file)


def watched(url: str) -> str:
    return f'[job_sources.kubernetes]\nuse = "watch"\nurl = "{url}"\ntoken_file = ""\nca_file = ""\n'


def check(config: str) -> int:
    return main(["server", "--config", config, "--check-job-sources"])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "REFUSED_S", 0.3)


def test_what_slurm_says_is_shown_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(configured(tmp_path, f"printf '%s\n' '{TWO_JOBS}'")) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("slurm answered in ")
    assert [line.split() for line in lines[:4]] == [
        ["jobs:", "2", "(1", "pending,", "1", "running)"],
        ["ID", "CALLED", "STATE", "ATTEMPT", "NODES", "ENDS", "OWNER"],
        ["17", "17", "running", "0", "n1", "and", "1", "more", "2023-11-14T23:13:20.000Z", "ada"],
        ["18", "18", "pending", "0", "-", "-", "bob"],
    ]
    assert lines[4] == "nodes: 3 (2 excluded, 1 in_service)"
    assert [" ".join(line.split()) for line in lines[6:]] == [
        "n2 excluded the scheduler's fan\ufffd[2J broken",
        "n3 excluded Eagle Eye's eagle-eye: gpu_lost",
    ]
    assert not (tmp_path / "data").exists()


def test_of_many_jobs_some_are_shown_and_what_is_of_no_use_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "$i|N/A|RUNNING|0|1000|N/A|UNLIMITED|N/A|ada|n$i|"
    script = f'for i in $(seq 30); do echo "{line}"; done; echo "31|N/A|WARPED|0|1000|N/A|UNLIMITED|N/A|ada|n[1|"'
    assert check(configured(tmp_path, script, "true")) == 0
    said = capsys.readouterr().out
    assert "  and 10 more\n" in said
    assert "left out, as of no use: 1 host_list" in said


def test_who_gives_no_answer_is_named_with_the_reason_and_the_others_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ApiServer(pod())
    with serving(server) as url:
        config = configured(tmp_path, "echo 'Unable to contact slurm controller' >&2; exit 1", more=watched(url))
        assert check(config) == 1
        server.events.put(None)
        server.events.put(None)
    reported = capsys.readouterr()
    assert "slurm gives no answer (refused): " in reported.err
    assert "Unable to contact slurm controller" in reported.err
    assert "kubernetes answered in " in reported.out
    assert "ml/llama  llama   running  1" in reported.out


def test_an_api_server_that_lists_and_refuses_to_be_watched_is_found_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ApiServer(pod())
    server.refuse = lambda asked: (403, b"{}") if "watch" in asked.query else None
    with serving(server) as url:
        assert check(configured(tmp_path, f"printf '%s\n' '{TWO_JOBS}'", more=watched(url))) == 1
    assert "kubernetes gives no answer (unauthorised): " in capsys.readouterr().err


def test_without_a_scheduler_in_the_configuration_there_is_nothing_to_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["server", "--data", str(tmp_path), "--check-job-sources"]) == 2
    assert "job_sources: expected slurm.use or kubernetes.use" in capsys.readouterr().err
