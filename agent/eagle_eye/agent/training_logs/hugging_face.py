"""Hugging Face's Trainer and tools built on it: a dictionary every few steps, and a progress bar in between. Pure.

The Trainer's dictionary lacks the step; the bar has it, and the dictionaries of tools built on it. Evaluation bars look
the same: the training's is the one shown when a dictionary with a learning rate is logged, and another one between its
states is an evaluation.
"""

from __future__ import annotations

import re

from eagle_eye.agent.training_logs.reading import (
    NUMBER,
    STEP_MAX,
    Framework,
    LineWriter,
    LogReading,
    Parse,
    Quiet,
    bar,
    number,
)

LINE_CHARS_MAX = 8_192  # of a dictionary: preference training prints some 30 values

_VALUE = re.compile(rf"'([A-Za-z_][\w/.() -]{{0,80}})': ('?)({NUMBER})(?:/{NUMBER})?\2(?=[,}}])")
_STEPS = ("global_step", "global_step/max_steps")
_LOGGED = re.compile(r"(?:\[[A-Z]{4,8}\|[^\]]{1,200}\][^{]{0,100} >> )?\{")
_TRAINING = (("loss", "learning_rate"), ("loss/policy_avg", "lr"))  # the second is TRL's PPO
_SAVING = re.compile(r"\bSaving model checkpoint to \S{0,1000}?(?:checkpoint-([0-9]{1,12}))?/?(?:\s|$)")


class HuggingFaceLogParser:
    """Parses the lines of one log, or of one process's two."""

    def __init__(self) -> None:
        self._total: int | None = None  # steps of the training bar; None: unknown
        self._shown: tuple[int, int] | None = None  # done, total of the newest bar without a label

    def __call__(self, line: str) -> LogReading | None:
        """Parse the line; return None when it is not the Trainer's."""
        if "it]" in line or "it/s" in line or "s/it" in line:
            return self._bar(line)
        if "'loss'" in line or "'eval_" in line or "'loss/policy_avg'" in line:
            return self._dictionary(line)
        if "***** Running Evaluation *****" in line:
            return LogReading(quiet=Quiet.EVAL_BEGIN, writer=LineWriter.FIRST)
        if found := _SAVING.search(line):
            step = int(found[1]) if found[1] else None
            return LogReading(quiet=Quiet.CHECKPOINT_BEGIN, quiet_step=step, writer=LineWriter.FIRST)
        return None

    def _bar(self, line: str) -> LogReading | None:
        seen = bar(line)
        if seen is None or seen.label or seen.total is None:
            return None
        self._shown = seen.done, seen.total
        if self._total is None or seen.done == 0:
            return None
        if seen.total != self._total:  # an evaluation's is shown once more, whole, after its dictionary
            return LogReading(quiet=Quiet.EVAL_BEGIN, writer=LineWriter.FIRST) if seen.done < seen.total else None
        return LogReading(step=seen.done, writer=LineWriter.FIRST)

    def _dictionary(self, line: str) -> LogReading | None:
        line = line.strip()
        begin = _LOGGED.match(line)  # LLaMA-Factory's callback logs the dictionary instead of printing it
        if begin is None or len(line) > LINE_CHARS_MAX:
            return None
        values = {name: number(value) for name, _, value in _VALUE.findall(line)}
        if "epoch" in values and ("eval_loss" in values or "eval_runtime" in values):
            return LogReading(quiet=Quiet.EVAL_END, writer=LineWriter.FIRST)
        loss = next((values[name] for name, rate in _TRAINING if name in values and rate in values), None)
        if loss is None:
            return None
        if self._shown is not None:
            self._total = self._shown[1]
        step = next((values[name] for name in _STEPS if name in values), None)
        return LogReading(
            step=int(step) if step is not None and 0 <= step < STEP_MAX else None,
            loss=loss,
            grad_norm=values.get("grad_norm"),
            writer=LineWriter.FIRST,
        )


def _parser() -> Parse:
    return HuggingFaceLogParser()


HUGGING_FACE = Framework(
    "hugging_face",
    (
        b"it/s",
        b"s/it",
        b"{'loss'",
        b"{'eval_",
        b"'loss/policy_avg'",
        b"***** Running Evaluation",
        b"Saving model checkpoint to ",
    ),
    _parser,
)
