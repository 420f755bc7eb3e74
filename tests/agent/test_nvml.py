from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.nvml.simulation import compiled
from eagle_eye.schema.metrics import BY_NAME, Scope, names
from tests.agent.simulated_gpus import Hosts, needs_compiler, uuid

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("new") / "cache")


@pytest.fixture(scope="module")
def old_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("old") / "cache", "-DOLD_DRIVER")


@pytest.fixture
def host(library: Path, tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(library, tmp_path)
    yield hosts
    hosts.end()


@pytest.fixture
def old_host(old_library: Path, tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(old_library, tmp_path)
    yield hosts
    hosts.end()


ACTIVITY = {
    "gpu_sm_active_ratio": 0.45,
    "gpu_tensor_active_ratio": 0.275,
    "gpu_dram_active_ratio": 0.3,
}
TRAFFIC = {
    "gpu_pcie_tx_bytes_per_second": 1e9,
    "gpu_pcie_rx_bytes_per_second": 2e9,
    "gpu_nvlink_tx_bytes_per_second": 1e11,
    "gpu_nvlink_rx_bytes_per_second": 1e11,
}
LEVELS = {
    "gpu_utilization_ratio": 0.5,
    "gpu_memory_used_bytes": 61.0 * 2**30,
    "gpu_power_watts": 385.0,
    "gpu_power_limit_watts": 700.0,
    "gpu_temperature_celsius": 48.0,
    "gpu_memory_temperature_celsius": 57.0,
    "gpu_sm_clock_hertz": 1.95e9,
    "gpu_memory_clock_hertz": 2.619e9,
    "gpu_throttle_reasons": 0.0,
    "gpu_ecc_corrected_total": 0.0,
    "gpu_ecc_uncorrected_total": 0.0,
    "gpu_remapped_rows_total": 0.0,
    "gpu_remap_pending": 0.0,
    "gpu_pcie_link_width": 16.0,
    "gpu_pcie_link_generation": 5.0,
    "gpu_pcie_replays_total": 0.0,
    "gpu_nvlink_errors_total": 0.0,
    "gpu_nvlinks_active": 18.0,
}


def test_every_gpu_metric_of_the_catalogue_is_given_in_its_units(host: Hosts) -> None:
    gpus = host()
    assert gpus.collect().rows[0] == pytest.approx(LEVELS, abs=1e-3)
    seen = gpus.collect()
    assert seen.rows.keys() == set(range(8))
    assert seen.rows[0] == pytest.approx(LEVELS | ACTIVITY | TRAFFIC, rel=1e-3)
    of_exporters = {"gpu_nvlink_bytes_per_second"}  # NVML says how much goes each way
    assert seen.rows[0].keys() == {name for name in names(Scope.DEVICE) if name.startswith("gpu_")} - of_exporters
    assert all(BY_NAME[name].scope is Scope.DEVICE for name in seen.rows[0])


def test_a_healthy_host_has_no_problem_but_says_that_it_is_simulated(host: Hosts) -> None:
    gpus = host()
    first = gpus.collect()
    assert (first.problem, first.raised, first.events) == ("", "", [])
    assert first.log == ["NVML: 8 GPUs (Simulated H100 80GB HBM3), driver simulated"]
    assert gpus.collect().log == []


def test_eight_gpus_cost_little(host: Hosts) -> None:
    gpus = host()
    gpus.collect()
    assert statistics.median(gpus.collect().cpu_s for _ in range(50)) < 3e-3  # 0.4 ms on the machine it was written on


def test_an_older_driver_is_read_by_its_older_names_and_functions(old_host: Hosts) -> None:
    gpus = old_host("gpus 2", "throttle 0")
    gpus.collect()
    seen = gpus.collect(10.0)
    assert seen.rows[0]["gpu_throttle_reasons"] == 0x48
    assert seen.rows[0]["gpu_pcie_tx_bytes_per_second"] == pytest.approx(1e9, rel=1e-3)  # a sample
    missing = {"gpu_remapped_rows_total", "gpu_remap_pending"}
    missing |= {"gpu_nvlink_tx_bytes_per_second", "gpu_nvlink_rx_bytes_per_second"}
    assert seen.rows[0].keys() == (LEVELS | TRAFFIC).keys() - missing
    assert seen.problem == ""


def test_without_its_own_measure_of_activity_traffic_comes_from_counters(host: Hosts) -> None:
    gpus = host("gpus 1", "pre-hopper", "wide-counters")
    assert TRAFFIC.keys().isdisjoint(gpus.collect(0.0).rows[0])
    row = gpus.collect(9.0).rows[0]
    assert row.keys() == (LEVELS | TRAFFIC).keys()
    # Nine of the ten seconds exist for the collector alone.
    assert 0.0 < row["gpu_nvlink_tx_bytes_per_second"] < 2e10
    assert 0.0 < row["gpu_pcie_tx_bytes_per_second"] < 2e8


def test_counters_that_wrap_within_a_second_are_not_used_for_traffic(host: Hosts) -> None:
    gpus = host("gpus 1", "pre-hopper")
    gpus.collect()
    assert gpus.collect(10.0).rows[0]["gpu_pcie_rx_bytes_per_second"] == pytest.approx(2e9, rel=1e-3)


def test_links_that_are_down_and_their_errors_are_counted(host: Hosts) -> None:
    for how in ((), ("per-link",)):
        gpus = host("gpus 2", "down 1 2", *how)
        gpus.collect()
        rows = gpus.collect(10.0).rows
        assert [rows[row]["gpu_nvlinks_active"] for row in (0, 1)] == [18.0, 16.0]
        assert [rows[row]["gpu_nvlink_errors_total"] for row in (0, 1)] == [0.0, 6.0]


def test_a_gpu_without_nvlink_has_no_readings_of_it(host: Hosts) -> None:
    gpus = host("gpus 1", "links 0")
    gpus.collect()
    seen = gpus.collect()
    assert [metric for metric in seen.rows[0] if "nvlink" in metric] == []
    assert seen.problem == ""


def test_what_is_wrong_with_a_gpu_shows_in_its_row_alone(host: Hosts) -> None:
    gpus = host("throttle 2", "ecc 5 7")
    rows = gpus.collect().rows
    assert rows[2]["gpu_sm_clock_hertz"] == 1.2e9
    assert rows[2]["gpu_throttle_reasons"] == 0x48
    assert rows[2]["gpu_temperature_celsius"] == 89.0
    assert [rows[row]["gpu_ecc_uncorrected_total"] for row in (2, 5)] == [0.0, 7.0]
    assert [rows[row]["gpu_remap_pending"] for row in (2, 5)] == [0.0, 1.0]
    assert rows[5]["gpu_throttle_reasons"] == 0.0


def test_a_gpu_that_waits_for_its_peers_is_busy_and_draws_a_third(host: Hosts) -> None:
    gpus = host("waiting 2")
    gpus.collect()
    rows = gpus.collect().rows
    assert [rows[gpu]["gpu_power_watts"] for gpu in (1, 2)] == pytest.approx([385.0, 119.5], abs=0.01)
    assert [rows[gpu]["gpu_utilization_ratio"] for gpu in (1, 2)] == [0.5, 1.0]
    assert [rows[gpu]["gpu_tensor_active_ratio"] > 0 for gpu in (1, 2)] == [True, False]


def test_the_counters_of_a_gpu_that_waited_go_on_from_where_they_stood(host: Hosts) -> None:
    gpus = host("gpus 1", "pre-hopper", "wide-counters")
    gpus.collect()
    gpus.says("gpus 1", "pre-hopper", "wide-counters", "waiting 0")
    gpus.collect()
    waits = gpus.collect().rows[0]["gpu_pcie_tx_bytes_per_second"]
    gpus.says("gpus 1", "pre-hopper", "wide-counters")
    gpus.collect()
    assert (waits, gpus.collect().rows[0]["gpu_pcie_tx_bytes_per_second"] > 0) == (0.0, True)


def test_what_gpus_never_give_is_logged_once_and_no_failure(host: Hosts) -> None:
    gpus = host("gpus 4", "bare 1", "bare 2")
    first = gpus.collect()
    assert first.rows[1].keys() == {"gpu_temperature_celsius"}
    assert len(first.rows[0]) > 15
    assert first.problem == ""
    (line,) = first.log[1:]
    assert line.startswith("NVML: gpu 1, 2: never given: utilization, memory, power")
    assert line.endswith("(Not Supported)")
    gpus.collect()  # other ways to read the same have been tried
    assert gpus.collect(10.0).log == []


def test_a_missing_permission_costs_those_readings_alone_and_is_logged_once(host: Hosts) -> None:
    gpus = host("denied 0")
    first = gpus.collect()
    assert first.rows[0].keys() == LEVELS.keys() - {"gpu_power_watts"}
    assert first.log[1:] == [
        "NVML: gpu 0: never given: power, processes (Insufficient Permissions); an agent run as root may see more"
    ]
    assert gpus.collect(10.0).log == []


def test_a_gpu_in_mig_mode_has_fewer_readings(host: Hosts) -> None:
    gpus = host("gpus 2", "mig 1 3")
    gpus.collect()
    seen = gpus.collect()
    assert seen.rows[1].keys() == LEVELS.keys() - {"gpu_utilization_ratio"}
    assert seen.rows[0].keys() == (LEVELS | ACTIVITY | TRAFFIC).keys()
    assert seen.problem == ""


def test_ranks_on_mig_instances_find_the_row_of_their_gpu(host: Hosts) -> None:
    gpus = host("gpus 2", "mig 1 2")
    gpus.collect()
    instance = "51000000-0000-4000-8000-000200000001"
    found = gpus.devices_by_uuid()
    assert found[f"MIG-{instance}"] == found[f"GPU-{instance}"] == found[uuid(1)] == 1
    assert len(found) == 2 + 2 * 2
    gpus.says("gpus 2", "mig 1 1")
    gpus.collect(10.0)
    assert f"MIG-{instance}" not in gpus.devices_by_uuid()
    assert len(gpus.devices_by_uuid()) == 2 + 2


def test_processes_are_found_on_the_gpu_on_which_they_hold_most(host: Hosts) -> None:
    gpus = host("process 0 100 60000", "process 0 101 500", "process 1 101 60000", "process 3 7 -1")
    gpus.collect()
    assert gpus.compute_processes() == {100: 0, 101: 1, 7: 3}
    gpus.says("process 2 100 1")
    gpus.collect(10.0)
    assert gpus.compute_processes() == {100: 2}


def test_a_process_on_several_gpus_is_left_out_when_nobody_says_how_much_it_holds(host: Hosts) -> None:
    gpus = host("process 0 100 -1", "process 1 100 500")
    gpus.collect()
    assert gpus.compute_processes() == {}


def test_before_the_first_collection_no_process_is_known(host: Hosts) -> None:
    assert host().compute_processes() == {}
