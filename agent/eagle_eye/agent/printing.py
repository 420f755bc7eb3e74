"""Prints frames for people: JSON lines instead of the wire format."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from eagle_eye.schema.frame import Frame, values_of
from eagle_eye.schema.rows import read_written


class Printer:
    """Prints frames as JSON lines."""

    def __init__(self) -> None:
        self._sequence = 0

    def append(self, make: Callable[[str, int], bytes]) -> int | None:
        """Print the frame that ``make`` encodes."""
        self._sequence += 1
        print(json.dumps(readable(read_written(make("print", self._sequence)).frame), ensure_ascii=False), flush=True)
        return self._sequence


def readable(frame: Frame) -> dict[str, Any]:
    """Return a frame as plain data for people: rows by name, unobserved values left out, infinity as text."""
    rows: dict[str, dict[str, dict[str, float | str]]] = {}
    for item in frame.blocks:
        values = values_of(item)
        scope = rows.setdefault(item.scope.value, {})
        for row, key in enumerate(item.keys):
            scope[str(key)] = {
                metric: value if math.isfinite(value) else "+inf"
                for column, metric in enumerate(item.metrics)
                if not math.isnan(value := values[column * len(item.keys) + row])
            }
    return {
        "node": frame.node,
        "time_s": frame.time_s,
        "interval_s": frame.interval_s,
        "sequence": frame.sequence,
        "job": frame.job,
        "ranks": [{field: getattr(rank, field) for field in rank.__struct_fields__} for rank in frame.ranks],
        "rows": rows,
        "events": [
            {"time_s": e.time_s, "kind": e.kind, "device": e.device, "attributes": e.attributes} for e in frame.events
        ],
        "collectors": frame.collectors,
        "dropped": frame.dropped,
    }
