"""The second physics is drawn within its ranges, is another one in each trace, and leaves the simulator's own alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_eye.server.backtest.trace import Trace
from eagle_eye.simulator.physics import OWN, Physics
from eagle_eye.simulator.second_physics import CHOICES, OPTIONAL, RANGES, drawn
from eagle_eye.simulator.simulate import Recording, simulate
from eagle_eye.simulator.writer import write
from tests.simulator.builders import culprit, onset_s, recorded, row_at

# Of one recording; a second physics must not move them.
OWN_MEANS = {
    "gpu_power_watts": 588.43976,
    "gpu_temperature_celsius": 58.04948,
    "gpu_sm_active_ratio": 0.66282296,
    "train_compute_seconds": 1.6654688,
}
OWN_CPU = 0.1333135
KEPT = [name for name in RANGES if hasattr(OWN, name)]


def second(fault: str = "none", **changes: Any) -> Recording:
    """Return the recording of a small job in the second physics."""
    return recorded(fault, physics="second", **changes)


def seed_where(condition: Any) -> int:
    """Return the first seed whose physics is as asked for."""
    return next(seed for seed in range(500) if condition(drawn(seed)))


def test_own_physics_is_what_it_was() -> None:
    recording = recorded("thermal_throttle")
    found = {
        name: float(np.nanmean(recording.device[name]))
        for name in ("gpu_power_watts", "gpu_temperature_celsius", "gpu_sm_active_ratio", "train_compute_seconds")
    }
    assert found == pytest.approx(OWN_MEANS, rel=1e-5)
    assert float(recording.node["node_cpu_utilization_ratio"].mean()) == pytest.approx(OWN_CPU, rel=1e-5)


def test_each_number_stays_in_its_range_and_differs_from_trace_to_trace() -> None:
    several = [drawn(seed) for seed in range(40)]
    for name in KEPT:
        if name == "spin_power":  # of a GPU that spins; one that blocks is near idle
            continue
        values = [getattr(physics, name) for physics in several]
        assert all(RANGES[name].low <= value <= RANGES[name].high for value in values), name
        assert len(set(values)) > 30, name


def test_each_range_says_where_it_comes_from() -> None:
    whys = (
        [part.why for part in RANGES.values()]
        + [part.why for part in CHOICES.values()]
        + [part.why for part in OPTIONAL]
    )
    assert min(map(len, whys)) > 8


def test_every_drawn_number_is_one_of_the_physics() -> None:
    assert {name for name in CHOICES if not hasattr(OWN, name)} == set()
    assert len(KEPT) > 40


def test_waiting_gpus_keep_some_of_their_activity_or_rest() -> None:
    shown = "gpu_sm_active_ratio"
    spins = seed_where(lambda p: p.waits_spin and shown not in p.absent)
    blocks = seed_where(lambda p: not p.waits_spin and shown not in p.absent)
    for seed, low, high in ((spins, 0.04, 0.92), (blocks, 0.0, 0.02)):
        recording = second("gpu_hang", seed=seed, variant="xid", minutes=6.0)
        rows, active = row_at(recording, onset_s(recording)), recording.device[shown]
        peers = np.delete(active, culprit(recording), axis=1)
        kept = np.nanmedian(peers[rows + 60 :]) / np.nanmedian(peers[20 : rows - 5])
        assert low <= kept <= high


def test_xids_may_be_silent_or_chatty() -> None:
    def reported(seed: int) -> int:
        events = second("gpu_memory_error", seed=seed, variant="contained").events
        return sum(event.kind == "xid" and event.attributes["code"] == 94 for event in events)

    assert reported(seed_where(lambda p: p.xid_silent)) == 0
    assert reported(seed_where(lambda p: not p.xid_silent and p.xid_repeats == 25)) == 25


def test_neighbours_counters_may_move_with_the_culprits() -> None:
    seed = seed_where(lambda p: p.victims_share == 0.3 and not p.symptoms_missing and p.symptom_scale > 1)
    recording = second("nic_degraded", seed=seed, variant="errors")
    late = recording.node["node_rdma_errors_total"][-1] - recording.node["node_rdma_errors_total"][0]
    assert np.delete(late, culprit(recording)).min() > 100
    assert late[culprit(recording)] > 2 * np.delete(late, culprit(recording)).max()


def test_a_site_lacks_some_metrics() -> None:
    seed = seed_where(lambda p: "gpu_sm_active_ratio" in p.absent and "node_cpu_pressure_ratio" in p.absent)
    recording = second(seed=seed)
    assert "gpu_sm_active_ratio" not in recording.device
    assert "node_cpu_pressure_ratio" not in recording.node


def test_a_slow_source_repeats_its_reading() -> None:
    seed = seed_where(lambda p: p.refresh_rows == 3 and "gpu_sm_active_ratio" not in p.absent)
    active = second(seed=seed).device["gpu_sm_active_ratio"]
    assert 0.6 < float((np.diff(active, axis=0) == 0).mean()) < 0.8


def test_coarse_instruments_read_whole_watts() -> None:
    power = second(seed=seed_where(lambda p: p.coarse)).device["gpu_power_watts"]
    assert (power == np.round(power)).all()


def test_wrong_readings_come_singly_and_counters_never_go_back() -> None:
    recording = second(seed=seed_where(lambda p: p.outlier_ratio > 2e-4 and p.refresh_rows == 1), minutes=20.0)
    power = recording.device["gpu_power_watts"]
    assert 0 < int((power == 0).sum()) < 0.001 * power.size
    assert (np.diff(recording.device["gpu_ecc_uncorrected_total"], axis=0) >= 0).all()


def test_spare_nodes_rest_and_have_no_ranks() -> None:
    recording = second(seed=seed_where(lambda p: p.spare_nodes == 2))
    ranked = {name for _, name, *_ in recording.members[0].ranks}
    assert [name in ranked for name in recording.layout.names] == [True] * 4 + [False] * 2
    assert np.nanmedian(recording.device["gpu_utilization_ratio"][:, 4:]) == 0
    assert np.isnan(recording.device["train_step"][:, 4:]).all()


def test_heavy_tails_and_memory_are_in_the_noise() -> None:
    physics = Physics(name="second", tails="student", tail_weight=3.0, correlation=0.8)
    noise = physics.noise(np.random.default_rng(1), (4000, 20), 1.0)
    assert np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1] == pytest.approx(0.8, abs=0.05)
    assert float((noise**4).mean() / (noise**2).mean() ** 2) > 4


@pytest.mark.parametrize("fault", ["none", "node_unreachable", "uneven_last_stage", "recurrent_node"])
def test_the_same_seed_gives_the_same_bytes_and_a_valid_trace(fault: str, tmp_path: Path) -> None:
    scenario = second(fault).scenario
    for folder in ("a", "b"):
        write(simulate(scenario), tmp_path / folder)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert sum(step.frame is not None for step in Trace(tmp_path / "a").steps()) > 200


def test_it_is_another_world_than_the_own() -> None:
    assert (recorded().device["gpu_power_watts"][-1] != second().device["gpu_power_watts"][-1]).all()
