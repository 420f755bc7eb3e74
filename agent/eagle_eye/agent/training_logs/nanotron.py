"""nanotron: one line of ``key: value |`` per step, with K, M and B suffixes. Pure."""

from __future__ import annotations

import re

from eagle_eye.agent.training_logs.quantities import first_number, pairs
from eagle_eye.agent.training_logs.reading import Framework, LineWriter, LogReading

_ITERATION = re.compile(r"\biteration: ([0-9]{1,12}) / [0-9]{1,12} \|")
_STAGE = re.compile(r"\|PP=[1-9]")
_STEP_MS = ("time_per_iteration_ms", "elapsed_time_per_iteration_ms")


def parse(line: str) -> LogReading | None:
    """Parse the line; return None when it is not nanotron's.

    The first rank of the last pipeline stage writes it: rank 0, unless the line names a later stage.
    """
    found = _ITERATION.search(line)
    if found is None:
        return None
    fields = pairs(line[found.start() :])
    step_ms = first_number(fields, _STEP_MS)
    return LogReading(
        step=int(found[1]),
        step_s=None if step_ms is None else step_ms / 1e3,
        loss=first_number(fields, ("lm_loss", "loss")),
        grad_norm=first_number(fields, ("grad_norm",)),
        tokens_per_second=first_number(fields, ("tokens_per_sec_per_gpu",)),
        job_tokens_per_second=first_number(fields, ("tokens_per_sec",)),
        writer=LineWriter.ANY if _STAGE.search(line, 0, found.start()) else LineWriter.FIRST,
    )


NANOTRON = Framework("nanotron", (b" iteration: ",), lambda: parse)
