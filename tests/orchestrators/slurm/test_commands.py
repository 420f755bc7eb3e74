"""Commands run: what they are given and may know, and what becomes of them when they fail, hang or flood."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_eye.orchestrators.slurm import cluster
from eagle_eye.orchestrators.slurm.answers import SlurmError, SlurmNode, SlurmRefusedError
from eagle_eye.orchestrators.slurm.cluster import Cluster, Commands, environment

ENVIRON = {"PATH": "/usr/bin:/bin", "SQUEUE_FORMAT": "%i", "SBATCH_PARTITION": "x", "SECRET": "x"}


def played(folder: Path, timeout_s: float = 10.0, **scripts: str) -> Commands:
    for name, body in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return Commands(str(folder), timeout_s, environment(ENVIRON, "/etc/slurm/other.conf"))


def test_a_command_is_given_its_words_as_they_are(tmp_path: Path) -> None:
    run = played(tmp_path, scontrol='for word; do echo "<$word>"; done')
    assert run.run("scontrol", "update", "Reason=a b; $(rm) 'x'") == "<update>\n<Reason=a b; $(rm) 'x'>\n"


def test_it_knows_of_our_environment_what_slurm_needs(tmp_path: Path) -> None:
    lines = played(tmp_path, squeue="env").run("squeue").splitlines()
    names = {line.partition("=")[0] for line in lines}
    assert names & set(ENVIRON) == {"PATH"}
    assert {"LC_ALL=C", "SLURM_CONF=/etc/slurm/other.conf", "SLURM_TIME_FORMAT=%s"} <= set(lines)


def test_it_reads_what_it_is_given_through_whatever_starts_it(tmp_path: Path) -> None:
    run = played(tmp_path, sbatch="cat", sudo='echo "as $2"; shift 2; exec "$@"')
    assert run.run("sbatch", before=[f"{tmp_path}/sudo", "-u", "ann"], given=b"script") == "as ann\nscript"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "echo noise >&2; echo 'slurm_update error: Invalid user id' >&2; exit 1",
            "scontrol update: slurm_update error",
        ),
        ("exit 3", "nothing on stderr"),
    ],
)
def test_what_slurm_refuses_is_said_in_its_words(tmp_path: Path, script: str, words: str) -> None:
    with pytest.raises(SlurmRefusedError, match=words):
        played(tmp_path, scontrol=script).run("scontrol", "update")


@pytest.mark.parametrize("script", ["sleep 60 & sleep 60", "exec >&- 2>&-; sleep 60", "trap '' TERM; sleep 60"])
def test_a_command_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "END_S", 0.2)
    began_s = time.monotonic()
    with pytest.raises(SlurmError, match=r"no answer within 0.3 s \(--command-timeout\)"):
        played(tmp_path, 0.3, squeue=script).run("squeue")
    assert time.monotonic() - began_s < 5


def test_output_without_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "OUTPUT_BYTES_MAX", 100_000)
    with pytest.raises(SlurmError, match="more than 100000 bytes"):
        played(tmp_path, squeue="yes").run("squeue")


def test_a_command_that_is_not_there_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(SlurmError, match="install Slurm's client commands"):
        played(tmp_path).run("squeue")


def test_an_account_that_may_not_drain_is_told_what_to_do(tmp_path: Path) -> None:
    run = played(tmp_path, scontrol="echo 'slurm_update error: Invalid user id' >&2; exit 1")
    with pytest.raises(SlurmRefusedError, match="may not change nodes: see --node-prefix"):
        Cluster(run).drain("n1", "eagle-eye x")


def test_a_token_is_read_for_each_command(tmp_path: Path) -> None:
    file = tmp_path / "jwt"
    run = replace(played(tmp_path, squeue="echo $SLURM_JWT"), jwt_file=file)
    with pytest.raises(SlurmError, match=r"--jwt-file .*FileNotFoundError"):
        run.run("squeue")
    for token in ("one", "two"):
        file.write_text(f"SLURM_JWT={token}\n")
        assert run.run("squeue") == f"{token}\n"
    file.write_text("\n")
    with pytest.raises(SlurmError, match="expected one line"):
        run.run("squeue")


@pytest.mark.parametrize("name", ["-n1", "n1,n2", "n[1-2]", "ALL nodes", "", "n1\n"])
def test_a_name_that_would_mean_other_nodes_reaches_no_command(tmp_path: Path, name: str) -> None:
    with pytest.raises(SlurmError, match="is no node's name"):
        Cluster(played(tmp_path, scontrol="exit 0")).drain(name, "eagle-eye x")


@pytest.mark.parametrize(("words", "state"), [({"idle", "drain"}, "RESUME"), ({"down", "drain"}, "UNDRAIN")])
def test_a_node_that_is_down_too_is_undrained_and_not_called_up(tmp_path: Path, words: set[str], state: str) -> None:
    run = played(tmp_path, scontrol=f'echo "$@" > {tmp_path}/said')
    Cluster(run).undrain(SlurmNode("n1", frozenset(words), frozenset({"all"}), "eagle-eye x"))
    assert (tmp_path / "said").read_text() == f"update NodeName=n1 State={state}\n"


def test_json_is_asked_for_where_it_says_more(tmp_path: Path) -> None:
    script = """case "$*" in --version) echo 'slurm 24.11.3';; *--json) echo '{"jobs": []}';; *) exit 1;; esac"""
    assert Cluster(played(tmp_path, squeue=script)).jobs(17) == ()


def test_an_unknown_job_is_none_and_any_other_refusal_is_an_error(tmp_path: Path) -> None:
    version = "case $1 in --version) echo 'slurm 22.05.8'; exit;; esac;"
    unknown = f"{version} echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    assert Cluster(played(tmp_path, squeue=unknown)).jobs(17) == ()
    away = f"{version} echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    with pytest.raises(SlurmError, match="Unable to contact"):
        Cluster(played(tmp_path, squeue=away)).jobs(17)
