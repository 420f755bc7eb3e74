"""Asking the detectors: most of them at every tick, a costly one as often as its answer can change. Pure."""

from __future__ import annotations

from typing import NamedTuple

from eagle_eye.detectors.types import Blind, Detector, Verdict, Window


class Answer(NamedTuple):
    """A detector's word: verdicts, or why it could not tell ("" when it could)."""

    attempt: int
    asked_s: float
    verdicts: tuple[Verdict, ...]
    blind: str = ""


class Asking:
    """Asks each detector of a window. One with an ``every_s`` is asked that often; in between its last answer holds."""

    def __init__(self, detectors: tuple[Detector, ...]) -> None:
        self._detectors = detectors
        self._kept: dict[str, dict[str, Answer]] = {}

    def ask(self, window: Window) -> tuple[list[Verdict], dict[str, str]]:
        """Return all verdicts, and why each detector that could not tell could not."""
        verdicts: list[Verdict] = []
        blind: dict[str, str] = {}
        for detector in self._detectors:
            answer = self._answer(detector, window)
            verdicts.extend(answer.verdicts)
            if answer.blind:
                blind[detector.name] = answer.blind
        return verdicts, blind

    def forget(self, job: str) -> None:
        """Drop what is kept of a job."""
        self._kept.pop(job, None)

    def _answer(self, detector: Detector, window: Window) -> Answer:
        every_s = float(getattr(detector, "every_s", 0.0))
        if every_s <= 0:
            return _asked(detector, window)
        kept = self._kept.setdefault(window.job, {})
        known = kept.get(detector.name)
        if known is None or known.attempt != window.attempt or not 0 <= window.now_s - known.asked_s < every_s:
            known = kept[detector.name] = _asked(detector, window)
        return known


def _asked(detector: Detector, window: Window) -> Answer:
    try:
        return Answer(window.attempt, window.now_s, tuple(detector.detect(window)))
    except Blind as reason:
        return Answer(window.attempt, window.now_s, (), str(reason) or "cannot tell")
    except Exception as error:  # noqa: BLE001 - one detector's bug must not silence the others
        return Answer(window.attempt, window.now_s, (), f"failed: {type(error).__name__}: {error}")
