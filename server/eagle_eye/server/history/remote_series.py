"""The series of the remote store: samples as a remote write request, and which series a metric of ours is. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.events import WHOLE_NODE
from eagle_eye.schema.frame import KEYS_MAX
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX, MetricSpec, Scope
from eagle_eye.schema.names import is_name

# A remote write 1.0 request (prometheus.WriteRequest). A series is a constant head followed by fixed-size samples, so
# that a hundred thousand of them take a few array operations rather than a message object each.
# Specification: https://prometheus.io/docs/specs/prw/remote_write_spec/

CONTENT_TYPE = "application/x-protobuf"
VERSION = "0.1.0"
LABELS_MAX = 16_384  # cached; most labels are shared by many series
TIME_MS_MAX = 1 << 42  # what six bytes of a varint hold: the year 2109

_TIME_BYTES = 6
# Field 2 of a series: a message of a fixed64 (field 1: the value) and a varint (field 2: milliseconds).
_SAMPLE = np.dtype([("tag", "u1"), ("size", "u1"), ("of", "u1"), ("value", "<f8"), ("at", "u1"), ("time", "u1", 6)])
SAMPLE_BYTES = _SAMPLE.itemsize


def head(labels: Mapping[str, str]) -> bytes:
    """Return the encoded head of a series with one sample; labels with empty values are omitted."""
    content = b"".join(_label(name, value) for name, value in sorted(labels.items()) if value)
    return b"\x0a" + varint(len(content) + SAMPLE_BYTES) + content


def samples(times_ms: np.ndarray[Any, np.dtype[np.int64]], values: np.ndarray[Any, Any]) -> list[bytes]:
    """Return each sample's bytes; times are from 0 to below TIME_MS_MAX."""
    records = np.zeros(len(times_ms), dtype=_SAMPLE)
    records["tag"], records["size"], records["of"], records["at"] = 0x12, SAMPLE_BYTES - 2, 0x09, 0x10
    records["value"] = values
    for place in range(_TIME_BYTES):
        more = 0x80 if place < _TIME_BYTES - 1 else 0
        records["time"][:, place] = (times_ms >> (7 * place)) & 0x7F | more
    found: list[bytes] = records.view(f"V{SAMPLE_BYTES}").tolist()
    return found


def request(heads: Sequence[bytes], of_each: Sequence[bytes]) -> bytes:
    """Return the compressed request of series with one sample each."""
    return compressed(b"".join(chain.from_iterable(zip(heads, of_each, strict=True))))


def compressed(content: bytes) -> bytes:
    """Return the content as a Snappy block."""
    # Imported at the first request: it takes half a second and 40 MB, needed only by servers that write remotely.
    import pyarrow as pa

    block: bytes = pa.Codec("snappy").compress(content, asbytes=True)
    return block


@functools.lru_cache(maxsize=LABELS_MAX)
def _label(name: str, value: str) -> bytes:
    return field(1, field(1, name.encode()) + field(2, value.encode()))


def field(number: int, content: bytes) -> bytes:
    """Return a field with a length, such as a message or a text."""
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def varint(value: int) -> bytes:
    """Return a number from 0 as protobuf has it."""
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))


# A series is ``eagle_eye_<metric>`` with the labels ``node``, ``job`` (where the row belongs to one), and ``device`` or
# ``link``; a node's own row has neither.

NAME, JOB, NODE, DEVICE, LINK = "__name__", "job", "node", "device", "link"
# Where Prometheus scrapes our /metrics, it sets ``job`` itself and renames ours to this.
SCRAPED_JOB = "exported_job"


class SeriesSubject(NamedTuple):
    """The subject of a series in the store; ``job`` None means no job."""

    spec: MetricSpec
    node: str
    key: int | str
    job: str | None


def labels_of(place: SeriesSubject, external: Mapping[str, str]) -> dict[str, str]:
    """Return the series' labels; ``external`` ones do not override its own."""
    labels = {**external, NAME: PROMETHEUS_PREFIX + place.spec.name, NODE: place.node, JOB: place.job or ""}
    if place.spec.scope is Scope.LINK:
        labels[LINK] = str(place.key)
    elif place.spec.scope is Scope.DEVICE:
        labels[DEVICE] = str(place.key)
    return labels


def place_of(labels: Mapping[str, str]) -> SeriesSubject | None:
    """Return the subject of a series; None where it is none of ours or its labels are incomplete."""
    spec = catalogue.BY_NAME.get(labels.get(NAME, "").removeprefix(PROMETHEUS_PREFIX))
    node, job = labels.get(NODE, ""), labels.get(SCRAPED_JOB) or labels.get(JOB) or None
    if spec is None or not is_name(node) or (job is not None and not is_name(job)):
        return None
    if spec.scope is Scope.NODE:
        return SeriesSubject(spec, node, WHOLE_NODE, job)
    if spec.scope is Scope.LINK:
        link = labels.get(LINK, "")
        return SeriesSubject(spec, node, link, job) if is_name(link) else None
    device = labels.get(DEVICE, "")
    if not (device.isascii() and device.isdigit() and len(device) < 5 and int(device) < KEYS_MAX):
        return None
    return SeriesSubject(spec, node, int(device), job)
