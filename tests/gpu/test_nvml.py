"""The collector on GPUs that are really there: what no simulation can vouch for."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pynvml
import pytest

from eagle_eye.agent.collectors.nvml import NvmlCollector
from eagle_eye.detectors.device_types import DeviceType, device_type
from eagle_eye.schema.metrics import Scope, names
from tests.agent.fakes import until
from tests.gpu.conftest import Keep
from tests.gpu.machine import PROGRAMS, TorchPython, child_environment, needs_gpu

pytestmark = needs_gpu


@pytest.fixture
def collector() -> Iterator[NvmlCollector]:
    made = NvmlCollector()
    yield made
    made.close()


@pytest.fixture
def handle() -> Iterator[Any]:
    """The first GPU, as NVML itself has it."""
    pynvml.nvmlInit()
    yield pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()


@pytest.fixture
def documented(handle: Any) -> DeviceType:
    name = pynvml.nvmlDeviceGetName(handle)
    found = device_type(name)
    if found is None:
        pytest.skip(f"{name!r} is not in the table of device types: nothing is documented of it")
    return found


def test_a_real_gpu_gives_plausible_readings(collector: NvmlCollector, keep: Keep) -> None:
    collector.collect(time.time())
    time.sleep(1.0)
    seen = collector.collect(time.time())
    assert seen.problem == ""
    keep("readings", seen.devices[0])
    keep("never_given", sorted(set(names(Scope.DEVICE)) - seen.devices[0].keys()))
    for row in seen.devices.values():
        assert row.keys() <= set(names(Scope.DEVICE))
        assert 0.0 <= row["gpu_utilization_ratio"] <= 1.0
        assert 0.0 < row["gpu_temperature_celsius"] < 110.0
        assert 5.0 < row["gpu_power_watts"] < 2_000.0
        assert 1e8 < row["gpu_sm_clock_hertz"] < 4e9
        assert 1 <= row["gpu_pcie_link_width"] <= 32
        assert all(0.0 <= row[name] <= 1.0 for name in row if name.endswith("_ratio"))


def test_a_gpu_from_hopper_on_tells_its_activity(collector: NvmlCollector, handle: Any) -> None:
    if pynvml.nvmlDeviceGetArchitecture(handle) < pynvml.NVML_DEVICE_ARCH_HOPPER:
        pytest.skip("this GPU is older than Hopper: it does not measure its activity")
    collector.collect(time.time())
    time.sleep(1.0)
    row = collector.collect(time.time()).devices[0]
    for metric in ("gpu_sm_active_ratio", "gpu_tensor_active_ratio", "gpu_dram_active_ratio"):
        assert metric in row
    assert "gpu_pcie_rx_bytes_per_second" in row


def test_activity_rises_with_work(collector: NvmlCollector, handle: Any, cuda_python: TorchPython, keep: Keep) -> None:
    if pynvml.nvmlDeviceGetArchitecture(handle) < pynvml.NVML_DEVICE_ARCH_HOPPER:
        pytest.skip("this GPU is older than Hopper: it does not measure its activity")
    command = [cuda_python.path, str(PROGRAMS / "multiply.py")]
    with subprocess.Popen(command, env=child_environment()) as child:
        seen: dict[str, float] = {}

        def works() -> bool:
            assert child.poll() is None, "the program that loads the GPU has ended"
            time.sleep(0.5)
            busiest = max(collector.collect(time.time()).devices.values(), key=activity_ratio, default=seen)
            seen.update(busiest)
            return activity_ratio(seen) > 0.5 and seen.get("gpu_tensor_active_ratio", 0.0) > 0.2

        try:
            until(works, 90.0)
        finally:
            keep("under_load", seen)
            child.kill()
    assert seen["gpu_power_watts"] > 100.0


def activity_ratio(row: Mapping[str, float]) -> float:
    return row.get("gpu_sm_active_ratio", 0.0)


def test_what_is_documented_of_its_type_is_there(collector: NvmlCollector, documented: DeviceType) -> None:
    collector.collect(time.time())
    time.sleep(1.0)
    assert documented.counters <= collector.collect(time.time()).devices[0].keys()


def test_its_own_temperature_limits_are_those_documented(handle: Any, documented: DeviceType, keep: Keep) -> None:
    limits = {
        "shutdown": (pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN, documented.shutdown_c),
        "slowdown": (pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, documented.slowdown_c),
        "memory": (pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX, documented.memory_max_operating_c),
        "operation": (pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX, documented.max_operating_c),
    }
    reported: dict[str, float] = {}
    for name, (threshold, _) in limits.items():
        with contextlib.suppress(pynvml.NVMLError):  # since Ada drivers need not tell them so
            reported[name] = float(pynvml.nvmlDeviceGetTemperatureThreshold(handle, threshold))
    keep("temperature_limits_celsius", reported)
    both = {name: figure.value for name, (_, figure) in limits.items() if figure is not None and name in reported}
    if not both:
        pytest.skip(f"the driver tells {reported or 'none'}, and of {documented.name} no such limit is published")
    assert {name: reported[name] for name in both} == both


def test_it_has_no_more_links_than_documented(collector: NvmlCollector, documented: DeviceType, keep: Keep) -> None:
    """Fewer may be up: a virtual machine with one GPU uses none."""
    if documented.nvlinks is None:
        pytest.skip(f"how many links {documented.name} uses depends on its bridges")
    active = collector.collect(time.time()).devices[0].get("gpu_nvlinks_active", 0.0)
    keep("nvlinks_active", active)
    assert 0.0 <= active <= documented.nvlinks.value


def test_its_names_lead_to_its_row(collector: NvmlCollector) -> None:
    collector.collect(time.time())
    assert set(collector.devices_by_uuid.values()) == set(collector.devices_by_bus_id.values())
    assert all(uuid.startswith(("GPU-", "MIG-")) for uuid in collector.devices_by_uuid)


def test_a_look_at_real_gpus_costs_little(collector: NvmlCollector, keep: Keep) -> None:
    gpus = len(collector.collect(time.time()).devices)
    begin_s, cpu_s = time.monotonic(), time.process_time()
    for _ in range(20):
        time.sleep(0.25)
        collector.collect(time.time())
    keep("look_processor_s", (time.process_time() - cpu_s) / 20)
    assert (time.process_time() - cpu_s) / 20 < 0.005 * max(1, gpus) / 8 + 0.005
    assert (time.monotonic() - begin_s) / 20 < 0.25 + 0.1 * gpus
