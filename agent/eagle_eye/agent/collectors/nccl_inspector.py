"""Reads NCCL Inspector's output: each rank's progress through collectives, their duration and bandwidth.

Touches: the Inspector's files, /proc.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from eagle_eye.agent.collector import Drops, Observed
from eagle_eye.agent.foreign_files import OWN_ROOT, GrowingFile, NotTheirs, open_file, shown, stat_of
from eagle_eye.agent.processes.process_files import Environments, ProcessEnvironment, root_of
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses

# Parses NCCL Inspector's lines about finished collectives, and aggregates them per interval.
#
# Formats v4.0 to v4.2 (NCCL 2.28 and later, RCCL). ``coll_sn`` counts the collectives of one kind on one communicator.
# Older builds write only each communicator's last finished collective at each dump, newer ones every collective of at
# least NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES: a line is a sample, never proof that nothing else ran.
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


def parse_inspector(raw: bytes) -> tuple[list[InspectorLine], int]:
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


# Finds each rank's files and reads what is new in them.
LINES_PER_COLLECT_MAX = 64  # per rank: 8 ranks then cost below 0.2% of a core
BYTES_PER_COLLECT_MAX = 131_072  # a line is 500 bytes, with traces up to 25,000
FILES_MAX = 64  # ranks per node
FOLDER_ENTRIES_MAX = 10_000  # of a folder that all hosts of a large job share
FOLDERS_EVERY_S = 10.0  # how often folders are listed
EXCHANGED_EVERY_S = 10.0  # how often an open log is checked for having been replaced under its name
METRICS_EVERY_S = 5.0  # the Inspector rewrites its Prometheus files every 30 s at most

_OFF = ("", "0", "false", "off", "no")
_LOG = re.compile(r"(?P<host>.{1,255})-pid(?P<pid>[0-9]{1,9})\.log")


class _Place(NamedTuple):
    """Path of a log or metrics file that exists or may appear, the folder no link may lead out of, and its owner.

    ``user`` None: unknown.
    """

    path: Path
    root: Path = OWN_ROOT
    user: int | None = None


@dataclass
class _Log:
    """One rank's log, and what is known from it. ``tail`` None: not opened."""

    process: TrainingProcess
    place: _Place
    tail: GrowingFile | None = None
    asked_s: float = 0.0  # when its path was last resolved
    tally: CollectiveTotals = field(default_factory=CollectiveTotals)
    new: bool = False  # whether its contents were written while this agent was watching
    row: dict[str, float] = field(default_factory=dict)
    step: float | None = None  # the newest when summing of collective time began
    collective_s: float | None = 0.0  # since then; None: some were missed


class NcclInspectorCollector:
    """Rows of the ranks whose processes run with NCCL Inspector; other ranks have none.

    Each process's environment says where its files are; ``folders`` are also searched for logs of this host's
    processes. Means are over the lines of the interval and repeat while none arrive. Where an interval's output exceeds
    LINES_PER_COLLECT_MAX or BYTES_PER_COLLECT_MAX, the newest part is read and the rest counted as
    ``nccl_inspector_skipped_bytes``; lines that are not JSON as ``nccl_inspector_malformed``, those not timed by the
    kernel as ``nccl_inspector_untimed``, those beyond the limits as ``nccl_inspector_beyond``, files that may not be
    read as ``nccl_inspector_refused``.

    Cannot see: collectives in flight, so the number enqueued is unknown; which rank waited for which, since a
    collective's time includes the wait for the last rank (the rank that arrives last shows the shortest time).
    """

    name = "nccl_inspector"

    def __init__(
        self,
        processes: TrainingProcesses,
        drops: Drops,
        folders: Sequence[Path] = (),
        devices_by_uuid: Mapping[str, int] | None = None,
        steps: Callable[[TrainingProcess], float | None] = lambda _process: None,
        *,
        proc: Path = Path("/proc"),
        hostname: str = "",
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``steps`` returns a process's newest finished training step: time in collectives is reported per step.

        ``devices_by_uuid`` may be filled later, by the GPU collector.
        """
        self._processes = processes
        self._drops = drops
        self._folders = tuple(folders)
        self._devices_by_uuid = {} if devices_by_uuid is None else devices_by_uuid
        self._steps = steps
        self._environments = Environments(proc)
        self._hostname = hostname or socket.gethostname()
        self._monotonic_s = monotonic_s
        self._logs: dict[_Place, _Log] = {}
        self._listed: dict[Path, TrainingProcess] = {}
        self._listed_s = -FOLDERS_EVERY_S
        self._metrics_s = -METRICS_EVERY_S
        self._metrics_seen: dict[_Place, tuple[int, int]] = {}

    def collect(self, now_s: float) -> Observed:  # noqa: ARG002 - what a file tells is of the interval that ends now
        """Return the rows of this node's ranks; none where no process runs with the Inspector."""
        processes = self._processes.all()
        environments = self._environments.of(processes)
        problems = [] if self._folders else [self._environments.problem()]
        observed = Observed()
        self._watch(self._places(processes, environments, problems))
        for log in self._logs.values():
            problems.append(self._read(log))
            if log.row:
                observed.devices.setdefault(log.process.device, {}).update(log.row)
        monotonic_s = self._monotonic_s()
        if monotonic_s - self._metrics_s >= METRICS_EVERY_S:
            self._metrics_s = monotonic_s
            for device, bandwidth in self._metrics(environments, problems).items():
                observed.devices.setdefault(device, {}).setdefault("nccl_bus_bandwidth_bytes_per_second", bandwidth)
        observed.problem = "; ".join(dict.fromkeys(text for text in problems if text))
        return observed

    def tells_of(self, device: int) -> bool:
        """Whether a device's sequence comes from here: numbers from another source would not be comparable with it."""
        return any(log.process.device == device and log.row for log in list(self._logs.values()))

    def close(self) -> None:
        """Close the logs."""
        for log in self._logs.values():
            _let_go(log)
        self._logs.clear()

    def _places(
        self,
        processes: Sequence[TrainingProcess],
        environments: Mapping[TrainingProcess, ProcessEnvironment],
        problems: list[str],
    ) -> dict[_Place, TrainingProcess]:
        """Return the paths of existing or expected logs, and the process each belongs to."""
        found: dict[_Place, TrainingProcess] = {}
        for process, environment in environments.items():
            if environment.first("NCCL_INSPECTOR_ENABLE").lower() in _OFF:
                continue
            folder = environment.path(_dump_folder(environment))
            for host in dict.fromkeys((self._hostname, environment.first("HOSTNAME"))):
                if host and "/" not in host:
                    path = folder / f"{host}-pid{environment.own_pid}.log"
                    found[_Place(path, root_of(path, environment), environment.uid)] = process
        monotonic_s = self._monotonic_s()
        if self._folders and monotonic_s - self._listed_s >= FOLDERS_EVERY_S:
            self._listed_s = monotonic_s
            self._listed = self._list(processes, problems)
        named = {place.path for place in found}
        for path, process in self._listed.items():
            if path not in named:
                known = environments.get(process)
                found[_Place(path, user=known.uid if known is not None else None)] = process
        return found

    def _list(self, processes: Sequence[TrainingProcess], problems: list[str]) -> dict[Path, TrainingProcess]:
        by_pid = {process.pid: process for process in processes}
        found: dict[Path, TrainingProcess] = {}
        for folder in self._folders:
            try:
                with os.scandir(folder) as entries:
                    for number, entry in enumerate(entries):
                        if number >= FOLDER_ENTRIES_MAX:
                            problems.append(f"{folder}: more than {FOLDER_ENTRIES_MAX} entries; give each job its own")
                            break
                        match = _LOG.fullmatch(entry.name)
                        if match is not None and match["host"] == self._hostname and int(match["pid"]) in by_pid:
                            found[Path(entry.path)] = by_pid[int(match["pid"])]
            except FileNotFoundError:
                continue  # no job has created it yet
            except OSError as error:
                problems.append(f"{folder}: {error.strerror or error}")
        return found

    def _watch(self, places: Mapping[_Place, TrainingProcess]) -> None:
        for place in [place for place, log in self._logs.items() if log.process != places.get(place)]:
            _let_go(self._logs.pop(place))
        for place, process in places.items():
            if place not in self._logs:
                if len(self._logs) >= FILES_MAX:
                    self._drops.count("nccl_inspector_beyond")
                    return
                self._logs[place] = _Log(process, place)

    def _read(self, log: _Log) -> str:
        """Read new lines and update the log's row; return why it cannot be read, or ""."""
        try:
            tail = log.tail = log.tail or GrowingFile(open_file(*log.place))
            raw = tail.read(BYTES_PER_COLLECT_MAX)
            self._let_go_of_exchanged(log)
        except FileNotFoundError:
            log.new = True
            return ""  # the Inspector has written nothing yet; by default it writes only at exit
        except NotTheirs as error:
            self._drops.count("nccl_inspector_refused")
            return str(error)
        except OSError as error:
            _let_go(log)
            return f"{shown(log.place.path)}: {error.strerror or error}"
        newest = _newest_lines(raw)
        skipped = tail.skipped_bytes + len(raw) - len(newest)
        lines, malformed = parse_inspector(newest)
        tally = log.tally
        reported = tally.add(lines)
        for reason, count in (
            ("malformed", malformed),
            ("skipped_bytes", skipped),
            ("untimed", tally.untimed),
            ("beyond", tally.beyond),
        ):
            self._drops.count(f"nccl_inspector_{reason}", count)
        tally.untimed = tally.beyond = 0
        if reported and log.new:
            log.row.update(tally.row())
        log.new = True  # the existing content may belong to an earlier process with this pid; what comes now does not
        if reported or skipped:
            spent_s = None if skipped else tally.collective_s()
            log.collective_s = None if spent_s is None or log.collective_s is None else log.collective_s + spent_s
        tally.begin()
        self._by_step(log)
        return ""

    def _let_go_of_exchanged(self, log: _Log) -> None:
        """Close a log that was read to its end and whose name now leads to another file."""
        monotonic_s = self._monotonic_s()
        if log.tail is not None and monotonic_s - log.asked_s >= EXCHANGED_EVERY_S:
            log.asked_s = monotonic_s
            try:
                found = stat_of(log.place.path, log.place.root)
            except OSError:
                return  # removed or hidden: its process may still write to it
            if log.tail.identity != (found.st_dev, found.st_ino):
                _let_go(log)

    def _by_step(self, log: _Log) -> None:
        """Where steps have finished, report the fraction spent in collectives, and start over."""
        step = self._steps(log.process)
        if step is None or step == log.step:
            return
        finished = step - log.step if log.step is not None else 0.0
        if finished > 0 and log.collective_s is not None:
            log.row["nccl_collective_seconds"] = log.collective_s / finished
        else:
            log.row.pop("nccl_collective_seconds", None)
        log.step, log.collective_s = step, 0.0

    def _metrics(
        self, environments: Mapping[TrainingProcess, ProcessEnvironment], problems: list[str]
    ) -> dict[int, float]:
        """Return bus bandwidths by device from Prometheus files that have changed."""
        devices = dict(list(self._devices_by_uuid.items())[:FILES_MAX])
        folders = [(_Place(folder), devices) for folder in self._folders]
        for process, environment in environments.items():
            if environment.first("NCCL_INSPECTOR_PROM_DUMP").lower() not in _OFF:
                folder = environment.path(_dump_folder(environment))
                own = {uuid: device for uuid, device in devices.items() if device == process.device}
                folders.append((_Place(folder, root_of(folder, environment), environment.uid), own))
        found: dict[int, float] = {}
        asked = set()
        for place, of_gpus in folders:
            for uuid, device in of_gpus.items():
                for spelt in dict.fromkeys((uuid, uuid.removeprefix("GPU-"))):
                    file = place._replace(path=place.path / f"nccl_inspector_metrics_{spelt}.prom")
                    asked.add(file)
                    bandwidth = self._bandwidth(file, problems)
                    if bandwidth is not None:
                        found[device] = bandwidth
        self._metrics_seen = {file: stamp for file, stamp in self._metrics_seen.items() if file in asked}
        return found

    def _bandwidth(self, place: _Place, problems: list[str]) -> float | None:
        """Return the file's bandwidth; None where it is missing, unchanged or has no usable value."""
        try:
            descriptor = open_file(*place)
        except NotTheirs as error:
            self._drops.count("nccl_inspector_refused")
            problems.append(str(error))
            return None
        except OSError:
            return None  # most GPUs in most folders have none
        try:
            said = os.fstat(descriptor)
            stamp = (said.st_mtime_ns, said.st_size)
            known, self._metrics_seen[place] = self._metrics_seen.get(place), stamp
            if stamp == known or known is None:  # a file older than the agent may belong to a job long gone
                return None
            raw = os.pread(descriptor, FILE_BYTES_MAX, 0)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return bus_bandwidth(raw.decode("utf-8", errors="replace"))


def _let_go(log: _Log) -> None:
    if log.tail is not None:
        log.tail.close()
        log.tail = None


def _newest_lines(raw: bytes) -> bytes:
    """Return the last LINES_PER_COLLECT_MAX complete lines."""
    if raw.count(b"\n") <= LINES_PER_COLLECT_MAX:
        return raw
    older = raw.rsplit(b"\n", LINES_PER_COLLECT_MAX + 1)[0]
    return raw[len(older) + 1 :]


def _dump_folder(environment: ProcessEnvironment) -> str:
    """Return the folder that the Inspector writes to, relative to the process's initial working directory."""
    job = environment.first("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID") or "unknown-jobid"
    return environment.first("NCCL_INSPECTOR_DUMP_DIR") or f"nccl-inspector-{job}"
