"""Composer and LLM Foundry: a line with the batch, then one indented line per value. Pure."""

from __future__ import annotations

import re

from eagle_eye.agent.training_logs.quantities import NUMBER, number
from eagle_eye.agent.training_logs.reading import Framework, LineWriter, LogReading

_BATCH = re.compile(r"^(?:\[epoch=([0-9]{1,9})(?:/[0-9]{1,9})?\])?\[batch=([0-9]{1,12})(?:/([0-9]{1,12}))?\]:?\s{0,8}$")
_VALUE = re.compile(rf"^\s{{1,8}}Train ([a-z0-9_/]{{1,80}}): {{1,4}}({NUMBER})\s{{0,8}}$")


def parse(line: str) -> LogReading | None:
    """Parse the line; return None when it is not Composer's."""
    if found := _BATCH.match(line):
        return LogReading(step=_step(found[1], int(found[2]), found[3]), writer=LineWriter.FIRST)
    found = _VALUE.match(line)
    value = number(found[2]) if found is not None else None
    if found is None or value is None:
        return None
    name = found[1]
    if name == "loss/train/total":
        return LogReading(loss=value, writer=LineWriter.FIRST)
    if name == "l2_norm/grad/global":
        return LogReading(grad_norm=value, writer=LineWriter.FIRST)
    if name == "throughput/device/tokens_per_sec":
        return LogReading(tokens_per_second=value, writer=LineWriter.FIRST)
    if name == "throughput/batches_per_sec" and value > 0.0:
        return LogReading(step_s=1.0 / value, writer=LineWriter.FIRST)
    return None


def _step(epoch: str | None, batch: int, batches: str | None) -> int | None:
    """Return the step; None where the number of batches in earlier epochs is unknown."""
    if epoch is None or int(epoch) <= 1:
        return batch
    return (int(epoch) - 1) * int(batches) + batch if batches else None


COMPOSER = Framework(
    "composer",
    (b"[batch=", b"Train loss/train/total", b"Train throughput/", b"Train l2_norm/grad/global"),
    lambda: parse,
)
