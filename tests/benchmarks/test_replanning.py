"""The replanning benchmark: its own arithmetic and rules, and all of it once at a tiny size."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[ml]")

import torch

from benchmarks.recovery.harm import Harm
from benchmarks.replanning import compare, lost_node, storm, throughput, traces
from benchmarks.replanning.faults import KINDS, Fault, Storm, draw
from benchmarks.replanning.paced_train import pace_s
from benchmarks.replanning.plain_train import keep, layout, resume
from benchmarks.replanning.planned import trains
from benchmarks.replanning.systems import (
    Bamboo,
    Oobleck,
    OobleckTemplate,
    Passes,
    Planned,
    estimated_s,
    given_out,
    oobleck_templates,
    step_s,
)
from benchmarks.replanning.traces import Event, Pause
from eagle_eye.demo.pipeline_train import read_layout
from eagle_eye.demo.stack import StageFailed
from eagle_eye.planning.files import PROFILE_FORMAT, Layer, Profile
from eagle_eye.planning.plan import Hardware, Plan
from eagle_eye.planning.planner import make_plan

ROOT = Path(__file__).resolve().parents[2]
EVEN = Passes(1.0, 2.0)


def profile(layers: int = 8) -> Profile:
    return Profile(
        format=PROFILE_FORMAT, micro_batch=1,
        layers=tuple(
            Layer(layer=number, forward_s=0.01, backward_s=0.02, parameter_bytes=100, optimizer_bytes=200,
                  activation_bytes=1)
            for number in range(layers)
        ),
    )  # fmt: skip


def plan(nodes: int = 4, micro_batches: int = 16) -> Plan:
    hardware = Hardware(nodes=nodes, gpus_per_node=1, gpus_per_stage=1, gpu_memory_bytes=8 * 401 - 1)
    return make_plan(profile(), [f"n{number}" for number in range(nodes)], hardware, 1, micro_batches)


def templates(*sizes: int) -> dict[int, OobleckTemplate]:
    return {size: OobleckTemplate((EVEN,) * size, estimated_s((EVEN,) * size, 4 * size)) for size in sizes}


class Fixed:
    """A system whose step takes a second, and whose pauses are given."""

    def __init__(self, lost: Pause | None, back: Pause | None = None) -> None:
        self.step_s, self._lost, self._back = 1.0, lost, back

    def lose(self, node: int) -> Pause | None:
        return self._lost

    def gain(self, node: int) -> Pause | None:
        return self._back


def lost(*at_s: float) -> list[Event]:
    return [Event(at, 0, back=False) for at in at_s]


def test_a_failure_costs_the_step_under_way_the_pause_and_the_steps_that_are_made_again() -> None:
    system = Fixed(Pause(10.0, loses_step=True, again_s=2.0))
    assert traces.steps(system, lost(20.5), 100.0) == 20 + int(100.0 - 20.5 - 12.0)


def test_a_step_that_is_not_lost_ends_later_where_a_neighbour_stands_in() -> None:
    assert traces.steps(Fixed(Pause(10.0, slower=1.5)), lost(20.5), 100.0) == 21 + int(100.0 - 21.25 - 10.0)


def test_a_failure_in_a_pause_begins_it_anew_and_a_node_that_is_back_then_costs_nothing() -> None:
    system = Fixed(Pause(10.0, loses_step=True), Pause(10.0))
    events = [*lost(20.0, 25.0), Event(30.0, 0, back=True)]
    assert traces.steps(system, events, 100.0) == 20 + 65


def test_what_training_does_not_notice_costs_nothing() -> None:
    assert traces.steps(Fixed(None), lost(20.5), 100.0) == 100


def test_traces_keep_half_of_the_nodes_and_bring_each_back_after_its_repair() -> None:
    events = traces.draw(8, 100.0, 1_000.0, 50_000.0, random.Random(3))
    up, since = set(range(8)), dict[int, float]()
    for event in events:
        if event.back:
            assert event.at_s == pytest.approx(since.pop(event.node) + 1_000.0)
            up.add(event.node)
        else:
            up.remove(event.node)
            since[event.node] = event.at_s
        assert len(up) >= 4
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert 4 < traces.nodes_up(8, events, 50_000.0) < 5


def test_ooblecks_estimate_of_even_stages_is_that_of_1f1b() -> None:
    stages = (EVEN,) * 4
    assert estimated_s(stages, 16) == pytest.approx(step_s(stages, 16)) == pytest.approx(3.0 * (16 + 4 - 1))


def test_oobleck_gives_out_batches_so_that_the_slowest_is_the_least() -> None:
    times_s = (1.0, 1.5, 0.7)
    slowest_s = max(time * batch for time, batch in zip(times_s, given_out(times_s, 12), strict=True))
    every = (batches for batches in itertools.product(range(1, 13), repeat=3) if sum(batches) == 12)
    assert slowest_s == min(max(t * b for t, b in zip(times_s, one, strict=True)) for one in every)


def oobleck(nodes: int, *sizes: int) -> Oobleck:
    return Oobleck(templates(*sizes), nodes, 1, 64, Pause(2.0), 2.0)


def test_an_oobleck_pipeline_that_loses_a_node_becomes_a_smaller_one() -> None:
    system = oobleck(5, 2, 3)
    large = max(system.pipelines, key=len)
    system.lose(large[0])
    assert sorted(map(len, system.pipelines)) == [2, 2]


def test_one_that_is_too_small_borrows_a_node() -> None:
    system = oobleck(5, 2, 3)
    small = min(system.pipelines, key=len)
    system.lose(small[0])
    assert sorted(map(len, system.pipelines)) == [2, 2]


def test_one_that_can_borrow_none_is_merged() -> None:
    system = oobleck(4, 2, 3)
    system.lose(system.pipelines[0][0])
    assert [*map(len, system.pipelines)] == [3]
    system.lose(system.pipelines[0][0])
    system.lose(system.pipelines[0][0])
    assert system.step_s == math.inf


def test_a_node_that_is_back_gives_oobleck_its_pipelines_again() -> None:
    system = oobleck(4, 2, 3)
    before_s = system.step_s
    node = system.pipelines[0][0]
    system.lose(node)
    assert system.step_s > before_s
    system.gain(node)
    assert system.step_s == before_s


def test_oobleck_cuts_even_layers_evenly_and_begins_where_the_model_fits() -> None:
    hardware = Hardware(nodes=6, gpus_per_node=1, gpus_per_stage=1, gpu_memory_bytes=8 * 401 - 1)
    found = oobleck_templates(profile(), hardware, 1)
    assert sorted(found) == [2, 3, 4]
    assert [(round(stage.forward_s, 9), round(stage.backward_s, 9)) for stage in found[4].stages] == [(0.02, 0.04)] * 4


def test_bamboos_redundant_passes_cost_what_the_bubbles_do_not_hold() -> None:
    few, many = (Bamboo((EVEN,) * 4, 4, batches, 0.0).step_s for batches in (1, 64))
    assert few == step_s((EVEN,) * 4, 1)  # all bubbles
    assert many == 64 * (1.0 + 2.0 + 1.0)


def test_bamboo_forms_whole_pipelines_and_keeps_the_other_nodes_standing_by() -> None:
    system = Bamboo((EVEN,) * 3, 7, 60, 5.0)
    two_s = system.step_s
    assert system.lose(6) is None  # the seventh stood by
    assert system.lose(0) == Pause(5.0, slower=1.5)
    assert system.step_s == pytest.approx(2 * two_s, rel=0.1)
    assert system.gain(0) == Pause(5.0)
    assert system.step_s == two_s


def test_with_our_plan_the_nodes_that_are_left_make_nearly_their_share() -> None:
    system = Planned(plan(8, 64), Pause(5.0, loses_step=True), 3.0)
    full_s = system.step_s
    assert system.lose(3) == Pause(5.0, loses_step=True)
    assert 0.9 < full_s / system.step_s * 8 / 7 <= 1.1
    assert system.gain(3) == Pause(3.0)
    assert system.step_s == full_s


def simulated(first_step_s: float | None) -> dict[str, Any]:
    pauses = {"first_step_s": first_step_s, "grow_s": first_step_s, "steps_lost": 0.5}
    return throughput.simulated(profile(12), 5, 16, 1, 1, 1_800.0, pauses, lambda _: None)


def test_the_systems_are_compared_on_the_same_traces_and_pauses_are_told_with_their_sources() -> None:
    found = simulated(8.0)
    assert {*found["lost"]} == {"Eagle Eye", "Oobleck", "Bamboo"}
    assert {*found["frequencies"]} == {"10 min", "1 h", "6 h"}
    assert found["pauses_s"]["Oobleck"] == {"BERT-large": 2.0, "GPT-3 6.7B": 10.0}
    often, seldom = (found["frequencies"][name]["of_undisturbed_ratio"] for name in ("10 min", "6 h"))
    for system, kept in often.items():
        assert 0 < kept["mean"] < seldom[system]["mean"] <= 1.2
    assert often["Bamboo, pause of GPT-3 6.7B"]["mean"] < often["Bamboo, pause of BERT-large"]["mean"]


def test_without_a_measured_pause_none_is_made_up() -> None:
    found = simulated(None)
    assert found["pauses_s"]["Eagle Eye"] is None
    assert not any("own pause" in system for system in found["frequencies"]["1 h"]["of_undisturbed_ratio"])


def test_a_throughput_below_the_others_is_told_as_missed() -> None:
    found = simulated(8.0)
    assert not [missed for missed in throughput.misses(found) if "Bamboo" in missed]
    found["frequencies"]["1 h"]["of_undisturbed_ratio"]["Oobleck, pause of BERT-large"]["mean"] = 2.0
    assert any("Oobleck, pause of BERT-large makes 200.0%" in missed for missed in throughput.misses(found))


class TestStorm:
    def test_a_seed_is_a_storm_and_another_one_another(self) -> None:
        assert draw(100, 15.0, 1) == draw(100, 15.0, 1) != draw(100, 15.0, 2)

    def test_kinds_come_about_equally_often_and_all_faults_within_the_storm(self) -> None:
        found = draw(100, 15.0, 1)
        assert {kind: sum(fault.kind == kind for fault in found) for kind in KINDS} == dict.fromkeys(KINDS, 25)
        moments_s = [fault.at_s for fault in found]
        assert moments_s == sorted(moments_s)
        assert 1_400.0 < moments_s[-1] < 1_500.0

    def test_a_fault_takes_the_next_node_that_runs_something_which_is_repaired_after_a_while(self) -> None:
        arm = Noting(busy={"c"})
        played = Storm(arm, [Fault(0.0, "hang", 0.0)], 0.0)
        played.begin()
        played.tick()
        assert arm.done == ["hang on c"]
        played.tick()
        assert arm.done == ["hang on c", "c repaired"]
        assert (played.left, played.by_kind) == (0, {"hang": 1})

    def test_a_fault_waits_until_somebody_can_be_harmed(self) -> None:
        arm = Noting(busy=set())
        played = Storm(arm, [Fault(0.0, "hang", 0.0)], 0.0)
        played.begin()
        played.tick()
        assert (played.left, arm.done) == (1, [])

    def test_no_fault_strikes_a_node_that_is_being_repaired(self) -> None:
        arm = Noting(busy={"c"})
        played = Storm(arm, [Fault(0.0, "kill", 0.0), Fault(0.0, "kill", 0.0)], 60.0)
        played.begin()
        played.tick()
        played.tick()
        assert (played.left, arm.done) == (1, ["kill on c"])


class Noting:
    """An arm that notes what is done to it; ``busy`` run something."""

    def __init__(self, busy: set[str]) -> None:
        self.busy, self.done = busy, list[str]()

    def members(self) -> list[str]:
        return ["a", "b", "c"]

    def harm(self, kind: str, node: str) -> Harm:
        if node not in self.busy:
            raise StageFailed(node)
        self.done.append(f"{kind} on {node}")
        return Harm(kind, node, 0.0)

    def repair(self, node: str) -> None:
        self.done.append(f"{node} repaired")

    def tick(self) -> None:
        pass


def test_fewer_nodes_are_paced_by_the_plan() -> None:
    found = plan()
    assert pace_s(found, 4, 0.3) == 0.3
    assert pace_s(found, 3, 0.3) == pytest.approx(0.3 * found.layout(3).step_s / found.layout(4).step_s)


def test_undisturbed_ranks_have_all_layers_and_a_part_of_the_samples() -> None:
    found = read_layout(layout(3, 16), 3)
    assert [[*pipeline.micro_batches] for pipeline in found.pipelines] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert len(found.holders()) == 1


def test_all_nodes_train_once_the_newest_steps_are_of_one_attempt_on_all() -> None:
    log = [{"attempt": attempt, "ranks": ranks} for attempt, ranks in ((1, 4), (1, 4), (2, 3), (3, 4), (3, 4))]
    assert [trains(log[:length], 4, 2) for length in range(1, 6)] == [False, True, False, False, True]


def test_the_loss_of_a_step_that_was_made_again_is_the_last_one() -> None:
    log = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 9.0}, {"step": 2, "loss": 2.0}]
    assert storm.course(log) == [3.0, 2.0]


def test_losses_are_compared_over_the_whole_course() -> None:
    assert storm.means([1.0] * 25 + [3.0] * 25 + [9.0] * 24) == [1.0, 3.0]
    assert storm.difference_ratio([1.1, 2.0], [1.0, 2.0]) == pytest.approx(math.sqrt(0.005))


def job(**more: Any) -> dict[str, Any]:
    return {
        "faults": 2, "by_kind": {"hang": 2}, "exit_code": 0, "stuck": False, "steps_done": 25, "attempts": 3,
        "steps_with_other_samples": 0, "longest_without_a_step_s": 5.0, "steps_lost": 1, "storm_s": 30.0,
        "storm_steps": 40, "losses": [2.0], **more,
    }  # fmt: skip


def stormy(*jobs: dict[str, Any], noise: float = 0.0) -> dict[str, Any]:
    settings = {"faults": 4, "each": 2}
    found = {"settings": settings, "steps": 25, "undisturbed": [[2.0], [2.0 + noise]], "jobs": [*jobs]}
    return storm.figures(found)


def test_a_storm_is_reported_over_all_its_jobs() -> None:
    found = stormy(job(), job(longest_without_a_step_s=9.0))
    assert (found["faults"], found["by_kind"], found["longest_without_a_step_s"]) == (4, {"hang": 4}, 9.0)
    assert found["effective_training_ratio"] == pytest.approx(80 * 0.3 / 60)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (stormy(job(), job()), ""),
        (stormy(job(), job(faults=1)), "3 of 4 faults"),
        (stormy(job(), job(steps_done=9, exit_code=1)), "job 2: 9 of 25 steps, the launcher's exit code 1"),
        (stormy(job(), job(steps_done=9, exit_code=None, stuck=True)), "it made no step any more"),
        (stormy(job(), job(steps_with_other_samples=3)), "job 2: 3 steps with another global batch"),
        (stormy(job(), job(losses=[2.01])), "the loss is 5.0e-03 off"),
        (stormy(job(), job(losses=[2.01]), noise=0.01), ""),
    ],
)
def test_a_storm_that_did_not_end_as_it_should_says_why(found: dict[str, Any], said: str) -> None:
    assert said in "\n".join(storm.misses(found))
    assert bool(storm.misses(found)) == bool(said)


def test_a_loss_of_a_node_after_which_nobody_steps_took_for_ever() -> None:
    done = [lost_node.Loss(kind="hang", node="n", first_step_s=value) for value in (4.0, 5.0, 6.0, None)]
    found = lost_node.figures(done, 4, "here")
    assert (found["first_step_s"]["p50"], found["first_step_s"]["p95"]) == (5.0, None)
    assert lost_node.misses(found) == ["lost_node: p95 None s until a new step; asked 15"]


def step_line(at_s: float, step: int, nodes: int = 4, samples: int = 16) -> dict[str, Any]:
    return {"time_s": at_s, "step": step, "ranks": nodes, "samples": samples}


def test_steps_that_are_made_again_count_once() -> None:
    log = [step_line(at_s, step) for at_s, step in ((1, 1), (2, 2), (3, 3), (7, 2), (8, 3), (9, 4))]
    found = compare.span(log, 1.0, 11.0)
    assert (found["steps"], found["steps_again"], found["samples_per_s"]) == (3, 2, 4.8)
    assert found["longest_without_a_step_s"] == 4.0


def test_what_is_lost_again_by_the_end_does_not_count() -> None:
    log = [step_line(at_s, step) for at_s, step in ((1, 1), (2, 2), (3, 3), (7, 2))]
    assert compare.span(log, 1.0, 11.0)["steps"] == 1


def test_a_step_of_fewer_groups_holds_fewer_samples_and_one_that_nobody_reported_all() -> None:
    log = [step_line(1, 1), step_line(2, 2, 3, 12), step_line(4, 4)]
    found = compare.span(log, 1.0, 5.0)
    assert (found["samples"], found["steps_by_nodes"]) == (12 + 16 + 16, {"3": 1, "4": 1})


def compared(**samples_per_s: float) -> dict[str, Any]:
    arms = {
        arm.replace("_", " "): {"calm": {"samples_per_s": 50.0}, "storm": {"samples_per_s": value}, "faults": 2}
        for arm, value in samples_per_s.items()
    }
    return compare.figures({"settings": {"faults": 2}, "arms": arms})


def test_another_who_trains_more_in_the_storm_is_reported() -> None:
    found = compared(Eagle_Eye=30.0, Eagle_Eye_with_torchft=40.0, torchrun=10.0, torchft=20.0)
    assert compare.misses(found) == []
    assert found["arms"]["Eagle Eye"]["of_undisturbed_ratio"] == 0.6
    behind = compared(Eagle_Eye=30.0, Eagle_Eye_with_torchft=40.0, torchrun=10.0, torchft=31.0)
    assert compare.misses(behind) == ["compare: 31 samples/s with torchft, 30 with Eagle Eye; asked: more"]


def test_an_arm_that_is_lacking_and_faults_that_did_not_come_are_reported() -> None:
    found = compared(Eagle_Eye=30.0, Eagle_Eye_with_torchft=40.0, torchrun=10.0)
    found["arms"]["torchrun"]["faults"] = 1
    assert compare.misses(found) == ["compare: torchft was not measured", "compare: torchrun: 1 of 2 faults"]


def test_what_plain_training_keeps_it_goes_on_from(tmp_path: Path) -> None:
    def state() -> dict[str, Any]:
        layer = torch.nn.Linear(2, 2)
        return {"tokens": torch.tensor(0), "layer": layer, "optimizer": torch.optim.AdamW(layer.parameters())}

    kept, other = state(), state()
    assert resume(tmp_path, other) == 0
    kept["tokens"] += 7
    keep(tmp_path, 20, kept)
    assert (resume(tmp_path, other), int(other["tokens"])) == (20, 7)
    assert torch.equal(other["layer"].weight, kept["layer"].weight)
    assert [file.name for file in tmp_path.iterdir()] == ["newest.pt"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.replanning", "--json", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


def test_wrong_usage_is_one_line() -> None:
    ran = run("--nodes", "99", "--parts", "throughput")
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1].endswith("--nodes 99: expected 4 to 10")


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "other.json"
    out.write_text('{"plan": {}}')
    ran = run("--out", str(out))
    assert (ran.returncode, out.read_text()) == (2, '{"plan": {}}')


@pytest.mark.slow
def test_layers_that_are_measured_are_simulated_with(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    ran = run("--nodes", "5", "--draws", "1", "--micro-batches", "16", "--out", str(out))
    assert ran.returncode in (0, 1), ran.stderr
    reported = json.loads(ran.stdout)
    assert reported == json.loads(out.read_text())
    assert reported["throughput"]["profile"]["layers"] == 26


@pytest.mark.slow
def test_a_lost_node_is_measured_and_its_pause_is_simulated_with(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    small = ("--nodes", "5", "--draws", "1", "--micro-batches", "16")
    ran = run("--parts", "lost_node", "throughput", "--repetitions", "2", *small, "--out", str(out))
    reported = json.loads(ran.stdout)
    assert reported == json.loads(out.read_text())
    assert [(one["where"], one["note"]) for one in reported["lost_node"]["each"]] == [("memory", "")] * 2, ran.stderr
    assert reported["throughput"]["pauses_s"]["Eagle Eye"] == reported["lost_node"]["first_step_s"]["p50"]


@pytest.mark.slow
def test_a_small_storm_ends_as_if_nothing_had_been_and_is_not_run_again(tmp_path: Path) -> None:
    words = ("--parts", "storm", "--faults", "4", "--each", "4", "--every", "12", "--out", str(tmp_path / "out.json"))
    ran = run(*words)
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    assert json.loads(ran.stdout)["storm"]["faults"] == 4
    again = run(*words)
    assert json.loads(again.stdout)["storm"]["jobs"] == json.loads(ran.stdout)["storm"]["jobs"]


@pytest.mark.slow
@pytest.mark.parametrize("arm", compare.ARMS)
def test_every_arm_comes_through_a_small_storm_and_is_not_measured_again(arm: str, tmp_path: Path) -> None:
    if arm == "torchft":
        pytest.importorskip("torchft", reason="torchft is not installed: make test-full")
    small = ("--faults", "4", "--every", "10", "--calm", "5", "--out", str(tmp_path / "out.json"))
    words = ("--parts", "compare", "--arms", arm, *small)
    ran = run(*words)
    found = json.loads(ran.stdout)["compare"]["arms"][arm]
    assert (found["faults"], found["by_kind"]) == (4, dict.fromkeys(KINDS, 1)), ran.stderr
    assert found["storm"]["steps"] > 0
    assert ran.returncode == 1  # the other arms were not measured
    assert json.loads(run(*words).stdout)["compare"]["arms"] == {arm: found}
