"""The on-disk format of a segment: a folder of Parquet tables and ``segment.json``; see docs/explanation/history.md."""

from __future__ import annotations

import pyarrow as pa

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.metrics import Scope

FRAMES_FILE = "frames.parquet"
SAMPLES_FILE = "samples.parquet"
LINKS_FILE = "links.parquet"

SAMPLE_METRICS = (*catalogue.names(Scope.DEVICE), *catalogue.names(Scope.NODE))
LINK_METRICS = catalogue.names(Scope.LINK)

FRAMES_SCHEMA = pa.schema(
    [
        ("time", pa.float64()),  # corrected: by the server's clock
        ("node", pa.string()),
        ("stream", pa.string()),
        ("sequence", pa.int64()),
        ("received", pa.float64()),
        ("node_time", pa.float64()),  # as the node sent it
        ("clock_offset", pa.float64()),
        ("interval", pa.float64()),
        ("boot_id", pa.string()),
        ("agent_version", pa.string()),
        ("job", pa.string()),
        ("ranks", pa.string()),  # this and the next four: JSON
        ("collectors", pa.string()),
        ("dropped", pa.string()),
        ("events", pa.string()),  # null: none
        ("other", pa.string()),  # keys that the server did not know; null: none
        ("layout", pa.string()),  # JSON: scope, rows and metrics of each of the frame's blocks
        ("unknown", pa.binary()),  # values of the layout's metrics without a column: little-endian float64
        ("raw", pa.binary()),  # the whole frame, if no columns could hold it; it has no rows then
    ]
)


def _rows_schema(key: tuple[str, pa.DataType], metrics: tuple[str, ...]) -> pa.Schema:
    return pa.schema(
        [
            ("time", pa.float64()),
            ("node", pa.string()),
            key,
            ("frame", pa.int32()),  # the row number of its frame in frames.parquet, from 0
            *((name, pa.float64() if catalogue.BY_NAME[name].exact else pa.float32()) for name in metrics),
        ]
    )


SAMPLES_SCHEMA = _rows_schema(("device", pa.int16()), SAMPLE_METRICS)
LINKS_SCHEMA = _rows_schema(("link", pa.string()), LINK_METRICS)
