"""The physics of synchronous steps."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.simulator.job import hire, lay_out
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import tell
from eagle_eye.simulator.timing import Clockwork, Timeline
from eagle_eye.simulator.tracks import Tracks
from tests.simulator.builders import culprit, late, onset_s, recorded, row_at


def timeline(fault: str = "none", nodes: int = 8, seed: int = 3, **changes: object) -> Timeline:
    story = tell(Scenario(fault=fault, nodes=nodes, seed=seed, habits=False, **changes))  # type: ignore[arg-type]
    return Clockwork(story, Tracks(story.tracks, nodes, 8)).run(story.scenario.duration_s)


@pytest.mark.parametrize("background", [None, "packed_sequences"])
def test_the_last_to_arrive_has_the_shortest_reduce_scatter(background: str | None) -> None:
    scenario = Scenario(nodes=8, seed=3, background=background)
    layout = lay_out(scenario)
    run = timeline(background=background)
    shape = (len(run.start_s), layout.pp, layout.dp, layout.tp)
    arrival, duration = run.arrival_s.reshape(shape), run.reduce_scatter_s.reshape(shape)
    assert layout.dp > 1
    assert np.array_equal(arrival.argmax(axis=2), duration.argmin(axis=2))
    correlation = np.corrcoef(arrival[:, 0, :, 0].ravel() - arrival[:, 0, :, 0].max(), duration[:, 0, :, 0].ravel())
    assert correlation[0, 1] < 0


def test_a_step_takes_as_long_as_its_slowest_rank_needs() -> None:
    run = timeline("straggler", strength="strong", variant="one")
    length_s = run.end_s - run.start_s
    assert (length_s >= run.compute_s.max(axis=(1, 2))).all()
    assert np.corrcoef(length_s, run.compute_s.max(axis=(1, 2)))[0, 1] > 0.99


def test_a_noiseless_step_would_take_what_was_asked_for() -> None:
    run = timeline(step_s=5.0, minutes=8.0)
    assert (run.end_s - run.start_s).mean() == pytest.approx(5.0, rel=0.04)


def test_steps_follow_each_other_without_gap_or_overlap() -> None:
    run = timeline()
    assert np.allclose(run.start_s[1:], run.end_s[:-1])
    assert np.array_equal(np.diff(run.step), np.ones(len(run.step) - 1))


def test_packed_sequences_spread_as_in_production() -> None:
    run = timeline("packed_sequences", nodes=16, step_s=1.0)
    layout = lay_out(Scenario(nodes=16, seed=3))
    compute = run.compute_s.reshape(-1, layout.pp, layout.dp, layout.tp)[:, 0, :, 0]
    ratio = compute / np.median(compute, axis=1, keepdims=True)
    low, high = np.quantile(ratio, [0.01, 0.99])
    assert low == pytest.approx(0.81, abs=0.04)
    assert high == pytest.approx(1.39, abs=0.06)


def test_fixed_length_data_stays_within_two_percent() -> None:
    run = timeline(nodes=16)
    layout = lay_out(Scenario(nodes=16, seed=3))
    compute = run.compute_s.mean(axis=0).reshape(layout.pp, layout.dp, layout.tp)
    assert np.abs(compute / np.median(compute, axis=1, keepdims=True) - 1).max() < 0.03


def test_victims_wait_and_the_straggler_does_not() -> None:
    recording = recorded("straggler", variant="one", strength="strong", nodes=8, gpus=8)
    node = culprit(recording)
    device = int(late(recording, "train_compute_seconds")[node].argmax())
    waits = late(recording, "nccl_collective_seconds")
    assert waits[node, device] == waits.min()
    others = np.delete(waits.ravel(), node * 8 + device)
    assert others.min() > 1.5 * waits[node, device]


def test_values_repeat_while_no_step_finished() -> None:
    recording = recorded(step_s=10.0, interval_s=1.0)
    step, compute = recording.device["train_step"], recording.device["train_compute_seconds"]
    same = np.diff(step, axis=0) == 0
    assert same.mean() > 0.8
    assert (np.diff(compute, axis=0)[same] == 0).all()


def test_rows_are_means_over_the_steps_since_the_last() -> None:
    recording = recorded(step_s=0.5, interval_s=10.0)
    steps = np.diff(recording.device["train_step"], axis=0)
    assert steps.min() >= 18
    seconds = recording.device["train_step_seconds"][1:]
    assert np.allclose(steps * seconds, 10.0, atol=1.1)


def test_the_culprit_of_a_hang_is_behind_in_the_collectives() -> None:
    recording = recorded("hang", variant="late")
    row, node = row_at(recording, onset_s(recording) + 20), culprit(recording)
    issued = recording.device["nccl_sequence"][row]
    assert issued.argmin() // recording.layout.gpus == node
    assert (issued.ravel() == issued.min()).sum() == 1


def test_in_a_symmetric_hang_all_issued_and_none_completed() -> None:
    recording = recorded("hang", variant="symmetric")
    row = row_at(recording, onset_s(recording) + 20)
    issued, completed = recording.device["nccl_sequence"][row], recording.device["nccl_completed_sequence"][row]
    assert np.unique(issued).size == np.unique(completed).size == 1
    assert (issued > completed).all()


def test_in_a_network_hang_all_issued_and_the_culprit_did_not_complete() -> None:
    recording = recorded("network_hang")
    row, node = row_at(recording, onset_s(recording) + 20), culprit(recording)
    assert np.unique(recording.device["nccl_sequence"][row]).size == 1
    completed = recording.device["nccl_completed_sequence"][row]
    assert set(np.flatnonzero((completed == completed.min()).all(axis=1)).tolist()) == {node}


def test_a_dead_card_alone_sends_nothing_and_counts_a_burst_of_errors() -> None:
    recording = recorded("network_hang", variant="card")
    row, node = row_at(recording, onset_s(recording) + 20), culprit(recording)
    sent = recording.node["node_rdma_tx_bytes_per_second"][row]
    assert set(np.flatnonzero(sent == 0.0).tolist()) == {node}
    assert sent[sent > 0].min() > 1e5
    errors = recording.node["node_rdma_errors_total"][row] - recording.node["node_rdma_errors_total"][0]
    assert 20 < errors[node] < 100
    assert np.delete(errors, node).max() < 5


@pytest.mark.parametrize("doing", ["saves", "evaluates", "compiles"])
def test_in_a_lone_pause_all_but_the_first_rank_wait_in_a_collective(doing: str) -> None:
    recording = recorded("lone_pause", variant=doing)
    issued, completed = recording.device["nccl_sequence"], recording.device["nccl_completed_sequence"]
    behind = ((issued > completed).sum(axis=(1, 2)) == recording.layout.world - 1) & (issued == completed)[:, 0, 0]
    steps = recording.device["train_step"][:, 0, 0]
    paused = behind & np.concatenate([[False], steps[1:] == steps[:-1]])
    assert paused.sum() >= 25
    used = np.diff(recording.device["rank_cpu_seconds_total"][:, 0, 0])[np.flatnonzero(paused)[5:20]]
    assert (used > 0.5).all()
    tensor = recording.device["gpu_tensor_active_ratio"][np.flatnonzero(paused)[5:20]]
    assert (tensor[:, 0, 0] > 0.05).all() == (doing == "evaluates")
    assert tensor[:, 1:].max() < 0.02


def test_the_process_of_a_rank_that_hangs_does_nothing() -> None:
    recording = recorded("hang", variant="late")
    first = row_at(recording, onset_s(recording) + 5)
    used = np.diff(recording.device["rank_cpu_seconds_total"][first:], axis=0).mean(axis=0)
    assert (used < 0.2).sum() == 1


def test_every_rank_has_one_place() -> None:
    layout = lay_out(Scenario(nodes=16, seed=11))
    places = {
        (int(p), int(d), int(t))
        for p, d, t in zip(layout.stage().flat, layout.replica().flat, layout.lane().flat, strict=True)
    }
    assert len(places) == layout.world == layout.pp * layout.dp * layout.tp


def test_the_seed_chooses_the_pipeline() -> None:
    depths = {lay_out(Scenario(nodes=16, seed=seed)).pp for seed in range(20)}
    assert depths == {1, 2, 4, 8}
    assert hire(Scenario(seed=1), lay_out(Scenario(seed=1))) != hire(Scenario(seed=2), lay_out(Scenario(seed=2)))
