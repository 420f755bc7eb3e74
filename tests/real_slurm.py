"""A real Slurm of a few nodes on this machine, started without systemd; what tests of it share.

It takes half a minute, so that these tests run with make test-full alone, which installs Slurm.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.loopback import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmrestd", "squeue", "sinfo", "sbatch", "scontrol", "scancel")
# slurmctld looks for jobs beyond their limit each 30 s, counts from the end of their start, in minutes, and gives their
# processes 30 s to end.
TIME_LIMIT_SEEN_S = 180.0
CONF = """
ClusterName=eagle
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={folder}/jwt.key
CredType=cred/munge
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
MailProg=/bin/true
{more}
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def skip_reason() -> str:
    """Return why no real Slurm can run here now, "" where one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install $(cat tests/debian-packages.txt)"
    if os.geteuid() != 0:
        return "Slurm's daemons start jobs as root alone: run the tests as root"
    if "EAGLE_EYE_TEST_SLURM" not in os.environ:
        return "a real Slurm takes half a minute: make test-full runs it, or EAGLE_EYE_TEST_SLURM=1 make test"
    return ""


def until(true: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """Return what is true at last. Fails after ``limit_s``."""
    end_s = time.monotonic() + limit_s
    while not (found := true()):
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.05)
    return found


class Slurm:
    """The cluster, by its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self.environ = {"PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(self.conf)}
        self.rest_url = ""

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False, timeout=20)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, nodes: int, script: str, *options: str) -> str:
        common = ("--parsable", f"--nodes={nodes}", "--time=30", "--output=/dev/null")
        return self.run("sbatch", *common, *(options or ("--requeue",)), "--wrap", script)


@contextmanager
def running(cluster: Slurm, names: Sequence[str], more: str = "", proctrack: str = "linuxproc") -> Iterator[None]:
    """The cluster runs, with these nodes, all idle; ``more`` are further lines of its slurm.conf.

    ``proctrack`` is by what it knows a job's processes.
    """
    folder = cluster.folder
    host = socket.gethostname().partition(".")[0]
    ctld, rest, *ports = (free_port() for _ in range(2 + len(names)))
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    for key in ("munge.key", "jwt.key"):
        (folder / key).write_bytes(secrets.token_bytes(64))
        (folder / key).chmod(0o600)
    lines = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=100"
        for node, port in zip(names, ports, strict=True)
    ]
    cluster.conf.write_text(
        CONF.format(host=host, ctld=ctld, folder=folder, nodes="\n".join(lines), more=more, proctrack=proctrack)
    )
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str, **more_environ: Any) -> None:
        with (folder / f"{Path(command[0]).name}.{len(daemons)}.out").open("wb") as out:
            environ = {**cluster.environ, **more_environ}
            daemons.append(subprocess.Popen(command, env=environ, stdout=out, stderr=out))

    munge = ("key-file", "socket", "pid-file", "log-file", "seed-file")
    files = ("munge.key", "munge.sock", "munge.pid", "munge.log", "munge.seed")
    words = [f"--{word}={folder}/{name}" for word, name in zip(munge, files, strict=True)]
    try:
        start("munged", "--foreground", "--force", *words)
        until((folder / "munge.sock").exists)
        start("slurmctld", "-D", "-i", "-f", str(cluster.conf))
        # A slurmd that finds no controller tries again only after a while.
        ready = ["sinfo", "--noheader", "--Node", "--Format=StateLong"]
        until(lambda: subprocess.run(ready, env=cluster.environ, capture_output=True, check=False).returncode == 0)
        for node in names:
            start("slurmd", "-D", "-f", str(cluster.conf), "-N", node)
        nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
        plugins = ("-a", "rest_auth/jwt", "-s", "openapi/v0.0.38")
        start(*nobody, "slurmrestd", "-f", str(cluster.conf), *plugins, f"127.0.0.1:{rest}", SLURM_JWT="daemon")
        cluster.rest_url = f"http://127.0.0.1:{rest}"
        until(lambda: cluster.run(*ready).split() == ["idle"] * len(names))
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextmanager
def running_with_preemption(cluster: Slurm, names: Sequence[str]) -> Iterator[None]:
    """The cluster runs as of ``running``; what comes by the partition "urgent" takes others' place at once."""
    with running(cluster, names, "KillWait=2\nPreemptType=preempt/partition_prio\nPreemptMode=REQUEUE"):
        with cluster.conf.open("a") as conf:
            conf.write("PartitionName=urgent Nodes=ALL PriorityTier=100 State=UP\n")
        cluster.run("scontrol", "reconfigure")
        yield
