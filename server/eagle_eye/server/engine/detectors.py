"""Builds every detector, in execution order, with the site's settings."""

from __future__ import annotations

from eagle_eye.detectors.hardware.device_errors import DeviceErrors
from eagle_eye.detectors.hardware.early_signs import EarlySigns
from eagle_eye.detectors.hardware.gpu_hang import GpuHang
from eagle_eye.detectors.hardware.gpu_lost import GpuLost
from eagle_eye.detectors.hardware.gpu_memory import GpuMemory
from eagle_eye.detectors.hardware.host_errors import HostErrors
from eagle_eye.detectors.hardware.nic_degraded import NicDegraded
from eagle_eye.detectors.hardware.nvlink_degraded import NvlinkDegraded
from eagle_eye.detectors.hardware.nvswitch import NvSwitch
from eagle_eye.detectors.hardware.out_of_memory import OutOfMemory
from eagle_eye.detectors.hardware.pcie_degraded import PcieDegraded
from eagle_eye.detectors.hardware.switch_down import SwitchDown
from eagle_eye.detectors.learned.model_anomaly import NO_MODEL, Learned
from eagle_eye.detectors.numbers.loss_course import LossCourse
from eagle_eye.detectors.numbers.loss_not_finite import LossNotFinite
from eagle_eye.detectors.numbers.silent_corruption import SilentCorruption
from eagle_eye.detectors.progress.failed_start import FailedStart
from eagle_eye.detectors.progress.hang import Hang
from eagle_eye.detectors.progress.network_hang import NetworkHang
from eagle_eye.detectors.progress.node_silent import NodeSilent
from eagle_eye.detectors.progress.process_exit import ProcessExit
from eagle_eye.detectors.progress.process_gone import ProcessGone
from eagle_eye.detectors.progress.storage_stall import StorageStall
from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.detectors.signs.progress import Patience
from eagle_eye.detectors.slowness.cpu_contention import CpuContention
from eagle_eye.detectors.slowness.network_congestion import NetworkCongestion
from eagle_eye.detectors.slowness.power_throttle import PowerThrottle
from eagle_eye.detectors.slowness.slow_input import SlowInput
from eagle_eye.detectors.slowness.slow_memory import SlowMemory
from eagle_eye.detectors.slowness.slow_stage import SlowStage
from eagle_eye.detectors.slowness.straggler import Straggler
from eagle_eye.detectors.slowness.thermal_throttle import ThermalThrottle
from eagle_eye.detectors.slowness.throughput_drop import ThroughputDrop
from eagle_eye.detectors.slowness.workload_imbalance import WorkloadImbalance
from eagle_eye.detectors.types import Detector
from eagle_eye.server.engine.settings import DetectionSettings


def build_detectors(settings: DetectionSettings, model: LearnedModel | str = NO_MODEL) -> tuple[Detector, ...]:
    """Return all detectors; ``model`` is the learned model of healthy nodes, or why there is none."""
    patience = Patience(
        floor_s=settings.hang_floor_s,
        typical_steps=settings.hang_typical_steps,
        start_deadline_s=settings.start_deadline_s,
        warmup_steps=settings.warmup_steps,
    )
    return (
        NodeSilent(
            patience=patience,
            intervals=settings.silent_intervals,
            floor_s=settings.silent_floor_s,
            alone_s=settings.silent_alone_s,
        ),
        SwitchDown(patience=patience, intervals=settings.silent_intervals, floor_s=settings.silent_floor_s),
        NetworkHang(patience=patience),
        FailedStart(settle_s=settings.crash_settle_s, silent_s=settings.silent_floor_s),
        NicDegraded(patience=patience, ripe_s=settings.straggler_ripe_s),
        NetworkCongestion(patience=patience),
        StorageStall(patience=patience),
        GpuLost(),
        GpuMemory(),
        GpuHang(patience=patience),
        NvSwitch(patience=patience),
        DeviceErrors(patience=patience),
        HostErrors(patience=patience),
        OutOfMemory(patience=patience),
        ProcessGone(patience=patience, intervals=settings.silent_intervals, floor_s=settings.silent_floor_s),
        EarlySigns(),
        ProcessExit(settle_s=settings.crash_settle_s, silent_s=settings.silent_floor_s),
        Hang(
            patience=patience,
            rank_silent_s=settings.rank_silent_floor_s,
            silent_node_s=settings.silent_floor_s,
        ),
        ThermalThrottle(),
        PowerThrottle(),
        SlowMemory(),
        PcieDegraded(),
        NvlinkDegraded(),
        CpuContention(),
        Straggler(
            ratio=settings.straggler_ratio,
            mild_ratio=min(settings.straggler_mild_ratio, settings.straggler_ratio),
            floor_s=settings.straggler_floor_s,
            ripe_s=settings.straggler_ripe_s,
            false_per_1000_node_days=settings.false_exclusions_per_1000_node_days,
        ),
        SlowInput(
            ratio=settings.straggler_ratio - 1,
            floor_s=settings.straggler_floor_s,
            ripe_s=2 * settings.straggler_ripe_s,  # a cold cache or a moved file passes
        ),
        SlowStage(ratio=min(settings.straggler_mild_ratio, settings.straggler_ratio)),
        SilentCorruption(),
        LossNotFinite(),
        LossCourse(),
        ThroughputDrop(),
        WorkloadImbalance(),
        Learned(
            model=model if isinstance(model, LearnedModel) else None,
            alarms_per_1000_node_days=settings.learned_alarms_per_1000_node_days,
            without=model if isinstance(model, str) else NO_MODEL,
        ),
    )
