"""MLPerf log lines, ``:::MLLOG {json}``, of any program. Pure.

Progress is counted in samples and converted to steps by the global batch size, which is logged at the start. The steps
of a log found later are unknown. Some programs count tokens by the same names: their counts are beyond what the samples
of as many steps as fit between two lines could be, and are converted by the sequence length as well.
"""

from __future__ import annotations

import math

import msgspec

from eagle_eye.agent.training_logs.reading import (
    STEP_MAX,
    Framework,
    LineWriter,
    LogReading,
    Parse,
    Quiet,
    decoded,
    number,
)

MARK = ":::MLLOG "
LINE_CHARS_MAX = 8_192

_LOSSES = ("reduced_train_loss", "train_loss", "loss")
_SAMPLES = ("samples_count", "step", "epoch_num")  # names that programs use for the number of samples trained on
_STEP_S = ("train_step_time", "train_step_timing in s")
TOKENS_RATIO = 8.0  # of steps by samples to those that fit between two lines: shorter sequences than this do not occur
_EVALUATED = ("validation", "eval")
_QUIET = {"eval_start": Quiet.EVAL_BEGIN, "eval_stop": Quiet.EVAL_END}


class _Entry(msgspec.Struct):
    """One line; unlisted keys are ignored."""

    key: str
    time_ms: float = math.nan
    value: object = None
    metadata: dict[str, object] = {}

    @property
    def stamp_s(self) -> float | None:
        """The line's time."""
        return self.time_ms / 1e3 if math.isfinite(self.time_ms) else None


_decoder = msgspec.json.Decoder(_Entry)


class MlLogParser:
    """Parses the lines of one log."""

    def __init__(self) -> None:
        self._batch_size = 0.0  # samples per step; 0: unknown
        self._sequence_length = 0.0  # tokens per sample; 0: unknown
        self._in_tokens: bool | None = None  # what the program counts; None: not known yet
        self._before: tuple[float, float] | None = None  # count and stamp of the last line of progress, or the start
        self._step = 0  # the last one of this run

    def __call__(self, line: str) -> LogReading | None:
        """Parse the line; return None when it is not MLPerf's or contains no progress."""
        at = line.find(MARK, 0, 200)
        if at < 0 or len(line) > LINE_CHARS_MAX:
            return None
        entry = decoded(line[at + len(MARK) :], _decoder)
        if entry is None:
            return None
        if entry.key == "global_batch_size":
            self._batch_size = _count(entry.value) or 0.0
            self._step, self._before = 0, None if entry.stamp_s is None else (0.0, entry.stamp_s)
            return LogReading(writer=LineWriter.FIRST)
        if entry.key == "max_sequence_length":
            self._sequence_length = _count(entry.value) or 0.0
            return LogReading(writer=LineWriter.FIRST)
        if entry.key in _QUIET:
            return LogReading(quiet=_QUIET[entry.key], stamp_s=entry.stamp_s, writer=LineWriter.FIRST)
        if entry.key == "tracked_stats" and isinstance(entry.value, dict):
            return self._progress(entry.value, entry)
        if entry.key == "train_loss":
            return self._progress({"train_loss": entry.value}, entry)
        return None

    def _progress(self, values: dict[str, object], entry: _Entry) -> LogReading:
        if any(name.startswith(_EVALUATED) for name in values):
            return LogReading(writer=LineWriter.FIRST)  # counts evaluation samples
        step_s = next((found for name in _STEP_S if (found := _count(values.get(name))) is not None), None)
        counted = next((found for name in _SAMPLES if (found := _count(entry.metadata.get(name))) is not None), None)
        step = None
        if counted is not None and self._batch_size >= 1.0:
            per_step = self._counted_per_step(counted, entry.stamp_s, step_s)
            if per_step is not None and counted / per_step < STEP_MAX:
                step = int(counted / per_step)
        if step is not None:
            if step <= self._step:
                return LogReading(writer=LineWriter.FIRST)  # a summary of earlier lines, or a start
            self._step = step
        return LogReading(
            step=step,
            step_s=step_s,
            loss=next((_number(values[name]) for name in _LOSSES if name in values), None),
            stamp_s=entry.stamp_s,
            writer=LineWriter.FIRST,
        )

    def _counted_per_step(self, counted: float, stamp_s: float | None, step_s: float | None) -> float | None:
        """Return by how much the program's count grows in a step: samples, or tokens; None until that is known."""
        if self._in_tokens is None and self._sequence_length > 1.0 and step_s and stamp_s is not None:
            before, self._before = self._before, (counted, stamp_s)
            if before is None or counted <= before[0]:
                return None
            fit = max(stamp_s - before[1], step_s) / step_s
            many = (counted - before[0]) / self._batch_size > TOKENS_RATIO * fit
            if many and before[0] == 0.0:
                return None  # tokens, or a run that was resumed
            self._in_tokens = many
        return self._batch_size * (self._sequence_length if self._in_tokens else 1.0)


def _number(value: object) -> float | None:
    """Return a JSON value as a number; None: it is not one. What JSON lacks is written as text."""
    if isinstance(value, str):
        return number(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _count(value: object) -> float | None:
    """Return a JSON value as a finite number that is not negative; None: it is not one."""
    found = _number(value)
    return found if found is not None and 0.0 <= found < math.inf else None


def _parser() -> Parse:
    return MlLogParser()


MLLOG = Framework("mllog", (b":::MLLOG ",), _parser)
