"""The frame, which holds one agent's samples of one interval, and its codec.

Frames are MessagePack maps; numbers are sent as columns of little-endian float64. ``docs/reference/wire.md`` describes
the bytes for clients in other languages. Everything in a frame is untrusted: decoding checks types, names, sizes and
finiteness, and raises ``BadFrame`` with a machine-readable reason.

Agents and servers of one wire version are compatible: an older server drops and reports what a newer agent adds
(metrics, kinds of events, keys). A change in the meaning of the rest needs a new version, which is refused.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from eagle_eye.schema import events as event_catalogue
from eagle_eye.schema import metrics as metric_catalogue
from eagle_eye.schema.events import Event
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.names import RULE, bad_name, is_name, with_names

WIRE_VERSION = 1
CONTENT_TYPE = "application/x-eagle-eye-frames"
# Of a request whose frames another server has acknowledged before: how many more of them follow.
KEPT_HEADER = "Eagle-Eye-Kept"

# Limits, each far above what a real host needs; they bound the cost of a hostile one.
TEXT_CHARS_MAX = 16_384
KEYS_MAX = 1_024  # rows of one block
METRICS_MAX = 1_024  # columns of one block
BLOCKS_MAX = 8
EVENTS_MAX = 4_096
RANKS_MAX = 1_024
FRAME_BYTES_MAX = 1 << 20
FRAMES_PER_REQUEST_MAX = 1_024
REQUEST_BYTES_MAX = 8 << 20
TIME_S_MAX = 253_402_300_800.0  # the year 10000: a clock may be wrong by a century, and its frames are still accepted


class BadFrame(ValueError):
    """An invalid frame; ``reason`` is a stable identifier for counters and clients."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Rank(msgspec.Struct, frozen=True):
    """A rank of a training job that an agent saw on its node.

    ``attempt`` counts the job's restarts from 0. ``role`` groups comparable ranks (a pipeline stage); empty if the job
    did not report one. ``silent_s`` is how long the rank's hook has reported nothing although its process exists; 0
    while it reports.
    """

    job: str
    rank: int
    world_size: int
    device: int
    attempt: int = 0
    pid: int = 0
    role: str = ""
    silent_s: float = 0.0


class Block(msgspec.Struct, frozen=True):
    """Rows of one scope as columns.

    ``keys`` name the rows: device indexes, [-1] for the node, link names. ``values`` holds len(metrics) x len(keys)
    little-endian float64, all keys of the first metric first. NaN: not observed. A value that really was NaN or
    infinite is sent as +inf.
    """

    scope: Scope
    keys: list[int | str]
    metrics: list[str]
    values: bytes


class Frame(msgspec.Struct, frozen=True):
    """One agent's samples of the interval that ended at ``time_s``.

    (node, stream, sequence) identifies a frame permanently: another one with the same three is a duplicate. ``stream``
    is the id of the agent's spool, ``sequence`` counts from 1 in it. ``collectors`` maps a collector's name to "ok",
    "unsupported: why" or "failed: why"; ``dropped`` maps a reason to how often the agent dropped something for it since
    it started. ``clock_base_s`` is the clock that dated the frame minus one that is never set (CLOCK_BOOTTIME): it
    changes only when the clock is set. UNSET: the client does not report it.
    """

    version: int
    node: str
    boot_id: str
    stream: str
    sequence: int
    time_s: float
    interval_s: float
    agent_version: str
    job: str | None = None
    ranks: list[Rank] = []
    blocks: list[Block] = []
    events: list[Event] = []
    collectors: dict[str, str] = {}
    dropped: dict[str, int] = {}
    clock_base_s: float | msgspec.UnsetType = msgspec.UNSET

    @property
    def base_s(self) -> float | None:
        """``clock_base_s``, None if the client does not report it."""
        return None if isinstance(self.clock_base_s, msgspec.UnsetType) else self.clock_base_s


class Envelope(msgspec.Struct, frozen=True):
    """The frames of one request, each still encoded; ``sent_s`` is the node's clock at sending."""

    version: int
    sent_s: float
    frames: list[msgspec.Raw]


class DecodedFrame(NamedTuple):
    """A frame as far as this version understands it.

    ``unknown`` names what was dropped, once per occurrence: "metric gpu_mood", "event party", and regardless of version
    "name job ''" and "number rank.rank -1", which are invalid. Empty for an agent that is not newer.
    """

    frame: Frame
    unknown: tuple[str, ...]


class _Versioned(msgspec.Struct):
    version: int


class _Keys(msgspec.Struct):
    """The keys of a frame's parts; their values stay encoded."""

    ranks: list[dict[str, msgspec.Raw]] = []
    blocks: list[dict[str, msgspec.Raw]] = []
    events: list[dict[str, msgspec.Raw]] = []


NO_NAME = "key that is no name"
_encoder = msgspec.msgpack.Encoder()
_frame_decoder = msgspec.msgpack.Decoder(Frame)
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_version_decoder = msgspec.msgpack.Decoder(_Versioned)
_map_decoder = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_keys_decoder = msgspec.msgpack.Decoder(_Keys)


def block(scope: Scope, rows: Mapping[int, Mapping[str, float]] | Mapping[str, Mapping[str, float]]) -> Block:
    """Return the rows as one block; metrics missing from a row are NaN.

    Raises KeyError for a metric that is not in the catalogue: add it there first.
    """
    keys: list[int | str] = list(rows)
    seen: dict[str, None] = {}
    for row in rows.values():
        for name in row:
            if metric_catalogue.BY_NAME[name].scope is not scope:
                raise KeyError(f"{name} is not a {scope.value} metric")
            seen[name] = None
    columns = array("d")
    table: list[Mapping[str, float]] = list(rows.values())
    for name in seen:
        columns.extend(row.get(name, math.nan) for row in table)
    if sys.byteorder == "big":
        columns.byteswap()
    return Block(scope, keys, list(seen), columns.tobytes())


def encode_frame(frame: Frame) -> bytes:
    """Return the frame as MessagePack.

    Text that is not valid Unicode becomes "?": a file name in another encoding does not cost a frame.
    """
    try:
        return _encoder.encode(frame)
    except UnicodeEncodeError:  # from lone surrogates, Python's form of such names
        return _encoder.encode(_in_unicode(msgspec.to_builtins(frame, builtin_types=(bytes,))))


def encode_request(frames: Iterable[bytes], sent_s: float) -> bytes:
    """Return encoded frames as the body of one request."""
    return _encoder.encode({"version": WIRE_VERSION, "sent_s": sent_s, "frames": [msgspec.Raw(f) for f in frames]})


def decode_request(body: bytes) -> tuple[float, list[bytes]]:
    """Return the sending time and the frames of a request, each still encoded.

    Raises BadFrame: ``oversized``, ``truncated``, ``version``, ``time``.
    """
    if len(body) > REQUEST_BYTES_MAX:
        raise BadFrame("oversized", f"the request has {len(body)} bytes; at most {REQUEST_BYTES_MAX} are read")
    try:
        envelope = _envelope_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter from keys that are not text
        _check_version(version_of(body), "the request")
        raise BadFrame("truncated", f"the request is no complete MessagePack envelope: {error}") from None
    _check_version(envelope.version, "the request")
    if not 0.0 < envelope.sent_s < TIME_S_MAX:
        raise BadFrame("time", f"sent_s is {envelope.sent_s!r}; expected Unix seconds before the year 10000")
    if len(envelope.frames) > FRAMES_PER_REQUEST_MAX:
        raise BadFrame(
            "oversized", f"{len(envelope.frames)} frames in a request; send at most {FRAMES_PER_REQUEST_MAX}"
        )
    return envelope.sent_s, [bytes(frame) for frame in envelope.frames]


def decode_frame(raw: bytes) -> Frame:
    """Return the validated frame without what this version does not know; see ``read_frame``."""
    return read_frame(raw).frame


def read_frame(raw: bytes) -> DecodedFrame:
    """Return the validated frame, and what was dropped from it because only a newer version knows it.

    Raises BadFrame: ``oversized``, ``truncated``, ``version``, ``time``, ``name``, ``metric``, ``shape``, ``event``.
    """
    if len(raw) > FRAME_BYTES_MAX:
        raise BadFrame("oversized", f"the frame has {len(raw)} bytes; at most {FRAME_BYTES_MAX} are read")
    try:
        frame = _frame_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter from keys that are not text
        _check_version(version_of(raw), "the frame")
        raise BadFrame("truncated", f"the frame is not a complete frame of version {WIRE_VERSION}: {error}") from None
    _check_version(frame.version, "the frame")
    return check_frame(frame)


def check_frame(frame: Frame) -> DecodedFrame:
    """Return a frame and what was dropped from it, as ``read_frame`` does for encoded frames. Raises BadFrame."""
    for text in (frame.node, frame.stream):
        _check_name(text)
    _check_header(frame)
    frame, unknown = with_names(frame)
    left_out = False
    for item in frame.blocks:
        reported = _check_block(item)
        unknown += reported
        left_out |= bool(reported)
    for event in frame.events:
        if event.kind in event_catalogue.BY_KIND:
            _check_event(event)
        else:
            unknown.append(f"event {event.kind}")
            left_out = True
    return DecodedFrame(_without_unknown(frame) if left_out else frame, tuple(unknown))


def unknown_keys(raw: bytes) -> tuple[str, ...]:
    """Return the keys of an accepted frame that this version does not know, each once: "key frame.mood".

    ``read_frame`` skips them at no cost. Finding them takes as long as reading: examine few frames.
    """
    try:
        parts = _keys_decoder.decode(raw)
        shapes: tuple[tuple[type[msgspec.Struct], list[dict[str, msgspec.Raw]]], ...] = (
            (Frame, [_map_decoder.decode(raw)]),
            (Rank, parts.ranks),
            (Block, parts.blocks),
            (Event, parts.events),
        )
    except (msgspec.DecodeError, UnicodeDecodeError):
        return (NO_NAME,)
    found = {
        f"key {shape.__name__.lower()}.{name}" if is_name(name) else NO_NAME
        for shape, items in shapes
        for item in items
        for name in item.keys() - set(shape.__struct_fields__)
    }
    return tuple(sorted(found))


def _check_header(frame: Frame) -> None:
    for field in ("time_s", "interval_s"):
        value = getattr(frame, field)
        if not 0.0 < value < TIME_S_MAX:
            raise BadFrame("time", f"{field} is {value!r}; expected a positive number of seconds")
    if frame.base_s is not None and not abs(frame.base_s) < TIME_S_MAX:
        raise BadFrame("time", f"clock_base_s is {frame.base_s!r}; expected a clock's seconds minus another's")
    if not 0 < frame.sequence < 1 << 53:
        raise BadFrame("shape", f"sequence is {frame.sequence}; expected 1 or more")
    if len(frame.blocks) > BLOCKS_MAX or len(frame.events) > EVENTS_MAX or len(frame.ranks) > RANKS_MAX:
        raise BadFrame(
            "oversized",
            f"{len(frame.blocks)} blocks, {len(frame.events)} events, {len(frame.ranks)} ranks;"
            f" at most {BLOCKS_MAX}, {EVENTS_MAX}, {RANKS_MAX}",
        )


def _in_unicode(plain: Any) -> Any:
    if isinstance(plain, str):
        return plain.encode("utf-8", "replace").decode("utf-8")
    if isinstance(plain, list):
        return [_in_unicode(item) for item in plain]
    if isinstance(plain, dict):
        return {_in_unicode(key): _in_unicode(value) for key, value in plain.items()}
    return plain


def values_of(item: Block) -> array[float]:
    """Return a block's values as one flat array, all keys of the first metric first."""
    values = array("d")
    values.frombytes(item.values)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def version_of(raw: bytes) -> int:
    """Return the version stated by a frame or request, readable or not; WIRE_VERSION if none is stated."""
    try:
        return _version_decoder.decode(raw).version
    except (msgspec.DecodeError, UnicodeDecodeError):
        return WIRE_VERSION


def _check_version(version: int, what: str) -> None:
    if version != WIRE_VERSION:
        older = "server" if version > WIRE_VERSION else "agent"
        raise BadFrame(
            "version",
            f"{what} is of wire version {version}; this server reads version {WIRE_VERSION}: upgrade the {older}",
        )


def _check_name(text: str) -> None:
    if not is_name(text):
        raise BadFrame("name", f"{text[:80]!r} is no name: {RULE}")


def _check_block(item: Block) -> list[str]:
    """Return the metrics that the catalogue lacks, and the links with invalid names."""
    rows = len(item.keys)
    if rows > KEYS_MAX or len(item.metrics) > METRICS_MAX:
        raise BadFrame(
            "oversized", f"a block of {rows} rows, {len(item.metrics)} metrics; at most {KEYS_MAX}, {METRICS_MAX}"
        )
    if len(item.values) != 8 * rows * len(item.metrics):
        raise BadFrame(
            "shape",
            f"{len(item.values)} bytes of values for {len(item.metrics)} metrics x {rows} rows of 8 bytes",
        )
    if len(set(item.keys)) != rows or len(set(item.metrics)) != len(item.metrics):
        raise BadFrame("shape", "a block names the same row or metric twice")
    unknown: list[str] = []
    for name in item.metrics:
        spec = metric_catalogue.BY_NAME.get(name)
        if spec is None:
            unknown.append(f"metric {name}" if is_name(name) else bad_name("metric", name))
        elif spec.scope is not item.scope:
            raise BadFrame("metric", f"{name!r} is not a {item.scope.value} metric of the catalogue")
    return unknown + _bad_keys(item)


def _bad_keys(item: Block) -> list[str]:
    if item.scope is Scope.LINK:
        return [bad_name("link", str(key)) for key in item.keys if not is_name(str(key))]
    for key in item.keys:
        if not isinstance(key, int) or not -1 <= key < KEYS_MAX or (key == -1) != (item.scope is Scope.NODE):
            raise BadFrame("shape", f"{key!r} is not the key of a {item.scope.value} row")
    return []


def _without_unknown(frame: Frame) -> Frame:
    """Return the frame without metrics and events that the catalogue lacks, and without links with invalid names."""
    events = [event for event in frame.events if event.kind in event_catalogue.BY_KIND]
    return msgspec.structs.replace(frame, blocks=[_known(item) for item in frame.blocks], events=events)


def _known(item: Block) -> Block:
    width = len(item.keys)
    rows = [at for at, key in enumerate(item.keys) if item.scope is not Scope.LINK or is_name(str(key))]
    columns = [(name, 8 * width * at) for at, name in enumerate(item.metrics) if name in metric_catalogue.BY_NAME]
    if len(rows) == width:
        values = b"".join(item.values[begin : begin + 8 * width] for _, begin in columns)
    else:
        values = b"".join(item.values[begin + 8 * at : begin + 8 * (at + 1)] for _, begin in columns for at in rows)
    return Block(item.scope, [item.keys[at] for at in rows], [name for name, _ in columns], values)


def _check_event(event: Event) -> None:
    if not 0.0 < event.time_s < TIME_S_MAX:
        raise BadFrame("time", f"an event's time_s is {event.time_s!r}; expected Unix seconds")
    if not -1 <= event.device < KEYS_MAX:
        raise BadFrame("event", f"device {event.device} of an event; expected -1 to {KEYS_MAX - 1}")
    for name, value in event.attributes.items():
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise BadFrame("event", f"attribute {name[:80]!r} of {event.kind} is no text, number, bool or null")
        if isinstance(value, str) and len(value) > TEXT_CHARS_MAX:
            raise BadFrame(
                "oversized", f"attribute {name[:80]!r} has {len(value)} characters; at most {TEXT_CHARS_MAX}"
            )
