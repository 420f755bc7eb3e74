"""Idle nodes that are asked to look for silent corruption: by whom they count as idle, and what a wrong number does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from eagle_eye.schema import action as schema
from eagle_eye.schema.action import Report
from eagle_eye.schema.frame import Rank
from eagle_eye.server.engine import ledger
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.idle_faults import IdleCheckSettings
from eagle_eye.server.engine.settings import Maintenance, Mode, PolicySettings
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.model.records import CheckOutcome, Figure, Gpu, Incident, Node, NodeCheck, Subscription
from eagle_eye.server.monitor.detection_loop import DetectionLoop
from eagle_eye.server.requests.node_checks import IdleChecks, NodeChecks
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import ACTIONS, DELIVERIES, EVENTS, GPU_CHECKS, INCIDENTS, NODE_CHECKS, NODES, Change
from tests.server.builders import NOW, FakeClock, frame
from tests.server.engine.frames import SETTINGS as DETECTION

SETTINGS = IdleCheckSettings(weekly_budget_s=180, check_s=60, every_s=3_600, idle_s=600, nodes_at_once=2)
RUN = "a1" * 16
UUID = "GPU-0a1b2c3d-0000-4444-8888-123456789abc"
OTHER = "GPU-ffffffff-0000-4444-8888-123456789abc"


class Site:
    """A fleet of idle nodes with everything of the server's that has to do with their checks, on one clock."""

    def __init__(self, folder: Path, mode: Mode = "act") -> None:
        self.store = open_file(folder / "records.db")
        self.clock = FakeClock()
        self.fleet = Fleet(100)
        self.policy = PolicySettings(mode=mode)
        self.counted: list[str] = []
        self.checks = NodeChecks(self.store, self.clock, lambda: self.policy, self.counted.append, "http://eagle-eye")
        self.idle = self.new_idle()
        self.watch = DetectionLoop(
            Engine(DETECTION, watching_since_s=NOW), self.store, self.clock, self.policy, "http://eagle-eye"
        )
        self._sequence = 0

    def new_idle(self, settings: IdleCheckSettings = SETTINGS) -> IdleChecks:
        return IdleChecks(self.store, self.clock, self.fleet, settings, lambda: self.policy, lambda: ())

    def has(self, *nodes: str, **more: Any) -> None:
        fields = {"state": "in_service", "reason": "", "updated_s": NOW - 1_000, **more}
        self.store.commit(Change(nodes=tuple(Node(node=node, **fields) for node in nodes)))
        self.hear(*nodes)

    def hear(self, *nodes: str, says: str = "ok", job: str | None = None, ranks: tuple[Rank, ...] = ()) -> None:
        for node in nodes:
            self._sequence += 1
            collectors = {"node_check": says} if says else {}
            heard = frame(self._sequence, node, self.clock.now_s(), job=job, ranks=list(ranks), collectors=collectors)
            self.fleet.heard(heard, self.clock.now_s())

    def pass_by(self, seconds: float, *nodes: str, busy: tuple[str, ...] = ()) -> list[str]:
        """Let the time pass, look, and return whom that asked; ``nodes`` are heard as before meanwhile."""
        self.clock.advance(seconds)
        self.hear(*nodes)
        return self.idle.request_due_checks(busy)

    def asked(self, node: str = "n1") -> NodeCheck:
        """Have the node idle until it is asked; return its check."""
        self.has(node)
        assert self.pass_by(0, node) == []
        assert self.pass_by(600, node) == [node]
        (check,) = self.store.page(NODE_CHECKS, {"node": node}).items
        return check

    def ends(self, check: NodeCheck, *outcomes: CheckOutcome, verdict: Any = "sick") -> NodeCheck:
        self.checks.begun(check.id, RUN)
        self.clock.advance(60)
        return self.checks.ended(check.id, verdict, "; ".join(one.reason for one in outcomes), outcomes)

    def tick(self, seconds: float = 1.0) -> None:
        self.clock.advance(seconds)
        self.watch.tick(self.clock.now_s())

    def incidents(self) -> list[Incident]:
        return self.store.all(INCIDENTS)

    def node(self, name: str = "n1") -> Node:
        found = self.store.get(NODES, name)
        assert found is not None
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.store.close()


def gpu(uuid: str = UUID, node: str = "n1", device: int = 3) -> Gpu:
    return Gpu(uuid=uuid, node=node, device=device, model="H100", since_s=NOW, first_seen_s=NOW, seen_s=NOW)


def outcome(wrong: float = 0.0, name: str = "sdc_gemm", device: str = UUID) -> CheckOutcome:
    return CheckOutcome(
        name=name,
        state="sick" if wrong else "passed",
        reason=f"gpu 3: {wrong:.0f} wrong numbers ({device})" if wrong else "nothing found in 45 s, 4000 products",
        values=[
            Figure("wrong_numbers", wrong, "1", device, 0.0),
            Figure("operations", 4_000.0, "1", device),
            Figure("compared_seconds", 45.0, "s", device),
        ],
    )


def test_a_node_without_a_job_is_asked_for_a_search_within_its_budget(site: Site) -> None:
    check = site.asked()
    assert (check.purpose, check.fault, check.asked_by) == ("idle", "silent_data_corruption", "server")
    (reported,) = site.checks.asked_of("n1")
    assert reported == {
        "id": check.id,
        "kind": "node_check",
        "deadline_s": 180.0,
        "checks": ["sdc_gemm", "sdc_all_reduce"],
        "gemm_s": 0.0,
        "sdc_s": 60.0,
    }


def test_a_week_has_no_more_checks_than_its_budget_pays(site: Site) -> None:
    site.ends(site.asked(), outcome(), verdict="healthy")
    asked = 1
    for _ in range(24 * 6):
        if site.pass_by(3_600, "n1"):
            asked += 1
            (check,) = [one for one in site.store.all(NODE_CHECKS) if one.state == "asked"]
            site.ends(check, outcome(), verdict="healthy")
    assert asked == 3


def test_a_server_that_starts_again_knows_what_it_has_asked(site: Site) -> None:
    site.ends(site.asked(), outcome(), verdict="healthy")
    site.idle = site.new_idle()
    assert [site.pass_by(600, "n1") for _ in range(3)] == [[], [], []]


@pytest.mark.parametrize("state", ["draining", "excluded"])
def test_a_node_that_somebody_took_out_is_left_alone(site: Site, state: str) -> None:
    site.has("n1", state=state, by="alice", reason="firmware")
    assert [site.pass_by(600, "n1") for _ in range(3)] == [[], [], []]


def test_a_node_in_maintenance_is_left_alone(site: Site) -> None:
    site.policy = PolicySettings(maintenance=[Maintenance(from_s=NOW, until_s=NOW + 86_400.0, nodes=["n1"])])
    site.has("n1", "n2")
    site.pass_by(0, "n1", "n2")
    assert site.pass_by(600, "n1", "n2") == ["n2"]


def test_an_agent_that_makes_no_checks_is_not_asked(site: Site) -> None:
    site.has("n1")
    for says in ("", "failed: no memory"):
        site.hear("n1", says=says)
        assert [site.pass_by(600), site.pass_by(10)] == [[], []]


def test_a_node_that_works_for_a_job_by_anybodys_word_is_not_idle(site: Site) -> None:
    site.has("agent", "launcher")
    for _ in range(3):
        site.clock.advance(600)
        site.hear("agent", job="llm", ranks=(Rank("llm", 0, 1, 0),))
        site.hear("launcher")
        assert site.idle.request_due_checks(("launcher",)) == []


def test_a_node_between_two_attempts_is_not_idle_yet(site: Site) -> None:
    site.has("n1")
    site.pass_by(0, "n1")
    assert site.pass_by(599, "n1", busy=("n1",)) == []
    assert site.pass_by(1, "n1") == []
    assert site.pass_by(599, "n1") == []
    assert site.pass_by(1, "n1") == ["n1"]


def test_no_more_nodes_than_the_limit_are_at_it_at_once(site: Site) -> None:
    names = ("n1", "n2", "n3")
    site.has(*names)
    site.pass_by(0, *names)
    assert site.pass_by(600, *names) == ["n1", "n2"]
    assert site.pass_by(30, *names) == []
    first = next(one for one in site.store.all(NODE_CHECKS) if one.node == "n1")
    site.ends(first, outcome(), verdict="healthy")
    assert site.pass_by(30, *names) == ["n3"]


def test_what_a_job_ended_counts_and_is_no_verdict(site: Site) -> None:
    check = site.asked()
    site.checks.begun(check.id, RUN)
    ended = site.checks.ended(check.id, "cannot_tell", "its agent did not make it: rank 3 of job llm trains here")
    assert (ended.state, site.incidents(), site.node().state) == ("cannot_tell", [], "in_service")
    assert site.pass_by(600, "n1") == []


def test_nothing_found_is_kept_with_the_gpu_and_makes_nothing_of_the_node(site: Site) -> None:
    check = site.asked()
    site.store.commit(Change(gpus=(gpu(),)))
    ended = site.ends(check, outcome(), verdict="healthy")
    assert (ended.state, ended.detail) == ("healthy", "nothing found in 45 s, 4000 products")
    # What a fleet does each day is no news, and is kept short.
    assert ([one.values for one in ended.outcomes], site.store.audit(subject="n1").items) == ([[]], [])
    (known,) = site.store.all(GPU_CHECKS)
    assert (known.uuid, known.checks, known.operations, known.wrong_numbers) == (UUID, 1, 4_000.0, 0.0)
    site.tick()
    assert (site.incidents(), site.store.all(ACTIONS)) == ([], [])


def test_what_has_passed_without_the_search_says_nothing_of_it(site: Site) -> None:
    other = CheckOutcome(name="disk", state="passed", reason="fine")
    assert site.ends(site.asked(), other, verdict="healthy").state == "cannot_tell"


def test_a_wrong_number_makes_an_incident_that_drains_and_restarts_nothing(site: Site) -> None:
    subscriber = Subscription(
        id="sub",
        url="http://slurm/",
        format="cloudevents",
        types=[schema.ACTION_REQUESTED, schema.INCIDENT_OPENED],
        jobs=["llm"],
        secrets=["whsec_x"],
        active=True,
        created_s=NOW,
    )
    site.store.commit(Change(subscriptions=(subscriber,), gpus=(gpu(),)))
    site.ends(site.asked(), outcome(2.0))
    assert [entry.verb for entry in site.store.audit(subject="n1").items] == ["check sick"]
    (incident,) = site.incidents()
    assert (incident.fault, incident.job, incident.node, incident.device) == ("silent_data_corruption", "", "n1", 3)
    assert UUID in incident.summary
    site.tick()
    (incident,), (action,) = site.incidents(), site.store.all(ACTIONS)
    assert incident.state == "acting"
    assert (action.kind, action.exclude, action.restart, action.state) == ("drain_node", ["n1"], False, "requested")
    assert sorted(one.type for one in site.store.all(DELIVERIES)) == [schema.ACTION_REQUESTED, schema.INCIDENT_OPENED]


def drained(site: Site) -> Node:
    """Have wrong numbers found on n1 and the drain reported as done."""
    site.ends(site.asked(), outcome(2.0))
    site.tick()
    (action,) = site.store.all(ACTIONS)
    done = ledger.report_action(action, Report("done", "drained"), "slurm", site.clock.now_s())
    reason = f"{action.fault}: {action.incident_id}"
    node = ledger.take_out(site.node(), action.fault, reason, "draining", site.clock.now_s())
    site.store.commit(Change(actions=(done,), nodes=(node,)))
    return node


def test_the_incident_stands_until_somebody_puts_the_node_back(site: Site) -> None:
    node = drained(site)
    for _ in range(10):
        site.tick(3_600.0)
    assert site.incidents()[0].state == "acting"
    back = ledger.readmit(node, "GPU 3 replaced", "alice", site.clock.now_s(), 86_400.0)
    site.store.commit(Change(nodes=(back,)))
    site.tick(60.0)
    assert site.incidents()[0].state == "recovered"
    assert [one.type for one in site.store.all(EVENTS)][-1] == schema.INCIDENT_RESOLVED


def test_a_passed_check_takes_nothing_back(site: Site) -> None:
    site.policy = PolicySettings(mode="observe")
    site.watch.use_policy(site.policy)
    site.ends(site.asked(), outcome(2.0))
    site.tick()
    assert [one.state for one in site.store.all(ACTIONS)] == ["would_act"]
    for _ in range(5):
        assert site.pass_by(90_000, "n1") == []  # nor is it asked while that stands
        site.tick()
    assert (site.incidents()[0].state, site.node().state) == ("confirmed", "in_service")


def test_what_is_found_again_after_a_return_by_hand_is_told_again(site: Site) -> None:
    node = drained(site)
    back = ledger.readmit(node, "reseated", "alice", site.clock.now_s() + 60, 86_400.0)
    site.store.commit(Change(nodes=(back,)))
    site.tick(120.0)
    site.tick(86_400.0 * 7)
    assert site.pass_by(600, "n1") == ["n1"]
    (check,) = [one for one in site.store.all(NODE_CHECKS) if one.state == "asked"]
    site.ends(check, outcome(5.0))
    site.tick()
    assert [one.state for one in site.incidents()] == ["closed", "acting"]


def test_a_person_who_ends_the_incident_is_heeded(site: Site) -> None:
    site.ends(site.asked(), outcome(2.0))
    (incident,) = site.incidents()
    site.store.commit(Change(incidents=(ledger.mark_false(incident, site.clock.now_s()),)))
    for _ in range(3):
        site.tick(60.0)
    assert ([one.state for one in site.incidents()], site.store.all(ACTIONS)) == (["false"], [])


def test_a_node_that_is_out_already_becomes_a_suspect_that_returns_by_hand(site: Site) -> None:
    check = site.asked()
    site.store.commit(Change(nodes=(replace(site.node(), state="draining", by="alice", reason="firmware"),)))
    site.ends(check, outcome(2.0))
    site.tick()
    assert (site.node().state, site.node().reason, site.node().fault) == (
        "draining",
        "firmware",
        "silent_data_corruption",
    )
    assert site.store.all(ACTIONS) == []
    assert site.incidents()[0].hold_rule == "standing"


def test_a_wrong_sum_accuses_the_node_and_no_gpu(site: Site) -> None:
    check = site.asked()
    site.store.commit(Change(gpus=(gpu(),)))
    site.ends(check, outcome(), outcome(7.0, name="sdc_all_reduce"))
    (incident,) = site.incidents()
    assert (incident.node, incident.device) == ("n1", None)
    (known,) = site.store.all(GPU_CHECKS)
    assert known.wrong_numbers == 0.0


def test_a_gpu_that_hangs_is_sick_and_no_silent_corruption(site: Site) -> None:
    hung = CheckOutcome(name="sdc_gemm", state="sick", reason="gpu 3: did not finish: nothing for 20 s while working")
    ended = site.ends(site.asked(), hung)
    assert (ended.state, site.incidents(), site.counted) == ("sick", [], ["sick"])


def test_a_report_writes_nothing_into_the_gpus_of_another_node(site: Site) -> None:
    check = site.asked()
    site.store.commit(Change(gpus=(gpu(OTHER, node="n2"),)))
    site.ends(check, outcome(2.0, device=OTHER), outcome(2.0, device="GPU-unknown"))
    assert site.store.all(GPU_CHECKS) == []
    assert [(one.node, one.device) for one in site.incidents()] == [("n1", None)]


def test_what_was_found_goes_with_the_gpu_to_another_node(site: Site) -> None:
    check = site.asked()
    site.store.commit(Change(gpus=(gpu(),)))
    site.ends(check, outcome(2.0))
    site.store.commit(Change(gpus=(gpu(node="n2"),)))
    site.ends(site.asked("n2"), outcome(), verdict="healthy")
    (known,) = site.store.all(GPU_CHECKS)
    assert (known.checks, known.wrong_numbers, [one.node for one in known.newest]) == (2, 2.0, ["n1", "n2"])
