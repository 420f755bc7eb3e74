"""The datagram that reports a training process's state to the agent, and its codec.

A message carries totals since the process attached, never differences: a reader that misses a thousand messages loses
only resolution. ``docs/reference/hook.md`` describes the bytes. Decoding treats input as untrusted: it raises
``BadMessage`` with one stable reason.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"EEHK"
HOOK_VERSION = 1
MESSAGE_BYTES_MAX = 16_384
TEXT_BYTES_MAX = 2_048
NAME_CHARS_MAX = 253
PHASE_CHARS_MAX = 64
EVENTS_PER_MESSAGE_MAX = 32
RANKS_MAX = 1 << 24
DEVICES_MAX = 1_024
TIME_S_MAX = 253_402_300_800.0  # the year 10000, as for frames
COUNT_MAX = float(1 << 53)

SOCKET_VARIABLE = "EAGLE_EYE_HOOK_SOCKET"
SYSTEM_FOLDER = Path("/run/eagle-eye")
HEARTBEAT_S = 0.25

# Events that a training process may report: kind and its one attribute.
HOOK_EVENTS: Mapping[str, tuple[str, type]] = {
    "phase": ("name", str),
    "checkpoint_begin": ("step", int),
    "checkpoint_end": ("step", int),
    "training_error": ("text", str),
}


class BadMessage(ValueError):
    """An invalid datagram; ``reason`` is one stable word for counters."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Totals(NamedTuple):
    """A process's totals since it attached.

    Each quantity has its own count, because not every step observes every quantity. ``*_s`` are seconds.
    ``*_odd`` count values that were NaN or infinite; they are in neither the sum nor the count.
    ``timed_tokens`` are the tokens of the ``timed_steps``.
    """

    steps: float = 0.0
    timed_steps: float = 0.0
    step_s: float = 0.0
    compute_steps: float = 0.0
    compute_s: float = 0.0
    data_wait_steps: float = 0.0
    data_wait_s: float = 0.0
    collective_steps: float = 0.0
    collective_s: float = 0.0
    token_steps: float = 0.0
    token_step_s: float = 0.0
    timed_tokens: float = 0.0
    work_steps: float = 0.0
    work_units: float = 0.0
    losses: float = 0.0
    loss: float = 0.0
    loss_odd: float = 0.0
    grad_norms: float = 0.0
    grad_norm: float = 0.0
    grad_norm_odd: float = 0.0
    local_grad_norms: float = 0.0
    local_grad_norm: float = 0.0
    local_grad_norm_odd: float = 0.0


TOTALS_SIGNED = frozenset({"loss", "grad_norm", "local_grad_norm"})  # sums that may be negative

# magic, version, process, number, time_s, heartbeat_s, rank, world_size, device, attempt, step,
# sequence, completed_sequence, goodbye, failures, unread, unsent, totals, bytes of the tail
_HEAD = struct.Struct(f"<4sB16sQddiiiiqqqBIII{len(Totals._fields)}dH")


class HookEvent(NamedTuple):
    """An event in the training process.

    ``number`` counts the process's events from 1: an event is sent in several messages, and counted once.
    """

    number: int
    time_s: float
    kind: str
    value: str | int


class HookMessage(NamedTuple):
    """One message. ``process`` is a random id, ``number`` counts the process's messages from 1.

    ``step`` is the last finished step, ``sequence`` and ``completed_sequence`` are the newest collective enqueued and
    completed on the default process group; -1: none or not observed. ``device`` is the GPU's index as far as the
    process knows it, else the local rank; ``gpu`` the GPU's UUID or empty. ``failures``, ``unread`` and ``unsent``
    count the hook's failures, the values it did not read because they were on a device, and the datagrams that were not
    accepted. ``unknown_events`` is how many events of a newer hook, of kinds that HOOK_EVENTS lacks, were left out of
    this message. ``quorum`` is the quorum of torchft's replica groups that the process is in, -1: none or not observed.
    """

    process: bytes
    number: int
    time_s: float
    heartbeat_s: float
    job: str
    rank: int
    world_size: int
    device: int
    attempt: int
    step: int
    sequence: int
    completed_sequence: int
    goodbye: bool
    failures: int
    unread: int
    unsent: int
    totals: Totals
    role: str = ""
    phase: str = ""
    gpu: str = ""
    events: tuple[HookEvent, ...] = ()
    unknown_events: int = 0
    quorum: int = -1


def default_socket() -> Path:
    """Return the default socket path of agent and hook.

    In the system's folder if it exists, else in one of the user's own under /tmp.
    """
    if SYSTEM_FOLDER.is_dir():
        return SYSTEM_FOLDER / "hook.sock"
    return Path(f"/tmp/eagle-eye-{os.getuid()}/hook.sock")  # noqa: S108 - the reader checks the folder's owner


def encode_tail(job: str, role: str, phase: str, gpu: str, events: Sequence[HookEvent], quorum: int = -1) -> bytes:
    """Return the part of a message that seldom changes: texts, events and the quorum."""
    tail: dict[str, object] = {"job": job, "role": role, "phase": phase, "gpu": gpu}
    tail["events"] = [list(event) for event in events]
    if quorum >= 0:
        tail["quorum"] = quorum
    return json.dumps(tail, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def encode(message: HookMessage, tail: bytes | None = None) -> bytes:
    """Return the message's bytes; ``tail`` is the encoded texts and events, where the caller caches them."""
    if tail is None:
        tail = encode_tail(message.job, message.role, message.phase, message.gpu, message.events, message.quorum)
    head = _HEAD.pack(
        MAGIC,
        HOOK_VERSION,
        message.process,
        message.number,
        message.time_s,
        message.heartbeat_s,
        message.rank,
        message.world_size,
        message.device,
        message.attempt,
        message.step,
        message.sequence,
        message.completed_sequence,
        message.goodbye,
        message.failures,
        message.unread,
        message.unsent,
        *message.totals,
        len(tail),
    )
    return head + tail


def decode(datagram: bytes) -> HookMessage:
    """Return the validated message.

    Raises BadMessage: ``oversized``, ``magic``, ``version``, ``truncated``, ``range``, ``text``, ``event``.
    """
    if len(datagram) > MESSAGE_BYTES_MAX:
        raise BadMessage("oversized", f"{len(datagram)} bytes; at most {MESSAGE_BYTES_MAX} are read")
    if datagram[:4] != MAGIC:
        raise BadMessage("magic", f"begins with {datagram[:4]!r}, not {MAGIC!r}")
    if datagram[4:5] != bytes([HOOK_VERSION]):
        raise BadMessage("version", f"version {datagram[4:5].hex()!r}; this agent reads {HOOK_VERSION}")
    if len(datagram) < _HEAD.size:
        raise BadMessage("truncated", f"{len(datagram)} bytes; a head has {_HEAD.size}")
    fields = _HEAD.unpack_from(datagram)
    process, number, time_s, heartbeat_s, rank, world_size, device, attempt = fields[2:10]
    step, sequence, completed, goodbye, failures, unread, unsent = fields[10:17]
    tail = datagram[_HEAD.size :]
    if len(tail) != fields[-1]:
        raise BadMessage("truncated", f"a tail of {len(tail)} bytes; the head announces {fields[-1]}")
    totals = Totals._make(fields[17:-1])
    _check_numbers(totals, time_s, heartbeat_s)
    if not (
        0 <= rank < world_size <= RANKS_MAX
        and 0 <= device < DEVICES_MAX
        and 0 <= attempt < RANKS_MAX
        and min(step, sequence, completed) >= -1
        and max(step, sequence, completed) < COUNT_MAX
        and goodbye in (0, 1)
        and 0 < number < COUNT_MAX
    ):
        raise BadMessage("range", f"rank {rank} of {world_size}, device {device}, attempt {attempt}, step {step}")
    texts = _decode_tail(tail)
    events, unknown_events = _events(texts.get("events"))
    return HookMessage(
        process=process,
        number=number,
        time_s=time_s,
        heartbeat_s=heartbeat_s,
        job=_text(texts, "job", NAME_CHARS_MAX, empty=False),
        rank=rank,
        world_size=world_size,
        device=device,
        attempt=attempt,
        step=step,
        sequence=sequence,
        completed_sequence=completed,
        goodbye=bool(goodbye),
        failures=failures,
        unread=unread,
        unsent=unsent,
        totals=totals,
        role=_text(texts, "role", NAME_CHARS_MAX),
        phase=_text(texts, "phase", PHASE_CHARS_MAX),
        gpu=_text(texts, "gpu", NAME_CHARS_MAX),
        events=events,
        unknown_events=unknown_events,
        quorum=_quorum(texts),
    )


def _check_numbers(totals: Totals, time_s: float, heartbeat_s: float) -> None:
    if not 0.0 < time_s < TIME_S_MAX or not 0.0 < heartbeat_s <= 3600.0:
        raise BadMessage("range", f"time_s {time_s!r}, heartbeat_s {heartbeat_s!r}")
    for name, value in totals._asdict().items():
        if not math.isfinite(value) or (value < 0.0 and name not in TOTALS_SIGNED):
            raise BadMessage("range", f"{name} is {value!r}")


def _decode_tail(tail: bytes) -> dict[str, Any]:
    try:
        texts = json.loads(tail.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # covers bad UTF-8 and bad JSON
        raise BadMessage("text", f"the tail is not JSON: {error}") from None
    if not isinstance(texts, dict):
        raise BadMessage("text", f"the tail is a {type(texts).__name__}; expected an object")
    return texts


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _text(texts: Mapping[str, Any], name: str, chars_max: int, *, empty: bool = True) -> str:
    text = texts.get(name, "")
    if not isinstance(text, str) or len(text) > chars_max or not text.isprintable() or not (text or empty):
        raise BadMessage("text", f"{name} is {str(text)[:80]!r}; expected at most {chars_max} printable characters")
    return text


def _quorum(texts: Mapping[str, Any]) -> int:
    quorum = texts.get("quorum", -1)
    if not _is_exactly(quorum, int) or not -1 <= quorum < COUNT_MAX:
        raise BadMessage("range", f"quorum {str(quorum)[:80]}")
    return int(quorum)


def _events(items: Any) -> tuple[tuple[HookEvent, ...], int]:
    """Return the events, and how many were skipped: a newer hook's must not invalidate the rest of its message."""
    if not isinstance(items, list) or len(items) > EVENTS_PER_MESSAGE_MAX:
        raise BadMessage("event", f"events: expected a list of at most {EVENTS_PER_MESSAGE_MAX}")
    events = tuple(event for item in items if (event := _event(item)) is not None)
    return events, len(items) - len(events)


def _is_exactly(value: Any, kind: type) -> bool:
    return type(value) is kind  # a bool is an int to isinstance


def _event(item: Any) -> HookEvent | None:
    """Return an event, None for an unknown kind."""
    if not isinstance(item, list) or len(item) != 4:
        raise BadMessage("event", f"{str(item)[:80]!r} is not [number, time_s, kind, value]")
    number, time_s, kind, value = item
    if type(number) is not int or not 0 < number < COUNT_MAX:
        raise BadMessage("event", f"event number {str(number)[:80]!r}")
    if type(time_s) not in (int, float) or not 0.0 < time_s < TIME_S_MAX:
        raise BadMessage("event", f"event time {str(time_s)[:80]!r}; expected Unix seconds")
    known = HOOK_EVENTS.get(kind) if isinstance(kind, str) else None
    if known is None and isinstance(kind, str) and 0 < len(kind) <= PHASE_CHARS_MAX and kind.isprintable():
        return None
    if known is None or not _is_exactly(value, known[1]):
        raise BadMessage("event", f"{str(kind)[:80]!r} with a {type(value).__name__} is no event of the hook")
    if isinstance(value, str):
        text = value.encode("utf-8", "replace")  # JSON can encode lone surrogates, and no frame could carry them
        if len(text) > TEXT_BYTES_MAX:
            raise BadMessage("event", f"a text of more than {TEXT_BYTES_MAX} bytes")
        if kind == "phase" and not (0 < len(value) <= PHASE_CHARS_MAX and value.isprintable()):
            raise BadMessage("event", f"{value[:80]!r} is no name of a phase")
        return HookEvent(number, float(time_s), kind, text.decode("utf-8"))
    if not -1 <= value < COUNT_MAX:
        raise BadMessage("event", f"step {str(value)[:80]}")
    return HookEvent(number, float(time_s), kind, int(value))
