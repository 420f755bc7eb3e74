"""Lines of unknown programs: ``key: value``, ``key=value`` and JSON lines with a step and a loss. Pure.

It starts only with a second line whose step is beyond the first one's, so that a table or configuration that happens to
contain both words is not parsed. Step durations are read only with a unit, and tokens per second not at all: whether
they are the rank's or the job's is unknown.
"""

from __future__ import annotations

import re

import msgspec

from eagle_eye.agent.training_logs.quantities import number, stamp_s
from eagle_eye.agent.training_logs.reading import STEP_MAX, Framework, LogReading, Parse

LINE_CHARS_MAX = 2_048
JSON_CHARS_MAX = 8_192

_STEPS = ("step", "global_step", "global_steps", "current_steps", "iteration", "iter", "it", "update", "num_updates")
_LOSSES = ("loss", "train_loss", "training_loss", "train/loss", "lm_loss", "total_loss", "loss/train")
_NORMS = ("grad_norm", "gradient_norm", "gnorm", "train/grad_norm", "grad norm")
_SECONDS = ("step_time_s", "step_s", "step_seconds", "train_step_seconds")
_MILLISECONDS = ("step_time_ms", "step_ms", "time_per_step_ms")
_EVALUATION = re.compile(r"(?:^|[^a-z])(?:eval|valid|validation|val|test)(?:uation|uating)?(?![a-z])", re.IGNORECASE)

_NUMBER = r"[\"']?([+-]?(?:[0-9][0-9.,]{0,24}(?:[eE][+-]?[0-9]{1,3})?|nan|inf(?:inity)?))(?![\w%/.-]*[A-Za-z(])"


def _named(names: tuple[str, ...]) -> re.Pattern[str]:
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(
        rf"(?<![\w/.-])[\"']?(?:{words})[\"']?(?: {{0,8}}[:=] {{0,8}}|\[| {{1,4}}(?=[0-9])){_NUMBER}", re.IGNORECASE
    )


_STEP, _LOSS, _NORM = _named(_STEPS), _named(_LOSSES), _named(_NORMS)
_decoder = msgspec.json.Decoder(dict[str, object])


class GeneralLogParser:
    """Parses the lines of one log."""

    def __init__(self) -> None:
        self._first_step: int | None = None
        self._sure = False

    def __call__(self, line: str) -> LogReading | None:
        """Parse the line; return None until two lines agree that these are training steps."""
        said = _json(line) if line.startswith("{") else _plain(line)
        if said is None or said.step is None or said.step >= STEP_MAX:
            return None
        if not self._sure:
            self._sure = self._first_step is not None and said.step > self._first_step
            self._first_step = said.step
        return said if self._sure else None


def _plain(line: str) -> LogReading | None:
    if len(line) > LINE_CHARS_MAX:
        return None
    loss, step = _LOSS.search(line), _STEP.search(line)
    if loss is None or step is None or _EVALUATION.search(line):
        return None
    value, count = number(loss[1].rstrip(",.")), number(step[1].rstrip(",."))
    if value is None or count is None or not count.is_integer() or count < 0:
        return None
    norm = _NORM.search(line)
    return LogReading(
        step=int(count),
        loss=value,
        grad_norm=number(norm[1].rstrip(",.")) if norm is not None else None,
        stamp_s=stamp_s(line),
    )


def _json(line: str) -> LogReading | None:
    if len(line) > JSON_CHARS_MAX:
        return None
    try:
        fields = _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    step, loss = _first(fields, _STEPS), _first(fields, _LOSSES)
    if step is None or loss is None or not step.is_integer() or step < 0:
        return None
    step_ms = _first(fields, _MILLISECONDS)
    return LogReading(
        step=int(step),
        step_s=step_ms / 1e3 if step_ms is not None else _first(fields, _SECONDS),
        loss=loss,
        grad_norm=_first(fields, _NORMS),
    )


def _first(fields: dict[str, object], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = fields.get(name)
        if isinstance(value, str):
            value = number(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30:
            return float(value)
        if isinstance(value, float):
            return value  # NaN or infinite: reported as logged
    return None


def _parser() -> Parse:
    return GeneralLogParser()


GENERAL = Framework("general", (b"loss", b"Loss"), _parser, general=True)
