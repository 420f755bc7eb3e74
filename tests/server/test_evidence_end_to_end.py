"""Evidence before the kill: the detection loop asks, a real agent gathers from a real process, the action follows."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from eagle_eye.agent.clock import SystemClock as AgentClock
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.evidence.gather import EVIDENCE, EvidenceGatherer, FlightDumps, standard_sources
from eagle_eye.agent.evidence.requests import EvidenceResponder, Upload, UploadTarget
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.schema.frame import Frame
from eagle_eye.server.admin.flight_recorder_command import read_folder
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.settings import EvidenceSettings, PolicySettings
from eagle_eye.server.model.records import EvidenceRequest, Incident
from eagle_eye.server.monitor.detection_loop import DetectionLoop
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import ACTIONS, INCIDENTS, Change
from eagle_eye.server.store.store import EVIDENCE as RECORDS
from tests.server.builders import Running, body, frame, incident, running
from tests.server.engine.frames import SETTINGS, Fleet
from tests.server.test_end_to_end import eventually
from tests.server.test_evidence import evidence
from tests.server.test_watch import TwoClocks


class Site:
    """A fleet whose frames go to a DetectionLoop that may ask for evidence; ``gathers`` is what n1's agent says."""

    def __init__(self, folder: Path, gathers: str = "ok") -> None:
        self.store = open_file(folder / "records.db")
        self.clock = TwoClocks()
        self.fleet = Fleet()
        self.gathers = gathers
        engine = Engine(SETTINGS, watching_since_s=self.clock.now_s())
        policy = PolicySettings(mode="act", verdict_gone_s=10)
        self.watch = DetectionLoop(
            engine, self.store, self.clock, policy, "http://eagle-eye", EvidenceSettings(wait_s=5.0)
        )

    def frame(self, node: str) -> Frame:
        made = self.fleet.frame(node)
        return msgspec.structs.replace(made, collectors={"evidence": self.gathers}) if self.gathers else made

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.fleet.now_s = self.clock.now_s()
            self.fleet.step += 0.0 if self.fleet.stopped else 1.0
            for node in self.fleet.nodes:
                self.watch.observe(self.frame(node), self.clock.now_s(), 0.0)
            self.watch.tick(self.clock.now_s())

    def hang(self) -> None:
        self.run(30)
        self.fleet.stopped, self.fleet.silent_s = True, {"n1": 9.0}
        for _ in range(20):
            self.run(1)
            if self.asked or len(self.store.all(ACTIONS)):
                return

    @property
    def asked(self) -> list[EvidenceRequest]:
        return self.store.all(RECORDS)

    @property
    def incident(self) -> Incident:
        (found,) = self.store.all(INCIDENTS)
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.store.close()


def test_the_request_is_on_record_before_the_action_and_holds_it_back(site: Site) -> None:
    site.hang()
    assert [(e.node, e.state, e.incident_id) for e in site.asked] == [("n1", "asked", site.incident.id)]
    assert site.store.all(ACTIONS) == []
    assert site.incident.hold.startswith("evidence is gathered on n1")


def test_the_action_follows_at_the_tick_after_the_bundle(site: Site) -> None:
    site.hang()
    (asked,) = site.asked
    site.store.commit(Change(evidence=(msgspec.structs.replace(asked, state="received"),)))
    site.run(1)
    assert [action.exclude for action in site.store.all(ACTIONS)] == [["n1"]]
    assert site.incident.hold == ""


def test_a_second_try_waits_for_no_second_bundle(site: Site) -> None:
    site.watch.use_policy(PolicySettings(mode="act", verdict_gone_s=10, tries_max=2, retry_s=1))
    site.hang()
    site.run(5)
    (action,) = site.store.all(ACTIONS)
    failed = msgspec.structs.replace(action, state="failed", updated_s=site.clock.now_s())
    site.store.commit(Change(actions=(failed,)))
    site.run(3)
    assert [a.state for a in site.store.all(ACTIONS)] == ["failed", "requested"]
    assert len(site.asked) == 1


def test_the_action_follows_without_a_bundle_when_the_time_is_over(site: Site) -> None:
    site.hang()
    site.run(5)
    assert len(site.store.all(ACTIONS)) == 1
    assert len(site.asked) == 1


@pytest.mark.parametrize("gathers", ["", "failed: 256 threads hang", "unsupported: switched off"])
def test_an_agent_that_does_not_say_that_it_gathers_costs_no_time(tmp_path: Path, gathers: str) -> None:
    site = Site(tmp_path, gathers)
    site.hang()
    assert site.asked == []
    assert len(site.store.all(ACTIONS)) == 1
    site.store.close()


def test_an_agent_that_fell_silent_costs_no_time(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.run(30)
    site.gathers = ""  # n1's agent, and all others, were replaced by an old version
    site.hang()
    assert len(site.store.all(ACTIONS)) == 1
    site.store.close()


BLOCKED = "import threading; l = threading.Lock(); l.acquire(); print('ready', flush=True); l.acquire()"


@pytest.fixture
def rank() -> Iterator[TrainingProcess]:
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield TrainingProcess(process.pid, "job", 0, 1, 0)
        process.kill()


def agent_of(server: Running, rank: TrainingProcess) -> EvidenceResponder:
    upload = Upload(UploadTarget(Servers([server.url]), lambda: ""), AgentClock())
    gatherer = EvidenceGatherer("n1", "0", standard_sources())
    return EvidenceResponder(gatherer, lambda: [rank], upload.send, Drops())


def bundle_of(server: Running, id_: str) -> dict[str, bytes]:
    answer: httpx.Response = server.client.get(f"/api/v1/evidence/{id_}/bundle")
    with tarfile.open(fileobj=io.BytesIO(answer.content), mode="r:gz") as tar:
        return {member.name: (tar.extractfile(member) or io.BytesIO()).read() for member in tar.getmembers()}


def test_what_the_server_asks_for_the_agent_brings(tmp_path: Path, rank: TrainingProcess) -> None:
    with running(tmp_path) as server:
        agent = agent_of(server, rank)
        server.dispatcher.services.store.commit(Change(incidents=(incident(),), evidence=(evidence(),)))
        agent.answered(server.send(body(frame(1))).json())
        eventually(lambda: server.client.get("/api/v1/evidence/ev_1").json()["state"] == "received")
        agent.close()
        files = bundle_of(server, "ev_1")
    assert b"futex" in files[f"n1/processes/rank-0-pid-{rank.pid}.txt"]
    assert msgspec.json.decode(files["n1/manifest.json"])["kind"] == EVIDENCE


def test_a_bundle_that_the_server_does_not_take_is_no_longer_waited_for(tmp_path: Path, rank: TrainingProcess) -> None:
    with running(tmp_path, evidence__bundle_bytes_max=1024) as server:
        agent = agent_of(server, rank)
        server.dispatcher.services.store.commit(Change(incidents=(incident(),), evidence=(evidence(),)))
        reported = server.send(body(frame(1))).json()
        del reported["requests"][0]["bytes_max"]  # or the agent would keep to it
        agent.answered(reported)
        eventually(lambda: server.client.get("/api/v1/evidence/ev_1").json()["state"] == "failed")
        agent.close()
        assert "evidence.bundle_bytes_max" in server.client.get("/api/v1/evidence/ev_1").json()["detail"]


def test_dumps_of_many_nodes_unpack_into_one_folder_that_the_analysis_reads(tmp_path: Path) -> None:
    for number in range(2):
        dump = {"pg_config": {"0": {"name": "0", "desc": "", "ranks": "[0, 1]"}}, "entries": []}
        (tmp_path / f"fr_{number}").write_bytes(pickle.dumps(dump, protocol=2))
    environment = {**os.environ, "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "fr_")}
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for number in range(2):
            os.utime(tmp_path / f"fr_{number}")
            rank = TrainingProcess(process.pid, "job", number, 2, 0)
            gatherer = EvidenceGatherer(f"n{number}", "0", {EVIDENCE: [FlightDumps()]})
            _, content = gatherer.gather(EVIDENCE, [rank], 2.0)
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
                tar.extractall(out, filter="data")
        process.kill()
    folder = read_folder(out / "flight-recorder" / "job")
    assert [recording.rank for recording in folder.recordings] == [0, 1]
    assert folder.unreadable == folder.skipped == []
    assert sorted(path.name for path in out.iterdir()) == ["flight-recorder", "n0", "n1"]
