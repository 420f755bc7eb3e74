"""Asking the detectors: most of them at every tick, a costly one as often as its answer can change. Pure."""

from __future__ import annotations

from typing import NamedTuple

from eagle_eye.detectors.types import Blind, Detector, Verdict, Window


class Answer(NamedTuple):
    """A detector's word: verdicts, or why it could not tell ("" when it could)."""

    attempt: int
    asked_s: float
    step: float
    verdicts: tuple[Verdict, ...]
    blind: str = ""


class Asking:
    """Asks each detector of a window.

    One with an ``every_s`` is asked that often, one that is ``by_step`` when another step has settled, unless it has
    something to say; in between its last answer holds.
    """

    def __init__(self, detectors: tuple[Detector, ...]) -> None:
        self._detectors = detectors
        self._every_s = [float(getattr(detector, "every_s", 0.0)) for detector in detectors]
        self._by_step = [bool(getattr(detector, "by_step", False)) for detector in detectors]
        self._kept: dict[str, dict[str, Answer]] = {}

    def ask(self, window: Window) -> tuple[list[Verdict], dict[str, str]]:
        """Return all verdicts, and why each detector that could not tell could not."""
        verdicts: list[Verdict] = []
        blind: dict[str, str] = {}
        kept = self._kept.setdefault(window.job, {})
        step = float(window.steps.number[-1]) if len(window.steps.number) else -1.0
        for detector, every_s, by_step in zip(self._detectors, self._every_s, self._by_step, strict=True):
            answer = kept.get(detector.name) if every_s > 0 or by_step else None
            if answer is None or answer.attempt != window.attempt or not _holds(answer, window, step, every_s, by_step):
                answer = kept[detector.name] = _asked(detector, window, step)
            verdicts.extend(answer.verdicts)
            if answer.blind:
                blind[detector.name] = answer.blind
        return verdicts, blind

    def forget(self, job: str) -> None:
        """Drop what is kept of a job."""
        self._kept.pop(job, None)


def _holds(answer: Answer, window: Window, step: float, every_s: float, by_step: bool) -> bool:
    if by_step:
        return not answer.verdicts and answer.step == step
    return 0 <= window.now_s - answer.asked_s < every_s


def _asked(detector: Detector, window: Window, step: float) -> Answer:
    try:
        return Answer(window.attempt, window.now_s, step, tuple(detector.detect(window)))
    except Blind as reason:
        return Answer(window.attempt, window.now_s, step, (), str(reason) or "cannot tell")
    except Exception as error:  # noqa: BLE001 - one detector's bug must not silence the others
        return Answer(window.attempt, window.now_s, step, (), f"failed: {type(error).__name__}: {error}")
