"""Models each metric of a GPU in training: its level, its variation, and the resolution of its source.

Levels are an H100's (vendor guides); resolutions are NVML's and DCGM's: whole percent and degrees, clocks in 15 MHz
steps, milliwatts, KB/s on PCIe, KiB/s on NVLink. Counters and steps are in ``values.py``.
"""

from __future__ import annotations

from typing import NamedTuple

MIB = float(1 << 20)


class Gauge(NamedTuple):
    """One metric, in its unit. All deviations are standard deviations.

    ``device``: between GPUs, for ever. ``load`` and ``heat``: with the GPU's load and with its lag of half a minute.
    ``noise``: from one reading to the next. Readings are rounded to ``step`` and kept between ``low`` and ``high``.
    """

    name: str
    level: float
    device: float
    load: float
    heat: float
    noise: float
    step: float
    low: float
    high: float


GAUGES: tuple[Gauge, ...] = (
    Gauge("gpu_utilization_ratio", 0.985, 0.002, 0.004, 0.0, 0.012, 0.01, 0.0, 1.0),
    Gauge("gpu_tensor_active_ratio", 0.47, 0.006, 0.012, 0.0, 0.006, 0.001, 0.0, 1.0),
    Gauge("gpu_sm_active_ratio", 0.80, 0.008, 0.010, 0.0, 0.006, 0.001, 0.0, 1.0),
    Gauge("gpu_dram_active_ratio", 0.39, 0.006, 0.010, 0.0, 0.006, 0.001, 0.0, 1.0),
    Gauge("gpu_memory_used_bytes", 66_000 * MIB, 900 * MIB, 0.0, 6 * MIB, 0.0, 2 * MIB, 0.0, 81_559 * MIB),
    Gauge("gpu_power_watts", 655.0, 11.0, 9.0, 0.0, 5.0, 0.001, 60.0, 701.0),
    Gauge("gpu_power_limit_watts", 700.0, 0.0, 0.0, 0.0, 0.0, 1.0, 700.0, 700.0),
    Gauge("gpu_temperature_celsius", 61.0, 2.2, 0.2, 1.1, 0.0, 1.0, 20.0, 90.0),
    Gauge("gpu_memory_temperature_celsius", 73.0, 2.6, 0.1, 1.4, 0.0, 1.0, 20.0, 100.0),
    Gauge("gpu_sm_clock_hertz", 1_755e6, 8e6, -14e6, -4e6, 9e6, 15e6, 345e6, 1_980e6),
    Gauge("gpu_memory_clock_hertz", 2_619e6, 0.0, 0.0, 0.0, 0.0, 1e6, 2_619e6, 2_619e6),
    Gauge("gpu_remap_pending", 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0),
    Gauge("gpu_pcie_rx_bytes_per_second", 3.1e9, 3e7, 6e7, 0.0, 9e7, 1e3, 0.0, 6.4e10),
    Gauge("gpu_pcie_tx_bytes_per_second", 2.9e9, 3e7, 6e7, 0.0, 9e7, 1e3, 0.0, 6.4e10),
    Gauge("gpu_pcie_link_width", 16.0, 0.0, 0.0, 0.0, 0.0, 1.0, 16.0, 16.0),
    Gauge("gpu_pcie_link_generation", 5.0, 0.0, 0.0, 0.0, 0.0, 1.0, 5.0, 5.0),
    Gauge("gpu_nvlink_rx_bytes_per_second", 9.2e10, 8e8, 1.6e9, 0.0, 1.3e9, 1_024.0, 0.0, 4.5e11),
    Gauge("gpu_nvlink_tx_bytes_per_second", 9.2e10, 8e8, 1.6e9, 0.0, 1.3e9, 1_024.0, 0.0, 4.5e11),
    Gauge("gpu_nvlinks_active", 18.0, 0.0, 0.0, 0.0, 0.0, 1.0, 18.0, 18.0),
)
COUNTERS_PER_DAY: dict[str, float] = {  # single events of healthy hardware
    "gpu_ecc_corrected_total": 0.3,
    "gpu_ecc_uncorrected_total": 0.0,
    "gpu_remapped_rows_total": 0.0,
    "gpu_pcie_replays_total": 1.0,
    "gpu_nvlink_errors_total": 0.05,
}
