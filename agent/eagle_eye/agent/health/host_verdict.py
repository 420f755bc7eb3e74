"""Judges this host from its own facts: sick, healthy or unknown. Pure.

It covers faults visible on this host alone, before a job starts on it. Only the server can see that it is slower than
its peers or the cause of a job's hang.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Literal, NamedTuple

from eagle_eye.agent.kernel.host_error_lines import GPU_UNUSABLE
from eagle_eye.agent.loop.tick_result import TickFrame
from eagle_eye.schema.events import WHOLE_NODE, Event

SOURCES = ("nvml", "kernel_log", "fabric", "mounts")  # collectors without which the host cannot be called healthy
REASONS_MAX = 16
TEXT_CHARS_MAX = 200

State = Literal["healthy", "sick", "cannot_tell"]

# No tool exits with 3 on its own failure: not a shell that finds no command, a kill, wrong usage or a crash. So a
# prolog that acts only on 3 fails open.
EXIT_CODES: Mapping[State, int] = MappingProxyType({"healthy": 0, "cannot_tell": 1, "sick": 3})

# NVIDIA, XID Errors: codes whose immediate action is a GPU reset or a machine restart (48: alone, a reset). Codes that
# only end the program, or may come from the other end of a link, are no reason to refuse the next job; nor is 155,
# since a reset itself takes links down.
XID_REPAIRS: Mapping[int, str] = MappingProxyType(
    {79: "reboot", **dict.fromkeys((46, 48, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158), "GPU reset")}
)
# Memory errors that the driver counts until the GPU is reset: a counter of 0 means that it was reset.
_COUNTED = frozenset({48, 95, 140})
_RECOVERY = 154  # the driver's own statement, for better or worse: it overrides the table
# "changed from 0x0 (None) to 0x1 (PF FLR)": the numbers are NVML's, the names change with the driver.
_ACTION = re.compile(r".* to 0x(\d)\b", re.DOTALL)
_NO_ACTION, _REPAIR_ACTIONS = "0", ("1", "2", "4")  # reset, reboot, drain and reset; 3 is a drain of peer-to-peer


class HostVerdict(NamedTuple):
    """``reasons``: what makes the host sick. ``unseen``: what could not be checked, and why."""

    state: State
    reasons: tuple[str, ...]
    unseen: tuple[str, ...]


def judge(tick: TickFrame, gpus_expected: int | None = None, repaired_s: float = 0.0) -> HostVerdict:
    """Return the verdict on one tick of an agent that has read the kernel log from boot.

    ``gpus_expected``: how many GPUs the host should have; None: unknown, 0: none, so they are not checked.
    ``repaired_s``: Unix seconds; an operator declared everything before it repaired.
    """
    events = [event for event in tick.events if event.time_s >= repaired_s]
    reasons = [
        *_gpus(tick, gpus_expected, events),
        *_xids(tick, events),
        *_links(tick),
        *_mounts(tick),
        *_panics(events),
        *_unusable(events),
    ]
    unseen = tuple(_unseen(tick, gpus_expected))
    state: State = "sick" if reasons else "cannot_tell" if unseen else "healthy"
    return HostVerdict(state, tuple(reasons[:REASONS_MAX]), unseen)


def lines(verdict: HostVerdict) -> tuple[list[str], list[str]]:
    """Return the text for people: the verdict, and what could not be checked."""
    reported = [f"sick: {reason}" for reason in verdict.reasons]
    if verdict.state == "healthy":
        reported = [f"healthy: nothing stands against this host ({', '.join(SOURCES)})"]
    return reported, [f"could not check: {text}" for text in verdict.unseen]


def _gpus(tick: TickFrame, expected: int | None, events: list[Event]) -> Iterator[str]:
    gpus = {device: row for device, row in tick.seen.devices.items() if any(name.startswith("gpu_") for name in row)}
    if expected is not None and len(gpus) < expected and _state(tick, "nvml") == "ok":
        yield f"NVML shows {len(gpus)} of {expected} GPUs"
    for event in events:
        if event.kind == "gpu_lost":
            yield f"{_gpu(event.device)}: lost, it has left the bus; reboot"
    for device, row in sorted(gpus.items()):
        if row.get("gpu_remap_pending", 0.0) > 0.0:
            yield f"{_gpu(device)}: a row remap waits for a GPU reset"
        if (errors := row.get("gpu_ecc_uncorrected_total", 0.0)) > 0.0:
            yield f"{_gpu(device)}: {errors:.0f} uncorrectable memory errors since its last reset; reset the GPU"


def _xids(tick: TickFrame, events: list[Event]) -> Iterator[str]:
    """Yield each GPU's last XID that calls for a repair, unless the driver or its counters show that it was done."""
    standing: dict[tuple[int, str], str] = {}
    for event in sorted(events, key=lambda event: event.time_s):
        if event.kind != "xid":
            continue
        code, text = event.attributes.get("code"), str(event.attributes.get("text", ""))
        # The log names a GPU unknown to NVML by its address, before the first comma.
        gpu = (event.device, text.partition(",")[0] if event.device == WHOLE_NODE else "")
        at = datetime.fromtimestamp(event.time_s, timezone.utc)
        said = f"at {at:%Y-%m-%dT%H:%M:%SZ}: {_printable(text)}"
        if code == _RECOVERY:
            action = _ACTION.search(text)
            if action is not None and action[1] == _NO_ACTION:
                standing.pop(gpu, None)
            elif action is not None and action[1] in _REPAIR_ACTIONS:
                standing[gpu] = f"{_gpu(event.device)}: {said}"
        elif isinstance(code, int) and code in XID_REPAIRS:
            counted = tick.seen.devices.get(event.device, {}).get("gpu_ecc_uncorrected_total", math.nan)
            if code not in _COUNTED or counted != 0.0:
                standing[gpu] = f"{_gpu(event.device)}: XID {code} asks for a {XID_REPAIRS[code]}, {said}"
    yield from standing.values()


def _links(tick: TickFrame) -> Iterator[str]:
    for name, row in sorted(tick.seen.links.items()):
        if row.get("link_up") == 0.0:
            yield f"link {name} is down, and has been up"


def _mounts(tick: TickFrame) -> Iterator[str]:
    if tick.seen.node.get("node_mounts_unresponsive", 0.0) > 0.0:
        yield f"a network filesystem does not answer: {_state(tick, 'mounts').removeprefix('failed: ')}"


def _panics(events: list[Event]) -> Iterator[str]:
    for event in events:
        if event.kind == "kernel_panic":
            yield f"the kernel panicked before the last boot: {_printable(str(event.attributes.get('text', '')))}"


def _unusable(events: list[Event]) -> Iterator[str]:
    """Yield the GPUs that the driver could not bring up since boot and that NVML does not know, each once."""
    found = {str(event.attributes.get("device", "")): event for event in events if _is_unusable(event)}
    for place, event in found.items():
        said = _printable(str(event.attributes.get("text", "")))
        yield f"the driver could not bring up GPU {place or 'unknown'}: {said}; reboot"


def _is_unusable(event: Event) -> bool:
    reported = event.kind == "host_error" and event.attributes.get("what") == GPU_UNUSABLE
    return reported and event.device == WHOLE_NODE  # one that is known by now is up


def _unseen(tick: TickFrame, expected: int | None) -> Iterator[str]:
    for source in SOURCES:
        state = _state(tick, source)
        reported = source == "mounts" and tick.seen.node.get("node_mounts_unresponsive", 0.0) > 0.0
        if state != "ok" and not reported and not (source == "nvml" and expected == 0):
            yield f"{source}: {_printable(state)}"


def _state(tick: TickFrame, name: str) -> str:
    return next((standing.state for standing in tick.collectors if standing.name == name), "not asked")


def _gpu(device: int) -> str:
    return f"gpu {device}" if device != WHOLE_NODE else "a GPU that NVML does not know"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text[:TEXT_CHARS_MAX])
