"""Asking the detectors: most of them at every tick, a costly one as often as its answer can change. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from eagle_eye.detectors.types import Blind, Detector, Verdict, Window

JOBS_AT_EASE = 128  # of so many jobs each is asked about as often as detectors like; of more each more rarely...
RARELY_S = 5.0  # ...but at least so often: what hardware does lasts ten seconds before anybody is told of it
SPREAD = (math.sqrt(5) - 1) / 2  # of the time between two askings, from one job to the next: as even as it can be


class DetectorAnswer(NamedTuple):
    """A detector's word: verdicts, or why it could not tell ("" when it could)."""

    attempt: int
    asked_s: float
    step: float
    verdicts: tuple[Verdict, ...]
    blind: str = ""


class _Kept(NamedTuple):
    """What is kept of a job: ``share`` is how far into the time between two askings its turn comes, from 0 to 1."""

    share: float
    answers: dict[str, DetectorAnswer]


class _Asked(NamedTuple):
    """A detector and how often it is asked."""

    detector: Detector
    name: str
    every_s: float
    by_step: bool


class Asking:
    """Asks each detector of a window.

    One with an ``every_s`` is asked that often, one that is ``by_step`` when another step has settled, unless it has
    something to say; in between its last answer holds. Jobs that began together are asked in turn. With very many jobs
    both kinds are asked more rarely, so that a pass over all of them stays short; whatever is asked at every
    tick, as all that stops a job, still is.
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
        self._jobs = 0  # that were ever asked about

    def ask(self, window: Window) -> tuple[list[Verdict], dict[str, str]]:
        """Return all verdicts, and why each detector that could not tell could not."""
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
                    # The first answer holds for less than others, so that the next one comes in the job's turn.
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
        """Drop what is kept of a job."""
        self._kept.pop(job, None)


def _holds(answer: DetectorAnswer, window: Window, step: float, asked: _Asked, strained: float, share: float) -> bool:
    """Whether an answer still counts; ``strained`` is by how many times there are more jobs than are easy."""
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
