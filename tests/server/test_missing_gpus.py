"""GPUs that a node shows no longer, or never showed: found without an event, reported once, and what is no proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from eagle_eye.schema.action import Report
from eagle_eye.schema.events import Event
from eagle_eye.server.accounts.bookkeeper import Bookkeeper
from eagle_eye.server.accounts.node_records import stock
from eagle_eye.server.accounts.trust import AccountSettings
from eagle_eye.server.engine import ledger
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.records import Gpu, Incident, Node, Seat
from eagle_eye.server.monitor.detection_loop import DetectionLoop
from eagle_eye.server.requests.idle_incidents import LOOK_S, SETTLED_S, MissingGpus
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import ACTIONS, INCIDENTS, NODES, Change
from tests.server.builders import NOW, FakeClock, FakeWatcher, frame
from tests.server.engine.frames import SETTINGS as DETECTION

POLICY = PolicySettings(mode="act")
MODEL = "NVIDIA H100 80GB HBM3"


class Site:
    """Nodes whose agents tell of their GPUs, with all of the server's that has to do with it, on one clock."""

    def __init__(self, folder: Path) -> None:
        self.store = open_file(folder / "records.db")
        self.clock = FakeClock()
        self.fleet = Fleet(100)
        self.keeper = Bookkeeper(
            self.store, FakeWatcher(self.clock), self.fleet, self.clock, AccountSettings(), lambda _: None
        )
        self.missing = MissingGpus(self.store, self.clock, self.fleet, lambda: POLICY, "http://eagle-eye")
        self.watch = DetectionLoop(
            Engine(DETECTION, watching_since_s=NOW), self.store, self.clock, POLICY, "http://eagle-eye"
        )
        self._sequence = 0

    def shows(
        self, node: str, *uuids: str, count: int | None = None, model: str = MODEL, links: Sequence[int] = ()
    ) -> None:
        """Have the node's agent tell of its GPUs, and an hour's worth of frames be heard."""
        if self.store.get(NODES, node) is None:
            known = Node(node=node, state="in_service", reason="", updated_s=self.clock.now_s() - 1)
            self.store.commit(Change(nodes=(known,)))
        self.hear(node)
        now_s, gpus = self.clock.now_s(), len(uuids) if count is None else count
        reported = [
            Event(now_s, "inventory", device, {"uuid": uuid, "model": model, "gpus": gpus})
            for device, uuid in enumerate(uuids)
        ]
        for event, up in zip(reported, links, strict=False):
            event.attributes["nvlinks"] = up
        self.keeper.record_events(node, reported)
        self.keeper.write_changes([], now_s)

    def hear(self, *nodes: str, nvml: str = "ok") -> None:
        for node in nodes:
            self._sequence += 1
            now_s = self.clock.now_s()
            heard = frame(self._sequence, node, now_s, job=None, ranks=[], collectors={"nvml": nvml})
            self.fleet.heard(heard, now_s)

    def pass_by(self, seconds: float, *nodes: str, nvml: str = "ok") -> list[Incident]:
        """Let the time pass in which ``nodes`` are heard; return the open incidents."""
        until_s = self.clock.now_s() + seconds
        while self.clock.now_s() < until_s:
            self.clock.advance(LOOK_S)
            self.hear(*nodes, nvml=nvml)
            self.missing.update_incidents()
            self.watch.tick(self.clock.now_s())
        return self.store.open_incidents()

    def put_back(self, node: str) -> None:
        record = self.store.get(NODES, node)
        assert record is not None
        back = ledger.readmit(record, "as it is", "tok_1", self.clock.now_s(), 0.0)
        self.store.commit(Change(nodes=(back,)))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.store.close()


def booted_without_one(site: Site) -> None:
    site.shows("n1", "GPU-0", "GPU-1", "GPU-2")
    site.clock.advance(600)
    site.shows("n1", "GPU-0", "GPU-2")


def test_a_gpu_that_is_missing_after_a_boot_drains_its_node(site: Site) -> None:
    booted_without_one(site)
    assert site.pass_by(SETTLED_S - LOOK_S, "n1") == []
    (incident,) = site.pass_by(3 * LOOK_S, "n1")
    assert (incident.fault, incident.job, incident.node) == ("gpu_lost", "", "n1")
    assert incident.summary == "n1 shows 2 of its 3 GPUs; missing: GPU-1 (device 1)"
    (action,) = site.store.all(ACTIONS)
    assert (action.kind, action.exclude, action.restart) == ("drain_node", ["n1"], False)
    assert len(site.pass_by(7_200, "n1")) == 1  # and is reported once


def test_it_is_over_once_the_gpu_is_back_or_exchanged(site: Site) -> None:
    for come in ("GPU-1", "GPU-new"):
        booted_without_one(site)
        assert len(site.pass_by(SETTLED_S + LOOK_S, "n1")) == 1
        site.shows("n1", "GPU-0", come, "GPU-2")
        assert {incident.state for incident in site.pass_by(LOOK_S, "n1")} <= {"recovered"}
        site.clock.advance(3_600)
        site.pass_by(LOOK_S, "n1")


GPUS = ("GPU-0", "GPU-1", "GPU-2")


def test_an_nvlink_that_is_missing_after_a_boot_drains_its_node(site: Site) -> None:
    site.shows("n1", *GPUS, links=(18, 17, 18))
    (incident,) = site.pass_by(SETTLED_S + LOOK_S, "n1")
    assert (incident.fault, incident.job, incident.device) == ("nvlink_degraded", "", 1)
    assert incident.summary == "n1 has fewer than 18 NVLinks up: gpu1 17"
    (action,) = site.store.all(ACTIONS)
    assert (action.kind, action.exclude, action.restart) == ("drain_node", ["n1"], False)
    site.shows("n1", *GPUS, links=(18, 18, 18))
    assert {incident.state for incident in site.pass_by(LOOK_S, "n1")} <= {"recovered"}


def test_links_that_all_of_a_node_have_no_longer_are_reported_and_no_more(site: Site) -> None:
    site.shows("n1", *GPUS, links=(18, 18, 18))
    site.clock.advance(600)
    site.shows("n1", *GPUS, links=(0, 0, 0))
    (incident,) = site.pass_by(SETTLED_S + LOOK_S, "n1")
    assert (incident.fault, incident.asks) == ("nvlink_degraded", "notify")
    assert site.store.all(ACTIONS) == []


@pytest.mark.parametrize("links", [(), (0, 0, 0), (18, 18)])
def test_links_that_are_not_used_or_not_all_reported_are_not_missed(site: Site, links: tuple[int, ...]) -> None:
    site.shows("n1", *GPUS, links=links)
    assert site.pass_by(SETTLED_S + LOOK_S, "n1") == []


def test_a_person_who_puts_the_node_back_as_it_is_is_heeded(site: Site) -> None:
    booted_without_one(site)
    site.pass_by(SETTLED_S + LOOK_S, "n1")
    (action,) = site.store.all(ACTIONS)
    done = ledger.report_action(action, Report("done", "drained"), "slurm", site.clock.now_s())
    record = site.store.get(NODES, "n1")
    assert record is not None
    out = ledger.take_out(record, action.fault, "drained", "draining", site.clock.now_s())
    site.store.commit(Change(actions=(done,), nodes=(out,)))
    assert len(site.pass_by(3_600, "n1")) == 1  # it stands while the node is out
    site.put_back("n1")
    site.pass_by(7_200, "n1")
    assert len(site.store.all(ACTIONS)) == 1
    site.shows("n1", "GPU-0")  # another one is another matter
    found = site.pass_by(SETTLED_S + LOOK_S, "n1")
    assert [i.summary.partition(";")[0] for i in found if i.state != "recovered"] == ["n1 shows 1 of its 3 GPUs"]


def test_one_that_was_called_a_false_alarm_is_not_reported_again(site: Site) -> None:
    booted_without_one(site)
    (incident,) = site.pass_by(SETTLED_S + LOOK_S, "n1")
    site.store.commit(Change(incidents=(replace(incident, state="false", ended_s=site.clock.now_s()),)))
    site.pass_by(7_200, "n1")
    assert [one.state for one in site.store.all(INCIDENTS)] == ["false"]


@pytest.mark.parametrize("nvml", ["failed: gpu 1: no answer for 30 s", "unsupported: no driver"])
def test_a_driver_that_does_not_answer_for_all_is_no_proof(site: Site, nvml: str) -> None:
    booted_without_one(site)
    assert site.pass_by(3_600, "n1", nvml=nvml) == []


def test_silence_and_a_node_that_is_out_are_no_proof_either(site: Site) -> None:
    booted_without_one(site)
    assert site.pass_by(3_600) == []
    record = site.store.get(NODES, "n1")
    assert record is not None
    site.store.commit(Change(nodes=(replace(record, state="excluded"),)))
    assert site.pass_by(3_600, "n1") == []


def test_a_job_that_lost_the_gpu_has_reported_it(site: Site) -> None:
    booted_without_one(site)
    fields: dict[str, Any] = {"onset_s": NOW, "detected_s": NOW, "updated_s": NOW, "since_s": NOW, "seen_s": NOW}
    known = Incident(
        id="inc_1", job="llm", attempt=0, fault="gpu_lost", nodes=["n1"], node="n1", device=1, confidence=0.99,
        state="confirmed", ended_s=None, detectors=["gpu_lost"], summary="", evidence=[], action="none",
        family="stop", kinds=["xid"], fact=True, **fields,
    )  # fmt: skip
    site.store.commit(Change(incidents=(known,)))
    assert [one.id for one in site.pass_by(SETTLED_S + LOOK_S, "n1")] == ["inc_1"]


def test_a_look_of_which_a_part_was_lost_and_agents_that_do_not_count_say_nothing(site: Site) -> None:
    site.shows("n1", "GPU-0", "GPU-1", "GPU-2")
    site.clock.advance(600)
    site.shows("n1", "GPU-0", "GPU-2", count=3)
    assert site.pass_by(3_600, "n1") == []
    site.shows("n1", "GPU-0", "GPU-2", count=0)
    assert site.pass_by(3_600, "n1") == []


def test_a_gpu_that_moved_to_another_node_is_not_missed(site: Site) -> None:
    booted_without_one(site)
    site.shows("n2", "GPU-1", "GPU-7", "GPU-8")
    assert site.pass_by(3_600, "n1", "n2") == []


def test_a_node_that_always_had_fewer_than_its_like_is_only_reported(site: Site) -> None:
    for node in range(5):
        site.shows(f"n{node}", *(f"GPU-{node}-{gpu}" for gpu in range(3 if node == 4 else 4)))
    nodes = [f"n{node}" for node in range(5)]
    (incident,) = site.pass_by(SETTLED_S + 2 * LOOK_S, *nodes)
    assert (incident.fault, incident.node, incident.asks) == ("host_errors", "n4", "notify")
    assert "n4 shows 3 GPUs, nearly all other nodes with NVIDIA H100 80GB HBM3 show 4" in incident.summary
    assert len(site.pass_by(7_200, *nodes)) == 1
    assert {action.kind for action in site.store.all(ACTIONS)} <= {"notify"}
    site.shows("n4", *(f"GPU-4-{gpu}" for gpu in range(4)))
    assert {one.state for one in site.pass_by(LOOK_S, *nodes)} <= {"recovered"}


def test_a_fleet_of_two_kinds_of_nodes_has_no_usual_number(site: Site) -> None:
    for node in range(6):
        site.shows(f"n{node}", *(f"GPU-{node}-{gpu}" for gpu in range(2 if node % 2 else 4)))
    assert site.pass_by(SETTLED_S + 2 * LOOK_S, *(f"n{node}" for node in range(6))) == []


def gpu(uuid: str, seen_s: float, told_with: int = 2, **more: Any) -> Gpu:
    fields: dict[str, Any] = {"node": "n1", "device": 0, "model": MODEL, "since_s": 0.0, "first_seen_s": 0.0, **more}
    return Gpu(uuid=uuid, seen_s=seen_s, told_with=told_with, **fields)


def test_one_that_came_from_another_seat_of_the_node_takes_no_others_place() -> None:
    seat = Seat("n1", 2, 0.0, 500.0)
    found = stock([gpu("a", 600.0), gpu("b", 600.0, since_s=500.0, moves=[seat]), gpu("c", 400.0)])
    assert found is not None
    assert [one.uuid for one in found.missing] == ["c"]


def test_one_that_nobody_has_seen_for_a_month_is_not_missed() -> None:
    found = stock([gpu("a", 40 * 86_400.0, told_with=1), gpu("c", 0.0)])
    assert found is not None
    assert found.missing == ()


def test_of_no_gpus_nothing_is_known() -> None:
    assert stock([]) is None
