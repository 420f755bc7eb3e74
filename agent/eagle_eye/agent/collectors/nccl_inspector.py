"""Reads NCCL Inspector's output: each rank's progress through collectives, their duration and bandwidth.

Touches: the Inspector's files, /proc.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eagle_eye.agent.files.foreign import OWN_ROOT, GrowingFile, NotTheirs, open_file, shown, stat_of
from eagle_eye.agent.loop.collector import Drops, Observed
from eagle_eye.agent.nccl.inspector_lines import FILE_BYTES_MAX, CollectiveTotals, bus_bandwidth, parse
from eagle_eye.agent.nccl.process_environment import Environments, ProcessEnvironment, root_of
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses

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
        lines, malformed = parse(newest)
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
