"""Every detector, in the order it runs, with the site's settings."""

from __future__ import annotations

from eagle_eye.detectors.hang import Hang
from eagle_eye.detectors.loss_not_finite import LossNotFinite
from eagle_eye.detectors.node_silent import NodeSilent
from eagle_eye.detectors.process_exit import ProcessExit
from eagle_eye.detectors.progress import Patience
from eagle_eye.detectors.straggler import Straggler
from eagle_eye.detectors.types import Detector
from eagle_eye.server.engine.settings import DetectionSettings


def build_detectors(settings: DetectionSettings) -> tuple[Detector, ...]:
    """Return all detectors."""
    patience = Patience(
        floor_s=settings.hang_floor_s,
        typical_steps=settings.hang_typical_steps,
        start_deadline_s=settings.start_deadline_s,
        warmup_steps=settings.warmup_steps,
    )
    return (
        NodeSilent(patience=patience, intervals=settings.silent_intervals, floor_s=settings.silent_floor_s),
        ProcessExit(settle_s=settings.crash_settle_s, silent_s=settings.silent_floor_s),
        Hang(
            patience=patience,
            rank_silent_s=settings.rank_silent_floor_s,
            silent_node_s=settings.silent_floor_s,
        ),
        Straggler(
            ratio=settings.straggler_ratio,
            floor_s=settings.straggler_floor_s,
            ripe_s=settings.straggler_ripe_s,
            false_per_1000_node_days=settings.false_exclusions_per_1000_node_days,
        ),
        LossNotFinite(),
    )
