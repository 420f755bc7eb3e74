"""MLPerf log lines, ``:::MLLOG {json}``, of any program. Pure.

Progress is counted in samples and converted to steps by the global batch size, which is logged at the start. The steps
of a log found later are unknown.
"""

from __future__ import annotations

import math

import msgspec

from eagle_eye.agent.training_logs.reading import STEP_MAX, Framework, LineWriter, LogReading, Parse, Quiet

MARK = ":::MLLOG "
LINE_CHARS_MAX = 8_192

_LOSSES = ("reduced_train_loss", "train_loss", "loss")
_SAMPLES = ("samples_count", "step", "epoch_num")  # names that programs use for the number of samples trained on
_EVALUATED = ("validation", "eval")
_QUIET = {"eval_start": Quiet.EVAL_BEGIN, "eval_stop": Quiet.EVAL_END}


class _Entry(msgspec.Struct):
    """One line; unlisted keys are ignored."""

    key: str
    time_ms: float = math.nan
    value: object = None
    metadata: dict[str, object] = {}


_decoder = msgspec.json.Decoder(_Entry)


class MlLogParser:
    """Parses the lines of one log."""

    def __init__(self) -> None:
        self._batch_size = 0.0  # samples per step; 0: unknown
        self._step = 0  # the last one of this run

    def __call__(self, line: str) -> LogReading | None:
        """Parse the line; return None when it is not MLPerf's or contains no progress."""
        at = line.find(MARK, 0, 200)
        if at < 0 or len(line) > LINE_CHARS_MAX:
            return None
        try:
            entry = _decoder.decode(line[at + len(MARK) :])
        except (msgspec.MsgspecError, UnicodeError):
            return None
        if entry.key == "global_batch_size":
            self._batch_size = _number(entry.value) or 0.0
            self._step = 0
            return LogReading(writer=LineWriter.FIRST)
        if entry.key in _QUIET:
            return LogReading(quiet=_QUIET[entry.key], writer=LineWriter.FIRST)
        if entry.key == "tracked_stats" and isinstance(entry.value, dict):
            return self._progress(entry.value, entry)
        if entry.key == "train_loss":
            return self._progress({"train_loss": entry.value}, entry)
        return None

    def _progress(self, values: dict[str, object], entry: _Entry) -> LogReading:
        if any(name.startswith(_EVALUATED) for name in values):
            return LogReading(writer=LineWriter.FIRST)  # counts evaluation samples
        samples = next((found for name in _SAMPLES if (found := _number(entry.metadata.get(name))) is not None), None)
        step = None
        if samples is not None and self._batch_size >= 1.0 and samples / self._batch_size < STEP_MAX:
            step = int(samples / self._batch_size)
            if step <= self._step:
                return LogReading(writer=LineWriter.FIRST)  # a summary of earlier lines, or a start
            self._step = step
        return LogReading(
            step=step,
            step_s=_number(values.get("train_step_time")),
            loss=next((_number(values[name]) for name in _LOSSES if name in values), None),
            stamp_s=entry.time_ms / 1e3 if math.isfinite(entry.time_ms) else None,
            writer=LineWriter.FIRST,
        )


def _number(value: object) -> float | None:
    """Return a JSON value as a non-negative number; None: it is not one. A NaN loss is written as text."""
    if isinstance(value, str) and value.lower() in ("nan", "inf", "infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        return None
    return float(value)


def _parser() -> Parse:
    return MlLogParser()


MLLOG = Framework("mllog", (b":::MLLOG ",), _parser)
