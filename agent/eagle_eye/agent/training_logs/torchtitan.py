"""torchtitan: its text line, and its structured JSON lines, one file per rank. Pure."""

from __future__ import annotations

import re

import msgspec

from eagle_eye.agent.training_logs.quantities import NUMBER, decoded, number, stamp_s
from eagle_eye.agent.training_logs.reading import STEP_MAX, Framework, LineWriter, LogReading, Parse, Quiet

NO_LOSS = -1.0  # printed by pipeline stages without a loss

_STEP = re.compile(r"(?:^|[^\w ] |INFO - )(?:epoch: {0,8}[0-9]{1,9} )?step: {0,12}([0-9]{1,12}) ")
_FIELD = re.compile(rf"\b(loss|grad_norm|step_time|tps): {{0,12}}({NUMBER})s?(?=\s|$)")


class _Record(msgspec.Struct):
    """The fields of a structured line that are used."""

    log_type_name: str
    rank: int
    time_us: int
    source: str = ""
    step: int | None = None


_decoder = msgspec.json.Decoder(_Record)


class TorchtitanLogParser:
    """Parses the lines of one log.

    The structured lines carry the rank's current step: it has finished one when the next appears.
    """

    def __init__(self) -> None:
        self._at: dict[int, int] = {}

    def __call__(self, line: str) -> LogReading | None:
        """Parse the line; return None when it is not torchtitan's."""
        if line.startswith("{"):
            return self._structured(line)
        if " tps: " in line:
            return _text(line)
        if "Saving the checkpoint" in line or "Saving a full checkpoint" in line:
            return LogReading(quiet=Quiet.CHECKPOINT_BEGIN, writer=LineWriter.FIRST)
        if "Finished saving the checkpoint" in line:
            return LogReading(quiet=Quiet.CHECKPOINT_END, writer=LineWriter.FIRST)
        return None

    def _structured(self, line: str) -> LogReading | None:
        record = decoded(line, _decoder)
        if record is None:
            return None
        step, rank = record.step, record.rank
        # Reinforcement learning actors have their own rank numbers.
        if step is None or not 0 <= step < STEP_MAX or rank < 0 or not record.source.startswith("train"):
            return None
        before = self._at.get(rank)
        if before is None and len(self._at) >= RANKS_IN_A_FILE_MAX:
            return None
        self._at[rank] = step
        if before is None or step <= before:
            return None
        return LogReading(step=step - 1, stamp_s=record.time_us / 1e6, rank=rank)


RANKS_IN_A_FILE_MAX = 64  # torchtitan writes one file per rank; merged ones hold a node's


def _text(line: str) -> LogReading | None:
    found = _STEP.search(line)
    if found is None or "validate" in line:
        return None
    fields = {name: number(value) for name, value in _FIELD.findall(line, found.end())}
    if "loss" not in fields:
        return None
    return LogReading(
        step=int(found[1]),
        step_s=fields.get("step_time"),
        loss=None if fields["loss"] == NO_LOSS else fields["loss"],
        grad_norm=fields.get("grad_norm"),
        tokens_per_second=fields.get("tps"),
        stamp_s=stamp_s(line),
        writer=LineWriter.FIRST,
    )


def _parser() -> Parse:
    return TorchtitanLogParser()


TORCHTITAN = Framework(
    "torchtitan", (b"tps: ", b"aving the checkpoint", b"Saving a full ", b'"log_type_name"'), _parser
)
