"""``eagle-eye record``: what a running server saw, as a trace that gives the same verdict."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from eagle_eye.cli.arguments import moment
from eagle_eye.cli.main import main
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import CONTENT_TYPE, Frame, Rank, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.recording import BrokenStream, messages
from eagle_eye.server.api import metric_history as api
from eagle_eye.server.app import create_app
from eagle_eye.server.backtest.run import Backtest, VerdictLine
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings
from eagle_eye.server.history.history import Recorded, job_frames
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.records import Gpu, Incident
from eagle_eye.server.monitor.detection_loop import DetectionLoop
from eagle_eye.server.parts import Services
from eagle_eye.server.store.store import INCIDENTS, Change, Store
from eagle_eye.server.web.dispatcher import Dispatcher
from tests.server.builders import NOW, FakeClock, body, settings

NODES = ("n0", "n1", "n2", "n3")
STOPPED = "n1"
FAULT_S = 40


class StillWatch(DetectionLoop):
    """The real detection loop, ticked by the test."""

    async def run(self) -> None:
        await asyncio.Event().wait()


@dataclass
class Site:
    """A real server with a job on four nodes, and a clock that the test moves."""

    dispatcher: Dispatcher[Services]
    client: httpx.Client
    clock: FakeClock
    watch: StillWatch
    url: str

    def send(self, frame: Frame) -> None:
        answer = self.client.post(
            "/api/v1/frames", content=body(frame, sent_s=self.clock.time_s), headers={"content-type": CONTENT_TYPE}
        )
        assert answer.status_code == 200, answer.text

    def say(self, state: str, attempt: int = 0, nodes: tuple[str, ...] = NODES) -> None:
        ranks = [{"rank": i, "node": node, "device": 0, "role": "pp0/H100"} for i, node in enumerate(nodes)]
        update = {"attempt": attempt, "state": state, "ranks": ranks}
        assert self.client.put("/api/v1/jobs/train", json=update).status_code == 200

    def incidents(self) -> list[Incident]:
        return self.dispatcher.services.store.all(INCIDENTS)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    clock = FakeClock()
    watches: list[StillWatch] = []

    def watcher(config: ServerConfig, store: Store, clock: Clock) -> StillWatch:
        engine = Engine(config.detection, watching_since_s=clock.now_s())
        watches.append(StillWatch(engine, store, clock, config.policy, config.public_url))
        return watches[0]

    front = create_app(settings(tmp_path / "data"), clock, watcher)
    server = uvicorn.Server(uvicorn.Config(front, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        monkeypatch.setenv("EAGLE_EYE_SERVER", url)
        with httpx.Client(base_url=url, timeout=10.0, trust_env=False) as client:
            yield Site(front, client, clock, watches[0], url)
    finally:
        front.stop()
        server.should_exit = True
        thread.join(10.0)
        assert not thread.is_alive()


def frame(node: str, second: int, attempt: int = 0, **more: Any) -> Frame:
    """Return one second of a node whose job stands still once the rank on n1 has stopped."""
    index = NODES.index(node)
    stopped = node == STOPPED and second > FAULT_S
    step = float(min(second, FAULT_S))
    rank = Rank("train", index, len(NODES), 0, attempt, role="pp0/H100", silent_s=max(0.0, second - FAULT_S) * stopped)
    values = {
        "gpu_power_watts": 300.0,
        "gpu_ecc_corrected_total": 2.0**30 + second,
        "train_step": step,
        "train_step_seconds": 1.0,
        "train_loss": float("inf") if second == 1 else 2.0,
        "nccl_sequence": step * 4 + (second > FAULT_S and not stopped),
        "nccl_completed_sequence": step * 4,
    }
    fields: dict[str, Any] = {
        "version": 1,
        "node": node,
        "boot_id": "boot",
        "stream": f"stream-{node}",
        "sequence": second,
        "time_s": NOW + second,
        "interval_s": 1.0,
        "agent_version": "1.2",
        "job": "train",
        "ranks": [rank],
        "blocks": [
            block(Scope.DEVICE, {0: values}),
            block(Scope.NODE, {-1: {"node_blocked_tasks": 1.0}}),
            block(Scope.LINK, {"mlx5_0": {"link_up": 1.0}}),
        ],
        "events": [Event(NOW + second, "phase", 0, {"name": "train", "job": "train"})] if second == 1 else [],
    }
    return Frame(**{**fields, **more})


def live(site: Site, seconds: int = 60) -> None:
    """Run the job on the server for so long."""
    site.say("running")
    for second in range(1, seconds + 1):
        site.clock.time_s = NOW + second
        for node in NODES:
            site.send(frame(node, second))
        site.watch.tick(site.clock.time_s)


def recorded(out: Path, *flags: str, since_s: float = NOW, until_s: float = NOW + 90) -> int:
    return main(["record", str(out), "--job", "train", "--since", str(since_s), "--until", str(until_s), *flags])


def backtest(folder: Path) -> list[VerdictLine]:
    return list(Backtest(Trace(folder), DetectionSettings(), PolicySettings()).run())


def test_a_recorded_fault_gives_the_verdict_that_it_gave_live(site: Site, tmp_path: Path) -> None:
    live(site)
    (incident,) = site.incidents()
    assert (incident.fault, incident.nodes) == ("hang", [STOPPED]), "the site's own story"
    assert recorded(tmp_path / "t") == 0
    lines = backtest(tmp_path / "t")
    assert {(line.fault, tuple(line.nodes)) for line in lines} == {("hang", (STOPPED,))}
    assert lines[-1].action == incident.action
    assert set(lines[-1].detectors) == set(incident.detectors)
    assert abs(lines[0].time - incident.detected_s) <= 1.0
    assert abs(lines[0].onset - incident.onset_s) <= 1.0


def test_the_trace_has_all_that_the_nodes_said(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live(site, 45)
    assert recorded(tmp_path / "t", "--json") == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["nodes"], reported["frames"], reported["events"]) == (4, 180, 4)
    trace = Trace(tmp_path / "t")
    header = trace.header
    assert (header.interval_s, header.start, header.end) == (1.0, NOW, NOW + 45), "not beyond the server's now"
    assert [(node.node, node.gpus, [link.link for link in node.links]) for node in header.nodes] == [
        (node, 1, ["mlx5_0"]) for node in NODES
    ]
    assert [(rank.rank, rank.node, rank.pp, rank.role) for rank in header.ranks] == [
        (i, node, 0, "pp0/H100") for i, node in enumerate(NODES)
    ]
    back = {}
    for step in trace.steps():
        if step.frame is not None and step.frame.blocks:
            back[step.frame.node, round(step.time_s - NOW)] = step.frame
    for node in NODES:
        for second in (1, 30, 44):
            sent, got = frame(node, second), back[node, second]
            assert got.blocks == sent.blocks
            assert [(r.rank, r.role, r.silent_s) for r in got.ranks] == [
                (r.rank, r.role, r.silent_s) for r in sent.ranks
            ]


@pytest.mark.parametrize(("known", "expected"), [(NODES, "NVIDIA H100 PCIe"), (NODES[1:], None)])
def test_the_trace_names_the_gpus_where_all_nodes_are_known(
    site: Site, tmp_path: Path, known: tuple[str, ...], expected: str | None
) -> None:
    live(site, 5)
    cards = (
        Gpu(uuid=node, node=node, device=0, model="NVIDIA H100 PCIe", since_s=NOW, first_seen_s=NOW, seen_s=NOW)
        for node in known
    )
    site.dispatcher.services.store.commit(Change(gpus=tuple(cards)))
    assert recorded(tmp_path / "t") == 0
    assert [node.gpu_model for node in Trace(tmp_path / "t").header.nodes] == [expected] * len(NODES)


def test_what_the_scheduler_said_is_in_the_trace_by_attempt(site: Site, tmp_path: Path) -> None:
    site.say("running")
    for second in (1, 2, 3, 4, 5, 6):
        site.clock.time_s = NOW + second
        if second == 4:
            site.say("running", attempt=1, nodes=NODES[:2])
        if second == 6:
            site.say("cancelled", attempt=1, nodes=NODES[:2])
        for node in NODES[: 2 if second >= 4 else 4]:
            site.send(frame(node, second, attempt=int(second >= 4)))
    assert recorded(tmp_path / "t") == 0
    jobs = [step.job for step in Trace(tmp_path / "t").steps() if step.job is not None]
    story = [(job.updated_s - NOW, job.attempt, job.state, len(job.ranks)) for job in jobs]
    assert [reported for reported in story if reported[3] or reported[2] != "running"] == [
        (0, 0, "running", 4),
        (4, 1, "running", 2),
        (6, 1, "cancelled", 0),
    ]


def test_a_later_attempt_can_be_recorded_alone(site: Site, tmp_path: Path) -> None:
    site.say("running", attempt=3)
    for second in (1, 2, 3):
        site.clock.time_s = NOW + second
        site.send(frame("n0", second, attempt=3))
    assert recorded(tmp_path / "t", since_s=NOW + 1.5) == 0
    jobs = [step.job for step in Trace(tmp_path / "t").steps() if step.job is not None]
    assert {job.attempt for job in jobs} == {3}


def test_a_member_whose_processes_died_is_recorded_still() -> None:
    reported = [frame("n0", 1), frame("n0", 2, ranks=[], job=None), frame("n1", 1, ranks=[], job=None)]
    found = job_frames((Recorded(one, 0.0, 0.0) for one in reported), "train", set())
    assert [(one.node, one.sequence) for one in found] == [("n0", 1), ("n0", 2)]


def test_what_a_node_says_of_another_job_is_left_out() -> None:
    one = frame(
        "n0",
        1,
        ranks=[Rank("train", 0, 4, 0), Rank("other", 0, 1, 1)],
        blocks=[block(Scope.DEVICE, {0: {"train_step": 1.0}, 1: {"train_step": 9.0}})],
        events=[Event(NOW, "phase", 1, {"name": "eval", "job": "other"}), Event(NOW, "xid", 1, {"code": 79})],
    )
    (kept,) = job_frames([Recorded(one, 0.0, 0.0)], "train", set())
    assert [rank.job for rank in kept.ranks] == ["train"]
    assert kept.blocks == [block(Scope.DEVICE, {0: {"train_step": 1.0}})]
    assert [event.kind for event in kept.events] == ["xid"]


def test_times_are_on_the_servers_clock() -> None:
    (kept,) = job_frames([Recorded(frame("n0", 1), 0.0, 100.0)], "train", set())
    assert (kept.time_s, kept.events[0].time_s) == (NOW + 101, NOW + 101)


def test_nothing_is_overwritten(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.send(frame("n0", 1))
    (tmp_path / "t").mkdir()
    assert recorded(tmp_path / "t") == 1
    assert "exists already" in capsys.readouterr().err


def test_an_unknown_job_is_told_with_those_that_are_known(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.send(frame("n0", 1))
    assert main(["record", str(tmp_path / "t"), "--job", "trian", "--since", str(NOW), "--until", str(NOW + 9)]) == 1
    assert "the server knows 'train'" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_a_time_without_anything_is_told(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.send(frame("n0", 1))
    assert recorded(tmp_path / "t", since_s=NOW - 100, until_s=NOW - 50) == 1
    assert "nothing of job 'train' in that time" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recorded(tmp_path / "t", "--server", "http://127.0.0.1:1") == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        ("now", NOW),
        ("-15m", NOW - 900),
        ("90s", NOW - 90),
        ("-1.5h", NOW - 5_400),
        ("-2d", NOW - 172_800),
        ("1699999999.5", 1_699_999_999.5),
        ("2023-11-14T22:13:20Z", NOW),
    ],
)
def test_times_are_told_in_three_ways(text: str, expected_s: float) -> None:
    assert moment("--since", text, NOW) == expected_s


@pytest.mark.parametrize("text", ["yesterday", "2023-11-14", "-15", "-15y"])
def test_other_times_are_wrong_usage(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--since: expected RFC 3339"):
        moment("--since", text, NOW)


def test_an_age_is_no_option_to_the_command(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.send(frame("n0", 1))
    assert main(["record", str(tmp_path / "t"), "--job", "train", "--since", "-15m", "--until", "-5m"]) == 1
    assert "nothing of job" in capsys.readouterr().err
    assert main(["record", str(tmp_path / "t"), "--job", "train", "--since", "-5m", "--until", "-15m"]) == 2


def test_a_stream_that_was_cut_off_is_no_recording() -> None:
    whole = b"\x00\x00\x00\x02ab\x00\x00\x00\x00"
    assert list(messages(io.BytesIO(whole).read)) == [b"ab"]
    for length in range(len(whole)):
        with pytest.raises(BrokenStream, match="cut off"):
            list(messages(io.BytesIO(whole[:length]).read))


def test_too_many_readers_are_asked_to_come_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RECORDINGS_MAX", 0)
    answer = site.client.get("/api/v1/jobs/train/recording", params={"start": str(NOW), "end": str(NOW + 1)})
    assert (answer.status_code, answer.json()["reason"]) == (503, "busy")


def test_it_takes_a_token_of_scope_read(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.send(frame("n0", 1))
    data = site.dispatcher.services.config.data_dir
    tokens = {}
    for scope, more in (("agent", ["--node", "n0"]), ("read", [])):
        assert main(["tokens", "create", "--scope", scope, *more, "--data", data]) == 0
        tokens[scope] = tmp_path / scope
        (found,) = [word for word in capsys.readouterr().out.split() if word.startswith("ee_")]
        tokens[scope].write_text(found)
    assert recorded(tmp_path / "t") == 1
    assert recorded(tmp_path / "t", "--token-file", str(tokens["agent"])) == 1
    assert "HTTP 403" in capsys.readouterr().err
    assert recorded(tmp_path / "t", "--token-file", str(tokens["read"])) == 0
