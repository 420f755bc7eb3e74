"""DeepSpeed's own lines, under any trainer: steps, and with its pipeline engine the loss. Pure."""

from __future__ import annotations

import re

from eagle_eye.agent.training_logs.quantities import NUMBER, number, stamp_s
from eagle_eye.agent.training_logs.reading import Framework, LineWriter, LogReading, Quiet

_HINTS = ("] step=", "/global_step=", "iter time (s): ", " is about to be saved!", " is ready now!")
_STEP = re.compile(r"\[Rank ([0-9]{1,7})\] step=([0-9]{1,12}), skipped=")
_TIMER = re.compile(r"/global_step=([0-9]{1,12}), RunningAvgSamplesPerSec=")
_PIPELINE = re.compile(rf"\bsteps: ([0-9]{{1,12}}) loss: ({NUMBER}) .{{0,400}}?iter time \(s\): ({NUMBER}) ")
_TAG = re.compile(r"Checkpoint (?:global_step)?([0-9]{1,12}) is (about to be saved|ready now)!")


def parse(line: str) -> LogReading | None:
    """Parse the line; return None when it is not DeepSpeed's."""
    if not any(hint in line for hint in _HINTS):
        return None
    if found := _STEP.search(line):
        return LogReading(step=int(found[2]), stamp_s=stamp_s(line), rank=int(found[1]))
    if found := _TIMER.search(line):
        return LogReading(step=int(found[1]), stamp_s=stamp_s(line), writer=LineWriter.FIRST)
    if found := _PIPELINE.search(line):
        return LogReading(step=int(found[1]), loss=number(found[2]), step_s=number(found[3]), writer=LineWriter.FIRST)
    if found := _TAG.search(line):
        quiet = Quiet.CHECKPOINT_END if found[2].startswith("ready") else Quiet.CHECKPOINT_BEGIN
        return LogReading(quiet=quiet, quiet_step=int(found[1]), writer=LineWriter.FIRST)
    return None


DEEPSPEED = Framework(
    "deepspeed",
    tuple(hint.encode() for hint in _HINTS),
    lambda: parse,
    engine=True,
)
