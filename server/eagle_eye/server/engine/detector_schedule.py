"""A job's detectors and their schedule: most at every tick, costly ones as often as their answer can change. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

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
from eagle_eye.detectors.types import Blind, Detector, Verdict, Window
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


JOBS_AT_EASE = 128  # up to this many jobs, each runs at the detectors' preferred interval; beyond, less often...
RARELY_S = 5.0  # ...but at least this often: hardware effects last ten seconds before they are reported
SPREAD = (math.sqrt(5) - 1) / 2  # golden-ratio offset between jobs within an interval: spreads them most evenly


class DetectorAnswer(NamedTuple):
    """A detector's answer: verdicts, or why it was blind ("" if it was not)."""

    attempt: int
    asked_s: float
    step: float
    verdicts: tuple[Verdict, ...]
    blind: str = ""


class _Kept(NamedTuple):
    """The state kept for a job: ``share`` is its offset within the interval between two runs, from 0 to 1."""

    share: float
    answers: dict[str, DetectorAnswer]


class _Asked(NamedTuple):
    """A detector and how often it runs."""

    detector: Detector
    name: str
    every_s: float
    by_step: bool


class DetectorSchedule:
    """Runs each detector on a window.

    A detector with ``every_s`` runs at that interval, one that is ``by_step`` when another step has settled, unless it
    has something to report; in between its last answer holds. Jobs that started together take turns. With very many
    jobs both kinds run less often, so that a pass over all of them stays short; detectors that run at every tick, such
    as all that find stopped jobs, still do.
    """

    def __init__(self, detectors: tuple[Detector, ...]) -> None:
        self._detectors = [
            _Asked(
                detector,
                detector.name,
                float(getattr(detector, "every_s", 0.0)),
                bool(getattr(detector, "by_step", False)),
            )
            for detector in detectors
        ]
        self._kept: dict[str, _Kept] = {}
        self._jobs = 0  # number of jobs ever seen

    @property
    def names(self) -> tuple[str, ...]:
        """The detectors' names."""
        return tuple(asked.name for asked in self._detectors)

    def judge_window(self, window: Window) -> tuple[list[Verdict], dict[str, str]]:
        """Return all verdicts, and the reason of each detector that was blind."""
        verdicts: list[Verdict] = []
        blind: dict[str, str] = {}
        kept = self._kept.get(window.job)
        if kept is None:
            kept = self._kept[window.job] = _Kept(self._jobs * SPREAD % 1.0, {})
            self._jobs += 1
        strained = max(len(self._kept) / JOBS_AT_EASE, 1.0)
        step = float(window.steps.number[-1]) if len(window.steps.number) else -1.0
        for asked in self._detectors:
            if asked.every_s > 0 or asked.by_step:
                answer = kept.answers.get(asked.name)
                if answer is None or answer.attempt != window.attempt:
                    # The first answer expires earlier than others, so that the next run falls into the job's turn.
                    asked_s = window.now_s - kept.share * asked.every_s
                    answer = kept.answers[asked.name] = DetectorAnswer(
                        window.attempt, asked_s, step, *_said(asked, window)
                    )
                elif not _holds(answer, window, step, asked, strained, kept.share):
                    said = _said(asked, window)
                    answer = kept.answers[asked.name] = DetectorAnswer(window.attempt, window.now_s, step, *said)
                found, why = answer.verdicts, answer.blind
            else:
                found, why = _said(asked, window)
            if found:
                verdicts.extend(found)
            if why:
                blind[asked.name] = why
        return verdicts, blind

    def forget(self, job: str) -> None:
        """Drop the state kept for a job."""
        self._kept.pop(job, None)


def _holds(answer: DetectorAnswer, window: Window, step: float, asked: _Asked, strained: float, share: float) -> bool:
    """Whether an answer is still valid; ``strained`` is the ratio of jobs to JOBS_AT_EASE."""
    if asked.by_step and (answer.verdicts or answer.step == step):
        return not answer.verdicts
    if strained > 1.0 and asked.every_s < RARELY_S:
        every_s = min(max(asked.every_s, 1.0) * strained, RARELY_S)
        # By the clock, so that jobs keep their turns however many there are.
        return math.floor(window.now_s / every_s + share) == math.floor(answer.asked_s / every_s + share)
    return not asked.by_step and 0 <= window.now_s - answer.asked_s < asked.every_s


def _said(asked: _Asked, window: Window) -> tuple[tuple[Verdict, ...], str]:
    try:
        return tuple(asked.detector.detect(window)), ""
    except Blind as reason:
        return (), str(reason) or "cannot tell"
    except Exception as error:  # noqa: BLE001 - one detector's bug must not silence the others
        return (), f"failed: {type(error).__name__}: {error}"
