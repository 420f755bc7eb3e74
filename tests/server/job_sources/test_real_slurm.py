"""A real Slurm of three nodes on this machine: what it does to jobs and nodes, and what the server makes of it.

It runs with make test-full alone (tests/real_slurm.py).
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import CONTENT_TYPE, Rank, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.slurm import expand_hosts
from eagle_eye.server.app import create_app
from eagle_eye.server.command import connection_options
from eagle_eye.server.jobs.slurm import SlurmRest, Squeue
from eagle_eye.server.jobs.source import ScheduledJob, SlurmSettings
from eagle_eye.server.model.clock import SystemClock
from tests.real_slurm import TIME_LIMIT_SEEN_S, running_with_preemption, skip_reason, until
from tests.real_slurm import Slurm as Cluster
from tests.server.builders import body, frame, logging_put_back, settings

NODES = ("n1", "n2", "n3")

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-")


class Slurm(Cluster):
    """The cluster, and what the server's job source makes of it."""

    def ask(self) -> dict[str, ScheduledJob]:
        source = Squeue(SlurmSettings(use="squeue", conf=str(self.conf)), SystemClock(), self.environ)
        return {job.id: job for job in asyncio.run(source.read_snapshot(with_nodes=False)).jobs}

    def waits_for(self, job: str, state: str) -> ScheduledJob:
        found = until(lambda: (known := self.ask().get(job)) and known.state == state and known)
        assert isinstance(found, ScheduledJob)
        return found


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    # Not pytest's own folder: slurmrestd runs as nobody, who may not look into that.
    with tempfile.TemporaryDirectory(prefix="eagle-eye-slurm-") as name:
        Path(name).chmod(0o755)
        cluster = Slurm(Path(name))
        with running_with_preemption(cluster, NODES):
            yield cluster


@pytest.fixture(autouse=True)
def _emptied(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.run("scancel", "--user=root")
    until(lambda: all(job.state not in ("running", "pending", "completing") for job in slurm.ask().values()))


def test_host_lists_are_expanded_as_scontrol_does(slurm: Slurm) -> None:
    text = "gpu[001-003,7,9-11],login,rack[1-2]node[08-10]"
    assert expand_hosts(text) == tuple(slurm.run("scontrol", "show", "hostnames", text).split())


def test_columns_json_and_slurmrestd_say_the_same(slurm: Slurm) -> None:
    job = slurm.submit(2, "srun sleep 60")
    slurm.waits_for(job, "running")
    slurm.run("scontrol", "update", "nodename=n3", "state=drain", "reason=bad | fan")
    token = slurm.run("scontrol", "token", "username=root", "lifespan=60")
    (slurm.folder / "token").write_text(token)
    rest = SlurmSettings(use="rest", url=slurm.rest_url, token_file=f"{slurm.folder}/token", user="root")

    async def ask_rest() -> Any:
        async for snapshot in SlurmRest(rest, SystemClock()).snapshots(asyncio.Event()):
            return snapshot.jobs, snapshot.nodes
        return None

    answers = []
    for form in ("text", "json"):
        source = Squeue(SlurmSettings(use="squeue", conf=str(slurm.conf), format=form), SystemClock(), slurm.environ)
        snapshot = asyncio.run(source.read_snapshot(with_nodes=True))
        answers.append((sorted(snapshot.jobs, key=lambda one: one.id), snapshot.nodes))
    jobs, nodes = asyncio.run(ask_rest())
    answers.append((sorted(jobs, key=lambda one: one.id), nodes))
    assert answers[0] == answers[1] == answers[2]
    assert {one.owner for one in answers[0][0] if one.id == job} == {"root"}
    (drained,) = [node for node in answers[0][1] or () if node.name == "n3"]
    assert (drained.state, drained.reason, drained.drained) == ("excluded", "bad | fan", True)
    slurm.run("scontrol", "update", "nodename=n3", "state=resume")


class Server:
    """A server that asks the cluster; its nodes' agents are played by the test."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self._sequence = 0

    def agents_say(self, job: str, step: float, nodes: tuple[str, ...], *events: Event, attempt: int = 0) -> None:
        self._sequence += 1
        now_s = time.time()
        for node in nodes:
            one = frame(
                self._sequence,
                node,
                now_s,
                job=job,
                ranks=[Rank(job, NODES.index(node), len(nodes), 0, attempt, 100)],
                blocks=[block(Scope.DEVICE, {0: {"train_step": step}})],
                events=list(events),
            )
            content = body(one, sent_s=now_s)
            sent = self.client.post("/api/v1/frames", content=content, headers={"content-type": CONTENT_TYPE})
            assert sent.status_code == 200, sent.text

    def agents_go_on_saying(self, job: str, step: float, seconds: float, attempt: int = 0) -> None:
        """Frames twice a second, as of agents whose ranks make no more steps."""
        for _ in range(int(seconds * 2)):
            time.sleep(0.5)
            self.agents_say(job, step, NODES, attempt=attempt)

    def job(self, name: str) -> dict[str, Any]:
        found = self.client.get(f"/api/v1/jobs/{name}")
        return dict(found.json()) if found.status_code == 200 else {}

    def items(self, what: str, **query: str) -> list[dict[str, Any]]:
        return list(self.client.get(f"/api/v1/{what}", params=query).json()["items"])


@contextmanager
def serving(folder: Path, slurm: Slurm) -> Iterator[Server]:
    with socket.socket() as bound, logging_put_back():
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        listen = f"127.0.0.1:{bound.getsockname()[1]}"
        config = settings(
            folder,
            listen=listen,
            policy__mode="act",
            detection__tick_s=0.2,
            job_sources__slurm__use="squeue",
            job_sources__slurm__conf=str(slurm.conf),
            job_sources__slurm__every_s=1.0,
            job_sources__slurm__nodes_every_s=1.0,
        )
        front = create_app(config)
        options = connection_options(front)
        server = uvicorn.Server(
            uvicorn.Config(front, log_config=None, access_log=False, timeout_graceful_shutdown=2, **options)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            with httpx.Client(base_url=f"http://{listen}", timeout=10.0, trust_env=False) as client:
                client.get("/healthz").raise_for_status()
                yield Server(client)
        finally:
            front.stop()
            server.should_exit = True
            thread.join(10.0)
            assert not thread.is_alive()


def test_a_job_from_its_start_through_a_requeue_to_its_cancellation(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(3, "srun sleep 60")
    slurm.waits_for(job, "running")
    with serving(tmp_path, slurm) as server:
        server.agents_say(job, 1, NODES)
        known = until(lambda: len((found := server.job(job)).get("nodes", ())) == len(NODES) and found)
        assert (known["nodes"], known["source"], known["scheduled_as"]) == (list(NODES), "slurm", f"slurm:{job}")
        assert known["ends"] is not None

        slurm.run("scontrol", "requeue", job)
        until(lambda: server.job(job)["state"] == "pending")
        assert server.job(job)["attempt"] == 0
        slurm.run("scontrol", "update", f"jobid={job}", "starttime=now")
        until(lambda: server.job(job)["state"] == "running", 30)
        assert server.job(job)["attempt"] == 1

        # The job is cancelled, and its ranks are seen to die before the server has asked again.
        server.agents_say(job, 2, NODES, attempt=1)
        slurm.run("scancel", job)
        server.agents_say(job, 2, NODES, death(job, 1), attempt=1)
        # For as long as it takes a crash to be reported, as the next test shows.
        server.agents_go_on_saying(job, 2, 4.0, attempt=1)
        assert server.job(job)["state"] == "cancelled"
        assert server.items("incidents") == server.items("actions") == []


def test_a_job_that_fails_is_a_crash_and_its_restart_is_asked_for(slurm: Slurm, tmp_path: Path) -> None:
    fails = tmp_path / "fails"
    job = slurm.submit(3, f"until [ -e {fails} ]; do sleep 0.1; done; exit 1")
    slurm.waits_for(job, "running")
    with serving(tmp_path, slurm) as server:
        server.agents_say(job, 1, NODES)
        until(lambda: server.job(job).get("state") == "running")
        fails.touch()
        slurm.waits_for(job, "failed")
        server.agents_say(job, 2, NODES, death(job, 0))
        server.agents_go_on_saying(job, 2, 4.0)
        assert server.job(job)["state"] == "failed"
        (action,) = server.items("actions")
        assert (action["kind"], action["job"], action["state"]) == ("restart_job", job, "requested")


@pytest.mark.parametrize("end", ["time limit", "preemption"])
def test_a_job_that_slurm_ends_is_not_spoken_of(slurm: Slurm, tmp_path: Path, end: str) -> None:
    job = slurm.submit(3, "srun sleep 300")
    slurm.waits_for(job, "running")
    with serving(tmp_path, slurm) as server:
        server.agents_say(job, 1, NODES)
        until(lambda: server.job(job).get("state") == "running")
        if end == "time limit":
            slurm.run("scontrol", "update", f"jobid={job}", "endtime=now+1")
        else:
            slurm.submit(3, "sleep 300", "--partition=urgent", "--exclusive")
        until(lambda: slurm.ask()[job].state != "running", TIME_LIMIT_SEEN_S)
        server.agents_say(job, 2, NODES, death(job, 0))
        # For as long as it takes a crash to be reported, as the test above shows.
        server.agents_go_on_saying(job, 2, 4.0)
        assert server.job(job)["state"] in ({"timeout"} if end == "time limit" else {"preempted", "pending"})
        assert server.items("incidents") == server.items("actions") == []


def death(job: str, attempt: int) -> Event:
    """Return a rank's end by itself."""
    said = {"exit_code": 1, "rank": 0, "pid": 100, "goodbye": False, "job": job, "attempt": attempt}
    return Event(time.time(), "process_exit", 0, said)


def test_an_administrators_drain_is_the_nodes_standing_until_he_resumes_it(slurm: Slurm, tmp_path: Path) -> None:
    with serving(tmp_path, slurm) as server:
        server.agents_say("none", 1, NODES)
        until(lambda: len(server.items("nodes")) == 3)
        slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=bad fan")
        (node,) = until(lambda: server.items("nodes", state="excluded"))
        assert (node["node"], node["reason"], node["by"]) == ("n2", "bad fan", "slurm")
        slurm.run("scontrol", "update", "nodename=n2", "state=resume")
        until(lambda: not server.items("nodes", state="excluded"))
