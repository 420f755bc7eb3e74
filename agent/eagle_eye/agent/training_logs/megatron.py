"""Megatron-LM and its forks (Megatron-DeepSpeed and others): one line of ``key: value |`` per interval. Pure.

Since 2021 the highest rank writes this line, and rank 0 the lines about checkpoints. Values are means over the
interval.
"""

from __future__ import annotations

import math
import re

from eagle_eye.agent.training_logs.quantities import first_number, pairs
from eagle_eye.agent.training_logs.reading import Framework, LineWriter, LogReading, Quiet

_ELAPSED = "elapsed time per iteration ("
_ITERATION = re.compile(r"\biteration:? {0,12}([0-9]{1,12}) {0,4}/ {0,12}[0-9]{1,12} {0,4}\|")
_SAVING = re.compile(r"^\s{0,8}saving checkpoint at iteration {1,12}([0-9]{1,12}) to ")
_SAVED = re.compile(r"\bsuccessfully saved checkpoint from iteration {1,12}([0-9]{1,12}) to ")
_LOSS = ("lm loss", "loss", "total loss")
_TOKENS = ("tokens per gpu per second (tgs)", "throughput (token/sec/gpu)", "tokens/sec/gpu")


def parse(line: str) -> LogReading | None:
    """Parse the line; return None when it is not Megatron's."""
    if _ELAPSED in line:
        return _iteration(line)
    if found := _SAVED.search(line):
        return LogReading(quiet=Quiet.CHECKPOINT_END, quiet_step=int(found[1]), writer=LineWriter.FIRST)
    if found := _SAVING.match(line):
        return LogReading(quiet=Quiet.CHECKPOINT_BEGIN, quiet_step=int(found[1]), writer=LineWriter.FIRST)
    return None


def _iteration(line: str) -> LogReading | None:
    found = _ITERATION.search(line)
    if found is None:
        return None
    fields = pairs(line)
    step_ms = first_number(fields, ("elapsed time per iteration (ms)",))
    step_s = first_number(fields, ("elapsed time per iteration (s)",)) if step_ms is None else step_ms / 1e3
    loss = first_number(fields, _LOSS)
    if first_number(fields, ("number of nan iterations",)):
        loss = math.nan  # the printed mean excludes these
    return LogReading(
        step=int(found[1]),
        step_s=step_s,
        loss=loss,
        grad_norm=first_number(fields, ("grad norm",)),
        tokens_per_second=first_number(fields, _TOKENS),
        writer=LineWriter.LAST,
    )


MEGATRON = Framework(
    "megatron",
    (_ELAPSED.encode(), b"saving checkpoint at iteration", b"saved checkpoint from iteration"),
    lambda: parse,
)
