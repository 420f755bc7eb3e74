"""Rebuilds frames from a segment's tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from eagle_eye.schema.events import BY_KIND, Event
from eagle_eye.schema.frame import WIRE_VERSION, BadFrame, Block, Frame, Rank, decode_frame
from eagle_eye.schema.metrics import BY_NAME, Scope
from eagle_eye.server.history.history import Recorded

Integers = np.ndarray[Any, np.dtype[np.int64]]
_Layout = list[tuple[Scope, list[int | str], list[str]]]

_layout_decoder = msgspec.json.Decoder(_Layout)
_ranks_decoder = msgspec.json.Decoder(list[Rank])
_events_decoder = msgspec.json.Decoder(list[Event])
_texts_decoder = msgspec.json.Decoder(dict[str, str])
_counts_decoder = msgspec.json.Decoder(dict[str, int])


def frames_of(
    table: pa.Table, wanted: Integers, first: int, samples: pa.Table | None, links: pa.Table | None
) -> Iterator[Recorded]:
    """Yield the wanted rows of ``table`` as frames. Raises ValueError where the tables do not belong together.

    ``first`` is the number of the table's first row; the rows of ``samples`` and ``links`` refer to frames by such
    numbers. Fields that only a newer server knows are left out, as by ``decode_frame``.
    """
    rows = table.take(pa.array(wanted)).to_pylist()
    places_of: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        if row["layout"] is not None:
            places_of.setdefault(row["layout"], []).append(place)
    of_devices, of_links = _Rows(samples, "device"), _Rows(links, "link")
    blocks: list[list[Block]] = [[] for _ in rows]
    for text, places in places_of.items():
        layout = _layout_decoder.decode(text)
        skipped = 0  # bytes of ``unknown`` that belong to earlier metrics
        for scope, keys, metrics in layout:
            linked = scope is Scope.LINK
            source = of_links if linked else of_devices
            beside = [key for other, others, _ in layout if (other is Scope.LINK) is linked for key in others]
            beside.sort(key=str if linked else int)
            columns = [name for name in metrics if name in source.names]
            cells = source.values(wanted[places] + first, [beside.index(key) for key in keys], len(beside), columns)
            elsewhere = [name for name in metrics if name not in source.names]
            for place, own in zip(places, cells, strict=True):
                values = dict(zip(columns, own, strict=True))
                for number, name in enumerate(elsewhere):
                    at = skipped + 8 * len(keys) * number
                    values[name] = np.frombuffer(rows[place]["unknown"], "<f8", len(keys), at)
                known = [name for name in metrics if name in BY_NAME]
                blocks[place].append(Block(scope, keys, known, b"".join(values[name].tobytes() for name in known)))
            skipped += 8 * len(keys) * len(elsewhere)
    for row, own_blocks in zip(rows, blocks, strict=True):
        frame = _frame(row, own_blocks) if row["raw"] is None else whole(row["raw"])
        if frame is not None:
            yield Recorded(frame, row["received"], row["clock_offset"])


def whole(raw: bytes) -> Frame | None:
    """Return the frame that was stored whole; None where this server cannot decode it."""
    try:
        return decode_frame(raw)
    except BadFrame:
        return None


def _frame(row: dict[str, Any], blocks: list[Block]) -> Frame:
    events = _events_decoder.decode(row["events"]) if row["events"] is not None else []
    return Frame(
        version=WIRE_VERSION,
        node=row["node"],
        boot_id=row["boot_id"],
        stream=row["stream"],
        sequence=row["sequence"],
        time_s=row["node_time"],
        interval_s=row["interval"],
        agent_version=row["agent_version"],
        job=row["job"],
        ranks=_ranks_decoder.decode(row["ranks"]),
        blocks=blocks,
        events=[event for event in events if event.kind in BY_KIND],
        collectors=_texts_decoder.decode(row["collectors"]),
        dropped=_counts_decoder.decode(row["dropped"]),
    )


class _Rows:
    """The rows of some frames, looked up by frame and key."""

    def __init__(self, table: pa.Table | None, key: str) -> None:
        self._table: Any = table
        self._columns: dict[str, Any] = {}
        self.names = frozenset(table.schema.names if table is not None else ()) - {"time", "node", key, "frame"}
        if table is not None:
            frames = table["frame"].to_numpy()
            self._order = np.argsort(frames, kind="stable")  # stable: the keys of one frame's rows stay in order
            self._frames = frames[self._order]

    def values(self, frames: Integers, keys: list[int], rows: int, metrics: list[str]) -> Any:
        """Return the cells (frames, metrics, keys) as float64; ``keys`` are indexes among each frame's ``rows``."""
        if self._table is None or not keys:
            return np.empty((len(frames), len(metrics), len(keys)))
        begins = np.searchsorted(self._frames, frames)
        if len(self._frames) < begins.max() + rows or (self._frames[begins + rows - 1] != frames).any():
            raise ValueError("rows of frames are missing")
        places = self._order[begins[:, None] + np.array(keys)]
        cells = np.empty((len(frames), len(metrics), len(keys)))
        for number, name in enumerate(metrics):
            cells[:, number, :] = self._column(name)[places]
        return cells

    def _column(self, name: str) -> Any:
        if name not in self._columns:
            self._columns[name] = self._table[name].to_numpy()
        return self._columns[name]
