"""NeMo and Lightning: NeMo's line of ``key: value |``, and Lightning's progress bar with the module's values. Pure.

Lightning's bar counts batches, several of which may make a step, from 0 in each epoch: a step is read only where the
bar names the global one.
"""

from __future__ import annotations

import re

from eagle_eye.agent.training_logs.progress_bars import bar
from eagle_eye.agent.training_logs.quantities import first_number, pairs
from eagle_eye.agent.training_logs.reading import STEP_MAX, Framework, LineWriter, LogReading

_LINE = re.compile(r"\bTraining epoch [0-9]{1,9}, iteration ([0-9]{1,12})/[0-9]{1,12} \|")
_EPOCH = re.compile(r"Epoch [0-9]{1,9}\s{0,2}:?")
_LOSS = ("reduced_train_loss", "train_loss", "train_loss_step", "train/loss", "loss")
_GRAD_NORM = ("grad_norm", "train/grad_norm", "gradient_norm")
_STEP_S = ("train_step_timing in s",)


def parse(line: str) -> LogReading | None:
    """Parse the line; return None when it is not NeMo's or Lightning's."""
    if found := _LINE.search(line):
        return _reading(pairs(line), int(found[1]))
    if not line.startswith("Epoch "):
        return None
    seen = bar(line)
    if seen is None or _EPOCH.fullmatch(seen.label) is None or seen.done == 0:
        return None
    return _reading(seen.postfix, None)


def _reading(fields: dict[str, str], step: int | None) -> LogReading:
    """Return the fields as a reading; ``step`` is for lines that do not name the global one."""
    named = first_number(fields, ("global_step", "trainer/global_step"))
    if named is not None and 0 <= named < STEP_MAX:
        step = int(named)
    return LogReading(
        step=step,
        step_s=first_number(fields, _STEP_S),
        loss=first_number(fields, _LOSS),
        grad_norm=first_number(fields, _GRAD_NORM),
        writer=LineWriter.FIRST,
    )


NEMO = Framework("nemo", (b"Training epoch ", b"Epoch "), lambda: parse)
