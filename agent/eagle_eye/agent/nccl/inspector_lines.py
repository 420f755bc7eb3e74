"""Parses NCCL Inspector's lines about finished collectives, and aggregates them per interval. Pure.

Formats v4.0 to v4.2 (NCCL 2.28 and later, RCCL). ``coll_sn`` counts the collectives of one kind on one communicator.
Older builds write only each communicator's last finished collective at each dump, newer ones every collective of at
least NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES: a line is a sample, never proof that nothing else ran.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

FILE_BYTES_MAX = 1 << 20  # a communicator has about 3 KB
LINES_MAX = 4_096

_BANDWIDTH = re.compile(r"nccl_bus_bandwidth_gbs\{([^}]{0,2000})\}\s+([0-9.eE+-]{1,32})(?:\s|$)")
_RANKS = re.compile(r'\bn_?ranks="([0-9]{1,9})"')


def bus_bandwidth(text: str) -> float | None:
    """Return the mean bus bandwidth of the widest communicator's collectives, bytes per second; None: absent."""
    by_ranks: dict[int, list[float]] = {}
    for line in text.splitlines()[:LINES_MAX]:
        match = _BANDWIDTH.match(line)
        if match is None:
            continue
        ranks = _RANKS.search(match[1])
        try:
            value = float(match[2])
        except ValueError:
            continue
        if math.isfinite(value) and 0.0 < value < 1e6:
            by_ranks.setdefault(int(ranks[1]) if ranks is not None else 0, []).append(value)
    if not by_ranks:
        return None
    widest = by_ranks[max(by_ranks)]
    return sum(widest) / len(widest) * BYTES_PER_GIGABYTE


COMMUNICATORS_MAX = 256  # per process: large models use about ten
KINDS_MAX = 16  # kinds of collective; NCCL has eight
NAME_CHARS_MAX = 64  # of a kind, or of a communicator's id
IDLE_INTERVALS_MAX = 600  # then a communicator is forgotten: programs create new ones and destroy old ones
SEQUENCE_MAX = 1 << 53  # exact in the wire's float64
SECONDS_MAX = 86_400.0  # no collective takes a day
BYTES_PER_GIGABYTE = 1e9  # NCCL's GB/s are decimal
WHOLE_RATIO = 0.75  # of a kind's collectives; the rest may be small ones, which the Inspector omits

REDUCE_SCATTER = "ReduceScatter"
# Times of the kernel itself, by the GPU's clock or as the CPU saw it. Host time around a launch is meaningless.
_KERNEL_TIMINGS = frozenset({"kernel_gpu", "kernel_cpu"})


class InspectorHeader(msgspec.Struct, gc=False):
    """The communicator, and its size."""

    id: str | int = ""
    n_ranks: int = 0


class Collective(msgspec.Struct, gc=False):
    """One finished collective; ``coll_exec_time_us`` includes the wait for the last rank to arrive."""

    coll: str = ""
    coll_sn: int = -1
    coll_exec_time_us: float = math.nan
    coll_timing_source: str = ""
    coll_busbw_gbs: float = math.nan


class InspectorLine(msgspec.Struct, gc=False):
    """One line; those of point-to-point operations and of the Inspector itself have no ``coll_perf``."""

    header: InspectorHeader | None = None
    coll_perf: Collective | None = None


_decoder = msgspec.json.Decoder(InspectorLine)


def parse(raw: bytes) -> tuple[list[InspectorLine], int]:
    """Parse whole lines; return the records, and how many lines were invalid. Never raises."""
    try:
        return _decoder.decode_lines(raw), 0
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # one bad line fails them all: parse them one by one
    lines, malformed = [], 0
    for text in raw.split(b"\n"):
        if text.strip():
            try:
                lines.append(_decoder.decode(text))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                malformed += 1
    return lines, malformed


@dataclass
class _Kind:
    """The collectives of one kind on one communicator, in this interval."""

    newest: int = -1
    before: int = -1  # the newest of the last interval; -1: none
    seen: int = 0
    timed: int = 0
    seconds: float = 0.0
    weighted_bandwidth: float = 0.0  # GB/s times seconds
    weighed_s: float = 0.0

    def begin(self) -> None:
        self.before = self.newest
        self.seen = self.timed = 0
        self.seconds = self.weighted_bandwidth = self.weighed_s = 0.0

    @property
    def whole(self) -> bool:
        """Whether the interval's lines cover nearly all its collectives."""
        ran = self.newest - self.before
        return self.timed == self.seen and self.before >= 0 and self.seen >= WHOLE_RATIO * ran


@dataclass
class _Communicator:
    ranks: int
    idle_intervals: int = 0
    kinds: dict[str, _Kind] = field(default_factory=dict)


class CollectiveTotals:
    """One process's collectives, aggregated line by line.

    ``untimed`` counts lines not timed by the kernel, ``beyond`` lines beyond the limits or out of range.
    """

    def __init__(self) -> None:
        self.untimed = 0
        self.beyond = 0
        self._communicators: dict[str, _Communicator] = {}

    def add(self, lines: Sequence[InspectorLine]) -> int:
        """Add lines; return how many of them were about a collective."""
        reported = 0
        for line in lines:
            header, said = line.header, line.coll_perf
            if header is None or said is None:
                continue
            kind = self._kind(header, said)
            if kind is None:
                self.beyond += 1
                continue
            reported += 1
            kind.seen += 1
            kind.newest = max(kind.newest, said.coll_sn)
            seconds = said.coll_exec_time_us / 1e6
            if said.coll_timing_source not in _KERNEL_TIMINGS or not 0.0 <= seconds <= SECONDS_MAX:
                self.untimed += 1
                continue
            kind.timed += 1
            kind.seconds += seconds
            if 0.0 < said.coll_busbw_gbs < 1e6:
                kind.weighted_bandwidth += said.coll_busbw_gbs * seconds
                kind.weighed_s += seconds
        return reported

    def _kind(self, header: InspectorHeader, said: Collective) -> _Kind | None:
        name = str(header.id)
        if not 0 <= said.coll_sn < SEQUENCE_MAX or not 1 <= header.n_ranks < SEQUENCE_MAX:
            return None
        if max(len(name), len(said.coll)) > NAME_CHARS_MAX:
            return None
        communicator = self._communicators.get(name)
        if communicator is None:
            if len(self._communicators) >= COMMUNICATORS_MAX:
                return None
            communicator = self._communicators[name] = _Communicator(header.n_ranks)
        communicator.idle_intervals = 0
        kind = communicator.kinds.get(said.coll)
        if kind is None:
            if len(communicator.kinds) >= KINDS_MAX:
                return None
            kind = communicator.kinds[said.coll] = _Kind()
        return kind

    def row(self) -> dict[str, float]:
        """Return the interval's metrics; {} where no collective was seen.

        The sequence is the highest of any kind on the widest communicator. It covers completed collectives only: the
        Inspector does not report those in flight.
        """
        row: dict[str, float] = {}
        if not self._communicators:
            return row
        # Of several equally wide ones, choose the same on every rank: all ranks know a communicator by the same id.
        _, widest = max(self._communicators.items(), key=lambda item: (item[1].ranks, item[0]))
        if any(kind.seen for kind in widest.kinds.values()):
            row["nccl_completed_sequence"] = float(max(kind.newest for kind in widest.kinds.values()))
        scatters = self._widest_with(REDUCE_SCATTER)
        if scatters is not None:
            row["nccl_reduce_scatter_seconds"] = scatters.seconds / scatters.timed
        kinds = list(widest.kinds.values())
        weighed_s = sum(kind.weighed_s for kind in kinds)
        if weighed_s > 0.0:
            mean = sum(kind.weighted_bandwidth for kind in kinds) / weighed_s
            row["nccl_bus_bandwidth_bytes_per_second"] = mean * BYTES_PER_GIGABYTE
        return row

    def collective_s(self) -> float | None:
        """Return the kernel time in the interval's collectives; None where many of them were missed."""
        seen = [kind for item in self._communicators.values() for kind in item.kinds.values() if kind.seen]
        return sum(kind.seconds for kind in seen) if seen and all(kind.whole for kind in seen) else None

    def begin(self) -> None:
        """Start the next interval."""
        for name, communicator in list(self._communicators.items()):
            communicator.idle_intervals += 1
            if communicator.idle_intervals > IDLE_INTERVALS_MAX:
                del self._communicators[name]
            for kind in communicator.kinds.values():
                kind.begin()

    def _widest_with(self, name: str) -> _Kind | None:
        """Return the kind on the widest communicator that ran it: that one spans all nodes."""
        found = [
            (communicator.ranks, communicator_id, kind)
            for communicator_id, communicator in self._communicators.items()
            if (kind := communicator.kinds.get(name)) is not None and kind.timed
        ]
        return max(found, key=lambda item: item[:2])[2] if found else None
