"""OLMo and OLMo-core: a line with the step, then one indented ``name=value`` per line. Pure."""

from __future__ import annotations

import re

from eagle_eye.agent.training_logs.quantities import NUMBER, number, stamp_s
from eagle_eye.agent.training_logs.reading import Framework, LineWriter, LogReading

_STEP = re.compile(r"(?:^|[\s\]])\[step=([0-9]{1,12})/[0-9?]{1,12}, ?epoch=")
_VALUE = re.compile(rf"^\s{{1,8}}([A-Za-z][\w/ .-]{{1,80}})=({NUMBER})\s{{0,8}}$")


def parse(line: str) -> LogReading | None:
    """Parse the line; return None when it is not OLMo's."""
    if found := _STEP.search(line, 0, 400):
        return LogReading(step=int(found[1]), stamp_s=stamp_s(line), writer=LineWriter.FIRST)
    found = _VALUE.match(line)
    value = number(found[2]) if found is not None else None
    if found is None or value is None:
        return None
    name = found[1]
    if name in ("train/CrossEntropyLoss", "train/CE loss"):
        return LogReading(loss=value, writer=LineWriter.FIRST)
    if name in ("optim/total_grad_norm", "optim/total grad norm"):
        return LogReading(grad_norm=value, writer=LineWriter.FIRST)
    if name in ("throughput/device/tokens_per_second", "throughput/device/TPS"):
        return LogReading(tokens_per_second=value, writer=LineWriter.FIRST)
    if name in ("throughput/device/batches_per_second", "throughput/device/BPS") and value > 0.0:
        return LogReading(step_s=1.0 / value, writer=LineWriter.FIRST)
    return None


OLMO = Framework(
    "olmo",
    (
        b"[step=",
        b"train/CrossEntropyLoss=",
        b"train/CE loss=",
        b"optim/total",
        b"throughput/device/",
    ),
    lambda: parse,
)
