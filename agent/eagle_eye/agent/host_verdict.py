"""Judges this host from its own facts, by the table of schema/driver_facts.py: sick, healthy or unknown. Pure.

It covers faults visible on this host alone, before a job starts on it. Only the server can see that it is slower than
its peers or the cause of a job's hang.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from eagle_eye.agent.collector import CollectorRunner, TickFrame, gathered
from eagle_eye.schema.driver_facts import GPU_REPAIRED, Repair, judged
from eagle_eye.schema.events import WHOLE_NODE, Event

LOOKS = 2  # rates, and messages of several lines, need a second one
BETWEEN_S = 1.0
ANSWER_S = 15.0  # a look, for all collectors together: a driver without persistence mode needs seconds per GPU
REPAIRED_FILE = "repaired"  # in the spool's folder; anything before its mtime counts as repaired


def look(
    runners: Sequence[CollectorRunner],
    within_s: float = ANSWER_S,
    *,
    now_s: Callable[[], float] = time.time,
    monotonic_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> TickFrame:
    """Return what the collectors saw, all together within ``within_s`` a look, and close them.

    Rows are those of the last look, events those of all.
    """
    events = []
    for place in range(LOOKS):
        if place:
            sleep(BETWEEN_S)
        for runner in runners:
            runner.start_collection(now_s())
        seen = gathered(runners, monotonic_s() + within_s, monotonic_s)
        events += seen.events
    for runner in runners:
        runner.close()
    return TickFrame(now_s(), BETWEEN_S, seen, tuple(events), tuple(runner.standing() for runner in runners), 1)


def repaired_s(folder: Path) -> float:
    """Return when an operator declared the host repaired, Unix seconds; 0: never."""
    try:
        return (folder / REPAIRED_FILE).stat().st_mtime
    except OSError:
        return 0.0


SOURCES = ("nvml", "kernel_log", "fabric", "mounts")  # collectors without which the host cannot be called healthy
REASONS_MAX = 16
TEXT_CHARS_MAX = 200

State = Literal["healthy", "sick", "cannot_tell"]

# No tool exits with 3 on its own failure: not a shell that finds no command, a kill, wrong usage or a crash. So a
# prolog that acts only on 3 fails open.
EXIT_CODES: Mapping[State, int] = MappingProxyType({"healthy": 0, "cannot_tell": 1, "sick": 3})

# Memory errors that the driver counts until the GPU is reset: a counter of 0 means that it was reset.
_COUNTED = frozenset({"XID 48", "XID 95", "XID 140"})
_REPAIRS: Mapping[Repair, str] = MappingProxyType(
    {"reset_gpu": "a GPU reset", "reboot": "a reboot", "replace": "a replacement", "inspect": "an inspection"}
)
# Kinds of facts that ask for no repair and yet are no program's: people are told, the next job is not refused.
_NOTED = frozenset({"part", "symptom", "contained", "remap", "nvlink", "power", "watch"})
_OF_NO_GPU = frozenset({"part", "symptom", "switch"})


class HostVerdict(NamedTuple):
    """``reasons``: what makes the host sick. ``unseen``: what could not be checked, and why.

    ``judged``: what the verdict rests on, each with what was looked for. ``noted``: what was found and is no reason.
    """

    state: State
    reasons: tuple[str, ...]
    unseen: tuple[str, ...]
    judged: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()


def judge(tick: TickFrame, gpus_expected: int | None = None, repaired_s: float = 0.0) -> HostVerdict:
    """Return the verdict on one tick of an agent that has read the kernel log from boot.

    ``gpus_expected``: how many GPUs the host should have; None: unknown, 0: none, so they are not checked.
    ``repaired_s``: Unix seconds; an operator declared everything before it repaired.
    """
    events = sorted((event for event in tick.events if event.time_s >= repaired_s), key=lambda event: event.time_s)
    standing, noted = _facts(tick, events)
    reasons = [
        *_gpus(tick, gpus_expected),
        *standing,
        *_links(tick),
        *_mounts(tick),
        *_panics(events),
    ]
    unseen = tuple(_unseen(tick, gpus_expected))
    state: State = "sick" if reasons else "cannot_tell" if unseen else "healthy"
    judged_by = tuple(_judged(tick, gpus_expected, events))
    return HostVerdict(state, tuple(reasons[:REASONS_MAX]), unseen, judged_by, tuple(noted[:REASONS_MAX]))


def healthy(verdict: HostVerdict) -> str:
    """Return what a healthy verdict says for people: what it rests on, and nothing else."""
    return f"nothing stands against this host; judged: {'; '.join(verdict.judged)}"


def lines(verdict: HostVerdict) -> tuple[list[str], list[str]]:
    """Return the text for people: the verdict, and what could not be checked."""
    reported = [f"sick: {reason}" for reason in verdict.reasons]
    if verdict.state == "healthy":
        reported = [f"healthy: {healthy(verdict)}"]
    reported += [f"noted: {told}" for told in verdict.noted]
    return reported, [f"could not check: {text}" for text in verdict.unseen]


def _gpus(tick: TickFrame, expected: int | None) -> Iterator[str]:
    gpus = _gpu_rows(tick)
    if expected is not None and len(gpus) < expected and _state(tick, "nvml") == "ok":
        yield f"NVML shows {len(gpus)} of {expected} GPUs"
    for device, row in sorted(gpus.items()):
        if row.get("gpu_remap_pending", 0.0) > 0.0:
            yield f"{_gpu(device)}: a row remap waits for a GPU reset"
        if (errors := row.get("gpu_ecc_uncorrected_total", 0.0)) > 0.0:
            yield f"{_gpu(device)}: {errors:.0f} uncorrectable memory errors since its last reset; reset the GPU"


class _Place(NamedTuple):
    """What a fact is about: a GPU by its row, or by its address where NVML does not know it; else a part of the host.

    ``name`` "" without a row: one that the line does not name.
    """

    device: int
    name: str
    of_gpu: bool

    @property
    def is_named(self) -> bool:
        """Whether it is known which GPU, or part of the host."""
        return self.device != WHOLE_NODE or bool(self.name)

    def __str__(self) -> str:
        if not self.of_gpu:
            return self.name or "the host"
        if self.device != WHOLE_NODE:
            return _gpu(self.device)
        return f"GPU {self.name.removeprefix('gpu ')}" if self.name else "a GPU that the line does not name"


def _facts(tick: TickFrame, events: Sequence[Event]) -> tuple[list[str], list[str]]:
    """Return what asks for a repair, and what is only noted, unless drivers or counters show that it was done.

    ``events``: oldest first. Of a GPU that is named the last fact counts, and what its driver says overrides it.
    """
    standing: dict[tuple[_Place, str], str] = {}
    noted: dict[tuple[_Place, str], str] = {}
    repaired = set()
    for event in events:
        told = judged(event.kind, event.attributes, event.device)
        if told is None:
            continue
        place = _place(event, of_gpu=told.fact.kind not in _OF_NO_GPU)
        said = f"at {_at(event)}: {_printable(str(event.attributes.get('text', '')))}"
        key = (place, "" if place.of_gpu and place.is_named else told.fact.name)
        if told.recovery == "none" or told.fact.name == GPU_REPAIRED:
            repaired.add(place.device)
            for known in [known for known in standing if known[0] == place]:
                noted[known] = f"{standing.pop(known)}; repaired since"
        elif told.repair != "none":
            counted = tick.seen.devices.get(event.device, {}).get("gpu_ecc_uncorrected_total", math.nan)
            if told.fact.name not in _COUNTED or counted != 0.0:
                standing[key] = f"{place}: {told.fact.said}; it needs {_REPAIRS[told.repair]}, {said}"
        elif told.fact.kind in _NOTED and told.fatal:
            noted[place, told.fact.name] = f"{place}: {told.fact.said}, {said}"
    if (gpus := _gpu_rows(tick)) and repaired >= gpus.keys():
        # Whichever GPU a line was about that names none: none asks for anything.
        standing = {key: text for key, text in standing.items() if not key[0].of_gpu or key[0].is_named}
    return list(standing.values()), list(noted.values())


def _place(event: Event, *, of_gpu: bool) -> _Place:
    if event.device != WHOLE_NODE:
        return _Place(event.device, "", of_gpu)
    text = str(event.attributes.get("text", ""))
    # The log names a GPU unknown to NVML, or a switch, by its address: before the first comma, or the first colon.
    if event.kind == "xid":
        return _Place(
            WHOLE_NODE, text.partition(",")[0].removeprefix("PCI:") if text.startswith("PCI:") else "", of_gpu
        )
    name = text.partition(" ")[0] if event.kind == "sxid" else str(event.attributes.get("device", ""))
    return _Place(WHOLE_NODE, _printable(name), of_gpu)


def _at(event: Event) -> str:
    return f"{datetime.fromtimestamp(event.time_s, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


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


def _unseen(tick: TickFrame, expected: int | None) -> Iterator[str]:
    for source in SOURCES:
        state = _state(tick, source)
        reported = source == "mounts" and tick.seen.node.get("node_mounts_unresponsive", 0.0) > 0.0
        if state != "ok" and not reported and not (source == "nvml" and expected == 0):
            yield f"{source}: {_printable(state)}"


def _judged(tick: TickFrame, expected: int | None, events: Sequence[Event]) -> Iterator[str]:
    """Yield what the verdict rests on, of the sources that answered in full."""
    if expected != 0 and _state(tick, "nvml") == "ok":
        gpus = _gpu_rows(tick)
        asked = {
            event.device for event in events if event.kind == "host_error"
        }  # those whose driver says what it asks for
        looked = ["lost", *(["missing"] if expected is not None else [])]
        looked += ["the driver's recovery action"] if gpus and asked >= gpus.keys() else []
        for metric, named in _READ_OF_GPUS:
            looked += [named] if gpus and all(metric in row for row in gpus.values()) else []
        yield f"{len(gpus)} GPU{'s' * (len(gpus) != 1)} by NVML ({', '.join(looked)})"
    if _state(tick, "kernel_log") == "ok":
        since_s = tick.seen.read_since_s
        since = f"{datetime.fromtimestamp(since_s, timezone.utc):%Y-%m-%dT%H:%M:%SZ}" if since_s else "boot"
        yield (
            f"the kernel's log since {since}"
            " (XIDs, SXIDs, machine checks, GPUs that are lost, broken, to be reset or could not be brought up)"
        )
    if _state(tick, "fabric") == "ok":
        ports = sum("link_up" in row for row in tick.seen.links.values())
        yield f"{ports} network port{'s' * (ports != 1)} (down)" if ports else "no network port"
    if _state(tick, "mounts") == "ok":
        yield "network filesystems (that do not answer)"


_READ_OF_GPUS = (
    ("gpu_remap_pending", "row remaps that wait"),
    ("gpu_ecc_uncorrected_total", "uncorrectable memory errors"),
)


def _gpu_rows(tick: TickFrame) -> dict[int, dict[str, float]]:
    return {device: row for device, row in tick.seen.devices.items() if any(name.startswith("gpu_") for name in row)}


def _state(tick: TickFrame, name: str) -> str:
    return next((standing.state for standing in tick.collectors if standing.name == name), "not asked")


def _gpu(device: int) -> str:
    return f"gpu {device}"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text[:TEXT_CHARS_MAX])
