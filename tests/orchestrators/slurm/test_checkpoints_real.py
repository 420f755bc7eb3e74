"""Checkpoints in memory under a real Slurm that knows a job's processes by their control group, as sites' do.

It runs with make test-full alone (tests/real_slurm.py). docs/how-to/checkpoint.md has a job's script and the prolog.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eagle_eye.checkpoint.store_client import answers, end_store
from eagle_eye.orchestrators.protocol import Restart
from eagle_eye.orchestrators.slurm.cluster import Cluster, Commands, environment
from eagle_eye.orchestrators.slurm.orchestrator import SlurmOrchestrator
from eagle_eye.orchestrators.slurm.restarting import RestartTimeouts
from tests.docs.pages import blocks
from tests.orchestrators.slurm.builders import cause, orchestrator
from tests.real_slurm import Slurm, running, skip_reason, until

PROLOG, READ_COMMENT = (
    block.text
    for block in blocks("docs/how-to/checkpoint.md")
    if block.mark == "run by tests/orchestrators/slurm/test_checkpoints_real.py"
)
_numbers = itertools.count()
# Until five steps were whole, the last one among them; then it trains no more, and its memory stays. A step may be
# skipped: capture waits for nobody.
TRAINING = """
import itertools, json, os, sys, time
import torch
from eagle_eye.checkpoint import MemoryCheckpointer
state = {"weights": torch.zeros(1000)}
def say(**what):
    with open(sys.argv[2], "a") as said:
        print(json.dumps({"attempt": int(os.environ.get("SLURM_RESTART_COUNT", 0)), **what}), file=said)
checkpointer = MemoryCheckpointer(state, sys.argv[1], replicas=1, keep=3)
try:
    began = checkpointer.restore()
except Exception as error:
    say(failed=f"{type(error).__name__}: {error}")
    raise
say(restored=began, state=float(state["weights"][0]), source=checkpointer.resumed_from)
whole = []
for step in itertools.count(began + 1):
    state["weights"].fill_(step)
    checkpointer.capture(step)
    until_s = time.monotonic() + 2
    while checkpointer.whole_step != step and time.monotonic() < until_s:
        time.sleep(0.01)
    if checkpointer.whole_step == step:
        whole.append(step)
    if len(whole) == 5:
        break
say(whole=whole)
time.sleep(600)
"""


def no_cgroups() -> str:
    """Return why Slurm cannot make control groups here, "" where it can."""
    freezer = Path("/sys/fs/cgroup/freezer")
    return "" if os.access(freezer, os.W_OK) else f"{freezer} is not there: Slurm's other kind needs systemd"


SKIPPED = skip_reason() or no_cgroups()
pytestmark = pytest.mark.skipif(bool(SKIPPED), reason=SKIPPED or "-")


class Site(Slurm):
    """The cluster, and the memory of its host."""

    def __init__(self, folder: Path, memory: Path) -> None:
        super().__init__(folder)
        self.memory = memory
        (folder / "train.py").write_text(TRAINING)
        (folder / "systemctl").write_text(f'#!/bin/sh\necho "$*" >> {folder}/systemctl.said\n')
        (folder / "systemctl").chmod(0o755)
        (folder / "prolog").write_text(PROLOG.replace("\n", f"\nPATH={folder}:$PATH\n", 1))
        (folder / "prolog").chmod(0o755)

    @property
    def ours(self) -> SlurmOrchestrator:
        cluster = Cluster(Commands(environ=environment(self.environ, str(self.conf))))
        return orchestrator(cluster, self.folder, RestartTimeouts(run_s=60.0))

    def trains(self, job: Job) -> str:
        """The id of the job, as its user submits it."""
        script = self.folder / f"{job.name}.sh"
        script.write_text(
            "#!/bin/sh\n"
            f"export PYTHONPATH={':'.join(filter(None, sys.path))} HOME=/nonexistent OMP_NUM_THREADS=1\n"
            f"export EAGLE_EYE_CHECKPOINT_STORE={job.store} EAGLE_EYE_NODE=n1\n"
            f"{READ_COMMENT}"
            f"exec {sys.executable} {self.folder}/train.py {job.directory} {job.said_file}\n"
        )
        log = f"--output={self.folder}/{job.name}.%j.log"
        return self.run("sbatch", "--parsable", "--nodes=1", "--time=30", "--requeue", log, str(script))

    def comment(self, job_id: str) -> str:
        return self.run("squeue", "--noheader", f"--jobs={job_id}", "--Format=Comment:200").strip()


class Attempt(NamedTuple):
    """Where it went on, "" for nowhere, and which of its steps are whole, the newest last."""

    step: int
    where: str
    whole: list[int]


class Job:
    """A training job: where its store is, and what its ranks have said."""

    def __init__(self, site: Site, name: str) -> None:
        self.name = name
        self.store = site.memory / name
        self.directory = site.folder / f"{name}-storage"
        self.said_file = site.folder / f"{name}.said"

    def said(self, attempt: int) -> list[dict[str, Any]]:
        if not self.said_file.exists():
            return []
        lines = [json.loads(line) for line in self.said_file.read_text().splitlines()]
        return [line for line in lines if line["attempt"] == attempt]

    def trained(self, attempt: int) -> Attempt:
        """The attempt, once five more steps are whole."""
        until(lambda: any("whole" in line or "failed" in line for line in self.said(attempt)), 120)
        first, *_, last = self.said(attempt)
        assert "failed" not in first, first
        assert first["state"] == first["restored"]
        return Attempt(first["restored"], first["source"]["where"] if first["source"] else "", last["whole"])


def remove_groups() -> None:
    """Slurm leaves its node's own control groups behind."""
    for group in sorted(Path("/sys/fs/cgroup").glob("*/slurm_n1/**/"), reverse=True):
        group.rmdir()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    memory = Path(tempfile.mkdtemp(prefix="eagle-eye-test-", dir="/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="eagle-eye-slurm-") as name:
        Path(name).chmod(0o755)
        made = Site(Path(name), memory)
        try:
            with running(made, ("n1",), f"KillWait=2\nProlog={name}/prolog", proctrack="cgroup"):
                yield made
                made.run("scancel", "--user=root")
                until(lambda: not made.run("squeue", "--noheader"), 60)
        finally:
            for folder in memory.iterdir():
                end_store(folder)
            shutil.rmtree(memory)
            remove_groups()


@pytest.fixture(autouse=True)
def _alone(site: Site) -> Iterator[None]:
    yield
    site.run("scancel", "--user=root")
    until(lambda: not site.run("squeue", "--noheader"), 60)


@pytest.fixture
def job(site: Site) -> Iterator[Job]:
    """A job whose store is a process of the host, started before it and outside of it."""
    made = Job(site, f"job-{next(_numbers)}")
    store = subprocess.Popen(
        [
            *(sys.executable, "-m", "eagle_eye.cli.main", "checkpoint", "store"),
            *("--folder", str(made.store), "--node", "n1", "--listen", "127.0.0.1:0"),
        ],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: answers(made.store), 30)
        yield made
    finally:
        store.send_signal(signal.SIGTERM)
        store.wait(30)


def suspect(resume_from: str, over: int = 0) -> Restart:
    """A restart after damage, from the step before it."""
    return Restart(over, 0.0, cause(fault="loss_divergence"), resume_from=resume_from)


def test_a_requeued_job_goes_on_from_memory_at_the_step_that_the_action_names_and_the_next_time_at_its_newest(
    site: Site, job: Job
) -> None:
    job_id = site.trains(job)
    *_, trusted, _ = job.trained(0).whole
    said = site.ours.restart(job_id, suspect(f"memory:{trusted}"))
    assert (
        f"job {job_id} requeued, told in its comment to resume from memory:{trusted}; job {job_id} runs again" in said
    )
    again = job.trained(1)
    assert (again.step, again.where) == (trusted, "memory")
    site.run("scontrol", "requeue", job_id)  # somebody else's restart: the comment is of the attempt before
    later = job.trained(2)
    assert (later.step, later.where) == (again.whole[-1], "memory")
    assert site.comment(job_id) == f"eagle-eye:attempt=1:resume_from=memory:{trusted}"


def test_copies_outlive_a_job_that_is_cancelled(site: Site, job: Job) -> None:
    first = site.trains(job)
    newest = job.trained(0).whole[-1]
    site.run("scancel", first)
    until(lambda: not site.run("squeue", "--noheader"), 60)
    job.said_file.unlink()
    site.trains(job)
    again = job.trained(0)
    assert (again.step, again.where) == (newest, "memory")


def test_a_store_that_ranks_have_started_ends_with_their_job(site: Site) -> None:
    job = Job(site, "own-store")
    job_id = site.trains(job)
    assert job.trained(0).where == ""
    assert answers(job.store)
    site.run("scontrol", "requeue", job_id)
    until(lambda: not answers(job.store), 30)


def test_the_prolog_starts_the_store_of_the_jobs_user_before_the_job(site: Site, job: Job) -> None:
    said = site.folder / "systemctl.said"
    said.unlink(missing_ok=True)
    site.trains(job)
    until(lambda: job.said(0), 60)
    assert said.read_text() == f"start eagle-eye-checkpoint-store@{os.getuid()}.service\n"


def test_where_jobs_have_a_dev_shm_of_their_own_another_tmpfs_is_still_the_hosts() -> None:
    # Not below /tmp, of which such a job has its own, too.
    with tempfile.TemporaryDirectory(prefix="eagle-eye-slurm-", dir="/var/tmp") as name:
        folder, marks = Path(name), {}
        folder.chmod(0o755)
        (folder / "job_container.conf").write_text(f"AutoBasePath=true\nBasePath={folder}/private\n")
        shared = folder / "shared"
        shared.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(shared)], check=True)
        try:
            for where in (Path("/dev/shm"), shared):
                marks[where] = where / f"eagle-eye-test-{os.getpid()}"
                marks[where].touch()
            cluster = Slurm(folder)
            private = "PrologFlags=Contain\nJobContainerType=job_container/tmpfs"
            with running(cluster, ("n1",), private, proctrack="cgroup"):
                looks = "; ".join(f"test -e {mark} && echo {where} >> {folder}/seen" for where, mark in marks.items())
                cluster.submit(1, f"touch {folder}/seen; {looks}; touch {folder}/done")
                until((folder / "done").exists, 60)
                until(lambda: not cluster.run("squeue", "--noheader"), 60)
            assert (folder / "seen").read_text() == f"{shared}\n"
        finally:
            for mark in marks.values():
                mark.unlink(missing_ok=True)
            subprocess.run(["umount", str(shared)], check=True)
            remove_groups()
