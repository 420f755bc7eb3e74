"""Jobs that follow a plan where no spare is left, on a played Slurm."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from eagle_eye.orchestrators.fallback_layouts import add_layouts, read_layouts
from eagle_eye.orchestrators.protocol import CannotCarryOutError, OrchestratorError
from eagle_eye.orchestrators.slurm.cluster import Cluster, Commands, scale
from eagle_eye.orchestrators.slurm.orchestrator import SlurmOrchestrator
from eagle_eye.orchestrators.slurm.restarting import RestartTimeouts
from eagle_eye.planning.plan import Plan
from tests.orchestrators.slurm.builders import exclusion, orchestrator, restart
from tests.orchestrators.slurm.played import Played
from tests.planning.jobs import plan

FOUR = plan(4, job="17")  # two nodes hold the model
STEPS = {nodes: FOUR.layout(nodes).step_s for nodes in (2, 3, 4)}
THREE_LEFT = f"no spare: 3 nodes by plan, {STEPS[4] / STEPS[3]:.0%} of the samples/s of 4"


class Site:
    """Job 17 on all four nodes of a played cluster, and the orchestrator that has its plan."""

    def __init__(self, folder: Path, followed: Plan = FOUR, when_full: str = "queue") -> None:
        self.folder = folder
        self.followed = followed
        self.limits = RestartTimeouts(0.1, 0.1, when_full)  # type: ignore[arg-type]
        self.cluster = Played()
        self.cluster.job = replace(self.cluster.job, nodes_wanted=4, nodes="n1,n2,n3,n4")
        self.ours = self.reopened()

    def reopened(self) -> SlurmOrchestrator:
        return orchestrator(self.cluster, self.folder, self.limits, plans={"17": self.followed})

    def node(self, name: str, *words: str) -> None:
        known = self.cluster.known["n1"]
        self.cluster.known[name] = replace(known, name=name, words=frozenset(words or ("idle",)), reason="")

    def loses(self, node: str, over: int = 0, action_id: str = "act-1") -> tuple[str, str]:
        """What is reported of the exclusion and of the restart."""
        excluded = self.ours.exclude(exclusion("17", node, attempt=over, action_id=action_id))
        return excluded, self.ours.restart("17", restart(node, over=over, action_id=action_id))

    @property
    def runs_on(self) -> tuple[str, ...]:
        """Its nodes, now."""
        return self.cluster.hosts(self.cluster.jobs(17)[0].nodes)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_without_a_spare_the_job_waits_for_the_nodes_that_its_plan_goes_on_with(site: Site) -> None:
    excluded, restarted = site.loses("n1")
    assert excluded == f"n1 drained; {THREE_LEFT}"
    assert restarted == f"job 17 requeued; {THREE_LEFT}; job 17 runs again as attempt 1 on n2, n3, n4"
    assert site.cluster.done == ["drain n1", "requeue", "exclude n1", "resize 3", "release"]


def test_with_a_spare_the_job_keeps_its_number_of_nodes(site: Site) -> None:
    site.node("n5")
    assert site.loses("n1")[0] == "n1 drained"
    assert site.cluster.done == ["drain n1", "requeue", "exclude n1", "release"]
    assert site.runs_on == ("n2", "n3", "n4", "n5")


@pytest.mark.parametrize("when_full", ["queue", "hold", "refuse"])
def test_nodes_that_others_use_are_no_spares_and_are_not_waited_for(tmp_path: Path, when_full: str) -> None:
    site = Site(tmp_path, when_full=when_full)
    site.node("n5", "allocated")
    assert site.loses("n1")[0] == f"n1 drained; {THREE_LEFT}"
    assert "resize 3" in site.cluster.done


def test_a_node_that_its_user_excludes_is_no_spare(site: Site) -> None:
    site.node("n5")
    site.cluster.avoided = ("n5",)
    assert site.loses("n1")[0] == f"n1 drained; {THREE_LEFT}"
    assert site.runs_on == ("n2", "n3", "n4")


def test_nodes_that_would_make_nothing_faster_are_not_asked_for(tmp_path: Path) -> None:
    site = Site(tmp_path, plan(4, layers=2, batch=2, job="17"))
    used = 4 - site.followed.layout(4).idle_nodes
    assert used < 3
    site.loses("n1")
    assert f"resize {used}" in site.cluster.done


def test_below_what_the_plan_covers_the_job_is_held_and_says_that_it_waits_for_a_spare(site: Site) -> None:
    for name in ("n2", "n3"):
        site.node(name, "idle", "drain")
    why = "is held: its plan's layouts need 2 nodes and 1 can be used: it waits for a spare"
    with pytest.raises(CannotCarryOutError, match=why):
        site.loses("n1")
    site.node("n3")
    site.ours = site.reopened()
    assert site.ours.readmit(["n1"]) == f"n1 is in service; job 17 is released; {THREE_LEFT}"
    assert site.runs_on == ("n1", "n3", "n4")


def test_a_job_that_is_only_slow_is_left_alone_where_no_layout_would_be_left(site: Site) -> None:
    for name in ("n2", "n3"):
        site.node(name, "idle", "drain")
    why = "its plan's layouts need 2 nodes and 1 others can be used: it would not run again"
    with pytest.raises(CannotCarryOutError, match=why):
        site.ours.exclude(exclusion("17", "n1", fault="straggler"))
    assert site.cluster.done == []


def test_a_job_that_shrank_takes_a_readmitted_node_at_its_next_restart(site: Site) -> None:
    site.loses("n1")
    said = site.ours.readmit(["n1"])
    assert said == "n1 is in service; job 17 runs on 3 of 4 nodes, and by plan on more after its next restart"
    assert site.runs_on == ("n2", "n3", "n4")
    site.ours = site.reopened()
    site.cluster.done.clear()
    site.ours.restart("17", restart(over=1, action_id="act-2"))
    assert site.cluster.done == ["requeue", "exclude ", "resize 4", "release"]
    assert len(site.runs_on) == 4


def test_it_shrinks_further_and_is_measured_by_what_it_wanted_at_first(site: Site) -> None:
    site.loses("n1")
    excluded, _ = site.loses("n2", over=1, action_id="act-2")
    assert excluded == f"n2 drained; no spare: 2 nodes by plan, {STEPS[4] / STEPS[2]:.0%} of the samples/s of 4"
    assert "resize 2" in site.cluster.done
    assert site.runs_on == ("n3", "n4")


@pytest.mark.parametrize("at", ["requeue", "resize", "release"])
def test_wherever_slurm_stops_answering_the_next_try_finishes(site: Site, at: str) -> None:
    site.cluster.fails = at
    with pytest.raises(CannotCarryOutError, match="no answer"):
        site.loses("n1")
    site.cluster.fails = ""
    site.ours = site.reopened()
    assert site.ours.restart("17", restart("n1")).endswith("runs again as attempt 1 on n2, n3, n4")
    assert site.cluster.done == ["drain n1", "requeue", "exclude n1", "resize 3", "release"]


def test_a_job_whose_nodes_may_not_be_changed_is_held_until_a_node_is_back(site: Site) -> None:
    site.cluster.refuses = "resize"
    with pytest.raises(CannotCarryOutError, match="is held: it cannot be given 3 nodes by plan: Access/permission"):
        site.loses("n1")
    assert site.ours.readmit(["n1"]) == "n1 is in service; job 17 is released"
    assert site.runs_on == ("n1", "n2", "n3", "n4")


@pytest.mark.parametrize(
    ("gpus", "followed", "why"),
    [
        (8, FOUR, "its plan is for other hardware: 1 GPUs of a node, and the job has 8; plan again"),
        (1, plan(3, job="17"), "its plan has layouts for 2 to 3 nodes, and the job wants 4; plan again"),
    ],
)
def test_a_plan_for_another_job_than_this_is_not_followed_and_said_so(
    tmp_path: Path, gpus: int, followed: Plan, why: str
) -> None:
    site = Site(tmp_path, followed)
    site.cluster.gpus = gpus
    assert site.ours.exclude(exclusion("17", "n1")) == f"n1 drained; {why}"
    with pytest.raises(CannotCarryOutError, match="it wants 4 nodes and 3 can be used"):
        site.ours.restart("17", restart("n1"))
    assert site.ours.pace_left() == {}


def test_a_dry_run_says_what_the_job_would_go_on_with(site: Site) -> None:
    assert site.ours.preview(exclusion("17", "n1")).endswith(f" ({THREE_LEFT})")
    assert site.cluster.done == []


def test_what_is_left_of_the_pace_without_a_node_follows_from_the_plan_and_the_spares(site: Site) -> None:
    assert site.ours.pace_left() == {"17": STEPS[4] / STEPS[3]}
    site.node("n5", "allocated")
    assert site.ours.pace_left() == {"17": STEPS[4] / STEPS[3]}
    site.node("n5")
    assert site.ours.pace_left() == {"17": None}
    site.node("n5", "down")
    site.loses("n1")
    site.loses("n2", over=1, action_id="act-2")
    assert site.ours.pace_left() == {"17": 0.0}
    site.cluster.job = replace(site.cluster.job, words=("COMPLETED",))
    assert site.ours.pace_left() == {}


@pytest.mark.parametrize(
    ("said", "gpus"),
    [
        ("gres:gpu:2", 2), ("gres:gpu:a100:4", 4), ("gres/gpu:8", 8), ("gpu:1(S:0)", 1), ("gres:shard:2", None),
        ("gres:gpu:a100:2,gres:gpu:h100:2", 4), ("N/A", None), ("gres:gpu", None),
    ],
)  # fmt: skip
def test_the_gpus_of_a_node_are_read_as_slurm_writes_them(
    monkeypatch: pytest.MonkeyPatch, said: str, gpus: int | None
) -> None:
    monkeypatch.setattr(Commands, "run", lambda *_, **__: f"17       |{said}|\n")
    assert Cluster(Commands()).gpus_per_node(Played().job) == gpus


def test_tasks_and_cpus_are_as_many_on_each_node_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def run(_: Commands, *words: str, **__: object) -> str:
        asked.append(words)
        return "17|32|64|\n"

    monkeypatch.setattr(Commands, "run", run)
    Cluster(Commands()).resize(replace(Played().job, nodes_wanted=4), 3)
    assert asked[-1] == ("scontrol", "update", "JobId=17", "NumNodes=3", "NumTasks=24", "NumCPUs=48")
    assert [scale(4, 4, 3), scale(3, 3, 4), scale(10, 4, 3)] == [3, 4, 8]


def written(folder: Path, *plans: Plan) -> list[Path]:
    files = [folder / f"{number}.json" for number in range(len(plans))]
    for file, one in zip(files, plans, strict=True):
        file.write_bytes(msgspec.json.encode(one))
    return files


def test_plans_are_their_jobs(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_layouts(parser)
    files = written(tmp_path, FOUR, plan(3, job="llm"))
    given = parser.parse_args([f"--layouts={file}" for file in files])
    assert {job: one.hardware.nodes for job, one in read_layouts(given.layouts).items()} == {"17": 4, "llm": 3}
    with pytest.raises(OrchestratorError, match=r"1\.json is another plan of job '17'; give one of them"):
        read_layouts(written(tmp_path, FOUR, FOUR))
    with pytest.raises(OrchestratorError, match="says of no job that it is its plan: eagle-eye plan --job JOB"):
        read_layouts(written(tmp_path, plan(3)))
