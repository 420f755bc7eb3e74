"""Lightning's CSVLogger: ``metrics.csv``, whose first line names the columns. Pure.

A pre-existing file is read from its end, and its columns are unknown until Lightning rewrites it, as it does when a
metric is added.
"""

from __future__ import annotations

from eagle_eye.agent.training_logs.reading import STEP_MAX, Framework, LineWriter, LogReading, Parse, number

LINE_CHARS_MAX = 8_192
COLUMNS_MAX = 256

_LOSSES = ("train_loss_step", "train_loss", "train/loss", "reduced_train_loss", "loss_step", "loss")
_NORMS = ("grad_norm", "train/grad_norm", "grad_2.0_norm_total")


class LightningCsvParser:
    """Parses the lines of one file."""

    def __init__(self) -> None:
        self._columns: list[str] = []

    def __call__(self, line: str) -> LogReading | None:
        """Parse the line; return None when it is not from such a file."""
        if len(line) > LINE_CHARS_MAX or "," not in line:
            return None
        cells = [cell.strip() for cell in line.split(",", COLUMNS_MAX)]
        if "step" in cells and "epoch" in cells:
            self._columns = cells if any(name in cells for name in _LOSSES) else []
            return LogReading(writer=LineWriter.FIRST) if self._columns else None
        if not self._columns or len(cells) != len(self._columns):
            return None
        row = dict(zip(self._columns, cells, strict=True))
        loss = next((found for name in _LOSSES if (found := number(row.get(name, ""))) is not None), None)
        if loss is None or not row["step"].isdecimal() or len(row["step"]) > len(str(STEP_MAX)):
            return None  # an evaluation line has no training loss
        norm = next((found for name in _NORMS if (found := number(row.get(name, ""))) is not None), None)
        return LogReading(step=int(row["step"]), loss=loss, grad_norm=norm, writer=LineWriter.FIRST)


def _parser() -> Parse:
    return LightningCsvParser()


LIGHTNING_CSV = Framework("lightning_csv", (b"step,", b",step"), _parser, needles_once_known=(b",",))
