"""The collector on GPUs that are really there: what no simulation can vouch for."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import pynvml
import pytest

from eagle_eye.agent.collectors.nvml import NvmlCollector
from eagle_eye.schema.metrics import Scope, names


def missing() -> str:
    """Return why there is nothing to test on, "" where there is."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        pynvml.nvmlInit()
    except (OSError, pynvml.NVMLError) as error:
        return f"no NVIDIA GPU with its driver: {error}"
    count = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    return "" if count else "NVML lists no GPU"


WHY_NOT = missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture
def collector() -> Iterator[NvmlCollector]:
    made = NvmlCollector()
    yield made
    made.close()


def test_a_real_gpu_gives_plausible_readings(collector: NvmlCollector) -> None:
    collector.collect(time.time())
    time.sleep(1.0)
    seen = collector.collect(time.time())
    assert seen.problem == ""
    for row in seen.devices.values():
        assert row.keys() <= set(names(Scope.DEVICE))
        assert 0.0 <= row["gpu_utilization_ratio"] <= 1.0
        assert 0.0 < row["gpu_temperature_celsius"] < 110.0
        assert 5.0 < row["gpu_power_watts"] < 2_000.0
        assert 1e8 < row["gpu_sm_clock_hertz"] < 4e9
        assert 1 <= row["gpu_pcie_link_width"] <= 32
        assert all(0.0 <= row[name] <= 1.0 for name in row if name.endswith("_ratio"))


def test_a_gpu_from_hopper_on_tells_its_activity(collector: NvmlCollector) -> None:
    pynvml.nvmlInit()
    old = pynvml.nvmlDeviceGetArchitecture(pynvml.nvmlDeviceGetHandleByIndex(0)) < pynvml.NVML_DEVICE_ARCH_HOPPER
    pynvml.nvmlShutdown()
    if old:
        pytest.skip("this GPU is older than Hopper: it does not measure its activity")
    collector.collect(time.time())
    time.sleep(1.0)
    row = collector.collect(time.time()).devices[0]
    for metric in ("gpu_sm_active_ratio", "gpu_tensor_active_ratio", "gpu_dram_active_ratio"):
        assert metric in row
    assert "gpu_pcie_rx_bytes_per_second" in row


def test_its_names_lead_to_its_row(collector: NvmlCollector) -> None:
    collector.collect(time.time())
    assert set(collector.devices_by_uuid.values()) == set(collector.devices_by_bus_id.values())
    assert all(uuid.startswith(("GPU-", "MIG-")) for uuid in collector.devices_by_uuid)


def test_a_look_at_real_gpus_costs_little(collector: NvmlCollector) -> None:
    gpus = len(collector.collect(time.time()).devices)
    begin_s, cpu_s = time.monotonic(), time.process_time()
    for _ in range(20):
        time.sleep(0.25)
        collector.collect(time.time())
    assert (time.process_time() - cpu_s) / 20 < 0.005 * max(1, gpus) / 8 + 0.005
    assert (time.monotonic() - begin_s) / 20 < 0.25 + 0.1 * gpus
