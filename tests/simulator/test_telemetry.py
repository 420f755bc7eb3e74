"""Hardware readings follow from what the GPUs do."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_eye.schema.metrics import BY_NAME, METRICS, MetricKind, Scope
from eagle_eye.simulator.simulate import Recording
from tests.simulator.builders import culprit, late, onset_s, recorded, row_at

SLOW = (
    "straggler",
    "thermal_throttle",
    "power_throttle",
    "pcie_degraded",
    "nic_degraded",
    "nvlink_degraded",
    "cpu_contention",
)


# No simulated job has torchft's replica groups, or a process that a signal has stopped.
NOT_SIMULATED = {"train_quorum", "rank_stopped_ratio", "train_log_lines_since_step", "gpu_nvlink_bytes_per_second"}


def after(recording: Recording, name: str, seconds: float = 20.0) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return a device metric, mean over the rows from ``seconds`` after the onset on, (N, G)."""
    rows = slice(row_at(recording, onset_s(recording) + seconds), None)
    return np.asarray(recording.device[name][rows].mean(axis=0), dtype=np.float64)


@pytest.mark.parametrize("fault", ["none", "gpu_memory_error", "nic_degraded", "nvlink_degraded", "link_flap"])
def test_counters_never_go_back(fault: str) -> None:
    recording = recorded(fault)
    everything = recording.device | recording.node | recording.link
    counters = [name for name in everything if BY_NAME[name].kind is MetricKind.COUNTER]
    assert len(counters) > 5
    for name in counters:
        steps = np.diff(everything[name], axis=0)
        assert (steps[np.isfinite(steps)] >= 0).all(), name


def test_ratios_stay_ratios() -> None:
    recording = recorded("cpu_contention", strength="strong")
    everything = recording.device | recording.node
    ratios = {name for name in everything if name.endswith("_ratio")}
    assert ratios > {"gpu_utilization_ratio", "node_cpu_pressure_ratio"}
    for name in ratios:
        assert 0 <= np.nanmin(everything[name]) <= np.nanmax(everything[name]) <= 1, name


def test_every_metric_of_the_catalogue_is_written_by_some_job() -> None:
    written: set[str] = set()
    for seed in range(8):
        recording = recorded(seed=seed)
        written |= set(recording.device) | set(recording.node) | set(recording.link)
    assert written == {spec.name for spec in METRICS} - NOT_SIMULATED


def test_scopes_agree_with_the_catalogue() -> None:
    recording = recorded()
    for scope, values in ((Scope.DEVICE, recording.device), (Scope.NODE, recording.node), (Scope.LINK, recording.link)):
        assert {BY_NAME[name].scope for name in values} == {scope}


def test_waiting_gpus_look_utilised_and_rest_their_tensor_cores() -> None:
    recording = recorded("hang", variant="late")
    node = culprit(recording)
    peers = [n for n in range(recording.layout.nodes) if n != node]
    assert after(recording, "gpu_utilization_ratio")[peers].min() > 0.95
    assert after(recording, "gpu_tensor_active_ratio")[peers].max() < 0.01
    idle_w = recording.layout.models[0].idle_w
    power_w = after(recording, "gpu_power_watts")[peers]
    assert power_w.min() > 1.4 * idle_w
    assert power_w.max() < 0.5 * recording.layout.models[0].power_limit_w


def test_a_throttled_gpu_is_hot_slow_and_draws_less() -> None:
    recording = recorded("thermal_throttle", gpus=8)
    node = culprit(recording)
    device = int(late(recording, "gpu_sm_clock_hertz")[node].argmin())
    celsius, clock = late(recording, "gpu_temperature_celsius"), late(recording, "gpu_sm_clock_hertz")
    assert celsius[node, device] == celsius.max() > 80
    assert clock[node, device] < 0.95 * np.median(clock)
    assert late(recording, "gpu_power_watts")[node, device] < np.median(late(recording, "gpu_power_watts"))
    assert int(recording.device["gpu_throttle_reasons"][-1, node, device]) & 0x60


def test_temperature_lags_behind_power() -> None:
    recording = recorded("hang", variant="symmetric")
    row = row_at(recording, onset_s(recording))
    celsius = recording.device["gpu_temperature_celsius"].mean(axis=(1, 2))
    assert celsius[row + 8] > celsius[-1] + 5
    assert celsius[row - 1] > celsius[row + 8]


def test_busy_gpus_flicker_at_their_power_limit_without_harm() -> None:
    bits = recorded(gpus=8).device["gpu_throttle_reasons"].astype(int)
    assert set(np.unique(bits)) <= {0, 1, 4, 5}
    assert ((bits & 4) > 0).any(axis=0).all()


@pytest.mark.parametrize("fault", SLOW)
def test_slowness_slows_the_whole_job(fault: str) -> None:
    recording = recorded(fault, strength="strong")
    before = recording.device["train_step_seconds"][: row_at(recording, onset_s(recording) - 5)].mean()
    assert late(recording, "train_step_seconds").min() > 1.1 * before
    assert recording.labels[0].expect == "exclude"


@pytest.mark.parametrize("fault", SLOW)
def test_slowness_that_costs_less_than_a_restart_expects_nothing(fault: str) -> None:
    recording = recorded(fault, strength="faint", nodes=8)
    assert recording.slowdown < 600 / 86_400
    assert recording.labels[0].expect == "none"


def test_creeping_faults_grow() -> None:
    recording = recorded("straggler", creeping=True, strength="strong", variant="one")
    seconds = recording.device["train_step_seconds"].mean(axis=(1, 2))
    row = row_at(recording, onset_s(recording))
    assert seconds[row - 2] < seconds[row + 30] < seconds[-1]
    assert seconds[row + 15] < 0.9 * seconds[-1]


def test_a_lost_gpu_sends_no_rows_while_its_node_does() -> None:
    recording = recorded("gpu_lost")
    row, node = row_at(recording, onset_s(recording) + 20), culprit(recording)
    assert (~recording.device_arrived[row:, node]).all(axis=0).sum() == 1
    assert recording.arrived[row:, node].mean() > 0.9


def test_corruption_shows_before_the_reduction_and_is_thinned_after() -> None:
    recording = recorded("silent_data_corruption", variant="gradient", gpus=8)
    row, node = row_at(recording, onset_s(recording) + 6), culprit(recording)
    local = recording.device["train_local_grad_norm"][row]
    assert local.argmax() // recording.layout.gpus == node
    assert np.unique(recording.device["train_grad_norm"][row]).size <= 2


def test_checksums_agree_between_replicas_of_one_step_but_for_the_corrupted() -> None:
    recording = recorded("silent_data_corruption", variant="checksum")
    row, node = row_at(recording, onset_s(recording) + 20), culprit(recording)
    layout = recording.layout
    step, checksum = recording.device["train_step"][row], recording.device["train_parameter_checksum"][row]
    odd = set()
    for stage in range(layout.pp):
        for lane in range(layout.tp):
            for number in np.unique(step):
                group = (layout.stage() == stage) & (layout.lane() == lane) & (step == number)
                if group.sum() > 2:
                    usual = np.median(checksum[group])
                    odd |= set(np.argwhere(group & (checksum != usual))[:, 0].tolist())
    assert odd <= {node}


def test_loss_is_infinite_everywhere_where_it_was_not_finite() -> None:
    recording = recorded("loss_not_finite")
    assert np.isinf(recording.device["train_loss"][-1]).all()
    assert np.isfinite(recording.device["train_step_seconds"][-1]).all()


def test_clock_skew_moves_stamps_and_not_the_truth() -> None:
    recording = recorded("clock_skew")
    offset_s = np.abs(recording.time - recording.true_time).mean(axis=0)
    assert (offset_s > 1.0).sum() == 1
    reported_s = recording.node["node_clock_offset_seconds"].mean(axis=0)
    assert np.allclose(reported_s, recording.time[0] - recording.true_time[0], atol=0.01)
