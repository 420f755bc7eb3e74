"""Lines of any program: a step and values by name, in whatever of the usual ways a program writes them. Pure.

The names and the ways of counting are the tables below. Where a line counts as training loops do
(``Epoch [1][23/15435]``, ``Iter(train) [10/2046]``, a bar of steps), it is believed at once, and comes from rank 0, as
wherever such lines are known. Other lines, ``key: value``, ``key=value`` and JSON, are believed from the second one on
whose step is beyond the first one's, so that a table or a configuration that happens to contain both words is not read;
at once beside the time that an iteration takes. Tokens per second are not read: whether they are the rank's or the
job's is unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from eagle_eye.agent.training_logs.lines import (
    NUMBER,
    STEP_MAX,
    Framework,
    LineWriter,
    LogReading,
    Parse,
    Quiet,
    bar,
    decoded,
    number,
    stamp_s,
)

LINE_CHARS_MAX = 2_048
JSON_CHARS_MAX = 8_192

_STEPS = (
    "step", "global_step", "global_steps", "current_steps", "iteration", "iter", "it", "update", "num_updates",
    "global_step/max_steps",
)  # fmt: skip
_LOSSES = (
    "loss", "train_loss", "training_loss", "train/loss", "lm_loss", "total_loss", "loss/train", "step_loss",
    "avr_loss",
)  # fmt: skip
_NORMS = ("grad_norm", "gradient_norm", "gnorm", "train/grad_norm", "grad norm", "gradient norm")
# A step's duration: by a name that says its unit; with the unit behind the number; or beside signs of such lines.
_SECONDS = ("step_time_s", "step_s", "step_seconds", "train_step_seconds")
_MILLISECONDS = ("step_time_ms", "step_ms", "time_per_step_ms")
_DURATIONS = ("batch_cost", "avg_batch_cost", "batch_time", "iter_time", "step_time", "time")
_TIMED_BESIDE = ("eta", "data_time", "data_cost")  # beside these "time" is an iteration's, not the time of day

_EVALUATION = re.compile(r"(?:^|[^a-z])(?:eval|valid|validation|val|test)(?:uation|uating)?(?![a-z])", re.IGNORECASE)
_BESIDE = re.compile(rf"(?<![\w/.-])[\"']?(?:{'|'.join(_TIMED_BESIDE)})[\"']?:? ")
_LOSS_LIKE = re.compile(
    rf"(?<![\w/.-])(loss_(?!scale)\w{{1,40}}|\w{{1,40}}_loss)(?: ?[:=] ?|[ \t]{{1,4}})({NUMBER})(?![\w%])"
)

# Ways of counting. The groups: ``step`` of ``of`` in the ``epoch``. Epochs count from 0 after a colon
# (``Train: [30/300][210/2859]``), from 1 without.
_OF = r"(?P<step>[0-9]{1,12}) ?/ {0,12}(?P<of>[0-9]{1,12})(?![0-9])"
_IN_EPOCH = re.compile(
    r"(?<!Train )\b(?:Epoch|epoch|Train)(?:\(train\))?(?P<from_0>:?) {0,4}"
    r"\[? ?(?P<epoch>[0-9]{1,9})(?![0-9])(?:/[0-9]{1,9}(?![0-9]))?\]?,? {0,4}"
    rf"(?:\[?(?:Iter|iter|Step|step)(?:ation)?:? {{0,2}}\[?|\[) {{0,12}}{_OF}"
)
_OF_ALL = re.compile(rf"\b(?:Iter|Step)(?:\(train\))?:? {{0,4}}\[ {{0,12}}{_OF}\]")
_KERAS_EPOCH = re.compile(r"^Epoch (?P<epoch>[0-9]{1,9})/[0-9]{1,9}\s{0,8}$")
_KERAS = re.compile(rf"^[\x08 ]{{0,400}}{_OF} (?:(?:\[[=>.]{{1,80}}\]|[\u2500-\u257f ]{{5,80}}) )?.{{0,200}}?- loss: ")
_BAR_OF_STEPS = re.compile(r"(?:train(?:ing)? )?steps?", re.IGNORECASE)  # other bars count batches
_LEVANTER = re.compile(r"\bProgress on:train (?P<step>[0-9.]{1,12}[kM]?)it/")
_EVALUATES = re.compile(
    r"\b(?:(?:Iter|Epoch)\((?:val|test)\)|(?:Test|Val|Eval|Validation):) {1,4}(?:\[[0-9]{1,9}\])?\[ {0,12}[0-9]{1,9}/"
)


def _named(names: tuple[str, ...]) -> str:
    words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return rf"(?<![\w/.-])[\"']?(?:{words})[\"']?(?: {{0,8}}[:=] {{0,8}}|\[ {{0,12}}|[ \t]{{1,4}})"


def _value_of(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"{_named(names)}[\"']?({NUMBER})(?![\w%/.-]*[A-Za-z(])", re.IGNORECASE)


_STEP, _LOSS, _NORM = _value_of(_STEPS), _value_of(_LOSSES), _value_of(_NORMS)
_EPOCH = _value_of(("epoch",))
# After a letter and one blank it is part of a longer name: "data time".
_DURATION = re.compile(rf"(?<![A-Za-z] ){_named(_DURATIONS)}({NUMBER}) ?(ms|s)?(?![\w:])", re.IGNORECASE)
_decoder = msgspec.json.Decoder(dict[str, object])


class GeneralLogParser:
    """Parses the lines of one log."""

    def __init__(self) -> None:
        self._first_step: int | None = None
        self._sure = False
        self._epoch = 1  # of Keras, which names it in a line of its own
        self._at = (math.inf, 0)  # epoch and step of the last line that names both...
        self._earlier = 0  # ...and the steps of earlier epochs, where each is counted by itself

    def __call__(self, line: str) -> LogReading | None:
        """Parse the line; return None until two lines agree that these are training steps, or one counts them."""
        at = line.find('{"', 0, LINE_CHARS_MAX)
        if at >= 0:
            said, epoch = _json(line[at:].rstrip())
        elif len(line) > LINE_CHARS_MAX:
            return None
        else:
            counted = self._counted(line)
            if counted is not None:
                return counted
            said = _plain(line)
            found = _EPOCH.search(line) if said is not None else None
            epoch = number(found[1]) if found is not None else None
        if said is None or said.step is None or said.step >= STEP_MAX:
            return None
        said = self._of_all_epochs(said, said.step, epoch)
        if said.step is None:
            return None
        if not self._sure:
            further = self._first_step is not None and said.step > self._first_step
            self._sure = further or _BESIDE.search(line) is not None
            self._first_step = said.step
        return said if self._sure else None

    def _of_all_epochs(self, said: LogReading, step: int, epoch: float | None) -> LogReading:
        """Return the reading with a step that goes on where the program counts from the beginning in a new epoch."""
        if epoch is not None:
            before_epoch, before = self._at
            if epoch < before_epoch:  # the first such line, or the program resumed from an earlier one
                self._earlier = 0
            elif epoch > before_epoch and step < before:
                self._earlier += before
            self._at = epoch, step
        return replace(said, step=self._earlier + step)

    def _counted(self, line: str) -> LogReading | None:
        """Parse a line that counts as training loops do; None: it does not."""
        if found := _IN_EPOCH.search(line):
            epochs = int(found["epoch"]) - (0 if found["from_0"] else 1)
            return _loop(line, max(epochs, 0) * int(found["of"]) + int(found["step"]))
        if found := _OF_ALL.search(line):
            return _loop(line, int(found["step"]))
        if found := _KERAS_EPOCH.match(line):
            self._epoch = int(found["epoch"])
            return None
        if found := _KERAS.match(line):
            return _loop(line, (self._epoch - 1) * int(found["of"]) + int(found["step"]), timed=False)
        if found := _LEVANTER.search(line):
            step = number(found["step"])
            return _loop(line, int(step), timed=False) if step is not None else None
        if _EVALUATES.search(line):
            return LogReading(quiet=Quiet.EVAL_BEGIN, writer=LineWriter.FIRST)
        seen = bar(line)
        if seen is None or seen.done == 0 or _BAR_OF_STEPS.fullmatch(seen.label) is None:
            return None
        return _loop(", ".join(f"{name}={value}" for name, value in seen.postfix.items()), seen.done, timed=False)


def _loop(line: str, step: int, *, timed: bool = True) -> LogReading | None:
    """Return the values of a training loop's line; None where it has no loss."""
    loss = _loss(line)
    if loss is None or not 0 <= step < STEP_MAX:
        return None
    return LogReading(
        step=step,
        step_s=_duration_s(line, of_a_loop=True) if timed else None,
        loss=loss,
        grad_norm=_norm(line),
        stamp_s=stamp_s(line),
        writer=LineWriter.FIRST,
    )


def _plain(line: str) -> LogReading | None:
    loss, step = _LOSS.search(line), _STEP.search(line)
    if loss is None or step is None or _EVALUATION.search(line):
        return None
    value, count = number(loss[1]), number(step[1])
    if value is None or count is None or not count.is_integer() or count < 0:
        return None
    step_s = _duration_s(line, of_a_loop=_BESIDE.search(line) is not None)
    return LogReading(step=int(count), step_s=step_s, loss=value, grad_norm=_norm(line), stamp_s=stamp_s(line))


def _loss(line: str) -> float | None:
    """Return the loss: by its usual names, or the only value that is called a loss."""
    found = _LOSS.search(line)
    if found is not None:
        return number(found[1])
    others = {match[1]: match[2] for match in _LOSS_LIKE.finditer(line)}
    return number(next(iter(others.values()))) if len(others) == 1 else None


def _norm(line: str) -> float | None:
    found = _NORM.search(line)
    return number(found[1]) if found is not None else None


def _duration_s(line: str, *, of_a_loop: bool) -> float | None:
    """Return the seconds per step; ``of_a_loop``: the line is known to time its iterations, in seconds."""
    for found in _DURATION.finditer(line):
        if of_a_loop or (found[2] is not None and not found[0].lower().startswith("time")):
            value = number(found[1])
            return value / 1e3 if value is not None and found[2] in ("ms", "MS") else value
    return None


def _json(text: str) -> tuple[LogReading | None, float | None]:
    """Return the object's values and its epoch; None for what it lacks."""
    fields = decoded(text, _decoder) if len(text) <= JSON_CHARS_MAX else None
    if fields is None:
        return None, None
    step, loss = _first(fields, _STEPS), _first(fields, _LOSSES)
    if step is None or loss is None or not step.is_integer() or step < 0:
        return None, None
    step_s, step_ms = _first(fields, _SECONDS), _first(fields, _MILLISECONDS)
    if step_ms is not None:
        step_s = step_ms / 1e3
    elif step_s is None and any(name in fields for name in _TIMED_BESIDE):
        step_s = _first(fields, _DURATIONS)
    said = LogReading(step=int(step), step_s=step_s, loss=loss, grad_norm=_first(fields, _NORMS))
    return said, _first(fields, ("epoch",))


def _first(fields: Mapping[str, object], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = fields.get(name)
        if isinstance(value, str):
            value = number(value.partition("/")[0] if name == "global_step/max_steps" else value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30:
            return float(value)
        if isinstance(value, float):
            return value  # NaN or infinite: reported as logged
    return None


def _parser() -> Parse:
    return GeneralLogParser()


GENERAL = Framework("general", (b"loss", b"Loss", b"(val)", b"Test: ", b"Val: "), _parser, general=True)
