"""The compact encoding of a synthetic fleet: templates once per connection, rows encoded for many nodes at a time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Frame
from eagle_eye.schema.rows import (
    CONTENT_TYPE,
    ID_BYTES,
    ROW_HEAD,
    VERSION,
    encode_row,
    encode_rows_request,
    encode_template,
    template_id,
    template_of,
)
from eagle_eye.simulator.load.values import EXACT, PLAIN, Integers, Readings

_ID_AT = 8  # in a row, after version, padding and the tail's size


class RowsWire:
    """One stream's rows, with each template before the first row that needs it."""

    content_type = CONTENT_TYPE

    def __init__(self) -> None:
        self._templates: dict[bytes, bytes] = {}
        self._reported: set[bytes] = set()

    def learn(self, id_: bytes, template: bytes) -> None:
        """Take a template of which rows will come."""
        self._templates[id_] = template

    def body(self, frames: Sequence[bytes], sent_s: float) -> bytes:
        """See wire.Wire."""
        if len(frames) == 1 and frames[0][_ID_AT : _ID_AT + ID_BYTES] in self._reported:
            return encode_rows_request((), frames, sent_s)
        ids = dict.fromkeys(frame[_ID_AT : _ID_AT + ID_BYTES] for frame in frames)
        news = [id_ for id_ in ids if id_ not in self._reported]
        self._reported.update(news)
        return encode_rows_request([self._templates[id_] for id_ in news], frames, sent_s)

    def forget(self) -> None:
        """See wire.Wire."""
        self._reported.clear()

    def telling(self, frame: Frame, sequence: int, time_s: float, events: Sequence[Event]) -> bytes:
        """Return a frame that is sent for events alone, without numbers; ``frame`` says the rest."""
        reported = msgspec.structs.replace(frame, sequence=sequence, time_s=time_s, blocks=[], events=list(events))
        template = template_of(reported)
        raw = encode_template(template)
        id_ = template_id(raw)
        self.learn(id_, raw)
        return encode_row(reported, template, id_)


class FleetRows:
    """Rows of many nodes at once; ``wires`` of the nodes learn their templates."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        """``frames`` are the nodes'; their sequences, times and numbers do not matter."""
        gpus = len(frames[0].blocks[0].keys)
        self.wires = [RowsWire() for _ in frames]
        self._ids = np.zeros(len(frames), dtype=f"V{ID_BYTES}")
        for at, frame in enumerate(frames):
            self.change(at, frame)
        self._row = np.dtype(
            [
                ("version", "u1"),
                ("padding", "V3"),
                ("tail", "<u4"),
                ("id", f"V{ID_BYTES}"),
                ("sequence", "<u8"),
                ("time_s", "<f8"),
                ("exact", "<f8", (len(EXACT), gpus)),
                ("plain", "<f4", (len(PLAIN), gpus)),
            ]
        )
        if self._row.fields is None or self._row.fields["exact"][1] != ROW_HEAD.size:
            raise RuntimeError("the layout of rows is not what the schema says")

    def change(self, at: int, frame: Frame) -> None:
        """Make the rows of a node from now on those of another frame, of the same blocks."""
        raw = encode_template(template_of(frame))
        id_ = template_id(raw)
        self.wires[at].learn(id_, raw)
        self._ids[at] = np.void(id_)

    def renew(self, at: int, frame: Frame) -> None:
        """Begin another stream in a node's place: the server knows none of its templates."""
        self.wires[at] = RowsWire()
        self.change(at, frame)

    def encode(self, first: int, sequence: int | Integers, time_s: float, readings: Readings) -> list[bytes]:
        """Return the rows of the nodes from ``first`` on whose readings these are; ``sequence``: one, or (nodes,)."""
        count = len(readings.exact)
        rows = np.zeros(count, dtype=self._row)
        rows["version"] = VERSION
        rows["id"] = self._ids[first : first + count]
        rows["sequence"] = sequence
        rows["time_s"] = time_s
        rows["exact"] = readings.exact
        rows["plain"] = readings.plain
        data, size = rows.tobytes(), self._row.itemsize
        return [data[at : at + size] for at in range(0, len(data), size)]
