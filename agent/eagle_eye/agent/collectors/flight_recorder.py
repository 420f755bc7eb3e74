"""Reads PyTorch flight-recorder dumps of this node's ranks as they appear. Touches: the dump files, /proc."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_eye.agent.files.foreign import NotTheirs, open_file, shown
from eagle_eye.agent.loop.collector import Drops, Observed
from eagle_eye.agent.nccl.flight_dump import (
    DUMP_BYTES_MAX,
    DumpRequest,
    FlightDump,
    Stamp,
    dump_paths,
    read,
    request_dumps,
    stamp_of,
)
from eagle_eye.agent.nccl.process_environment import Environments, root_of
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.schema.flight_recorder import BadDump

FRESH_S = 60.0  # a dump that predates the agent counts as new if it is not older than this
DEPARTED_KEPT_S = 300.0  # a rank that dumps on a timeout exits soon after: its dump is still read, and kept
PATHS_MAX = 512  # watched paths: four for each of 64 ranks, twice over where a job has just restarted
DUMPS_KEPT = 128
READ_PER_COLLECT_MAX = 1  # a dump takes up to half a second of one core


@dataclass
class _Watched:
    """A path where a dump may appear; ``seen`` is the file's stamp when last looked at, ``read`` when last read.

    No link on the path leads out of ``root``. ``refused``: the path is not a regular file.
    """

    process: TrainingProcess
    root: Path
    uid: int | None
    present_s: float  # monotonic: when its process was last seen
    seen: Stamp | None = None
    read: Stamp | None = None
    looked: bool = False
    refused: bool = False


@dataclass(frozen=True)
class RankDump:
    """A rank's newest dump: when it was written (Unix seconds, the file's clock) and its contents."""

    process: TrainingProcess
    written_s: float
    dump: FlightDump


class FlightRecorderCollector:
    """Sequences from dumps, only in the collection after a dump was written: an old dump is not progress.

    Looks where each process's environment says, at PyTorch's defaults, and at ``prefixes`` with the rank appended.
    ``dumps`` returns each rank's newest dump for evidence; ``request`` asks for new ones. A dump that cannot be read is
    counted as ``flight_recorder_bad``, one beyond DUMP_BYTES_MAX as ``flight_recorder_oversized``, a file not owned by
    the process's user as ``flight_recorder_refused``, operations left out of what is kept as
    ``flight_recorder_operations_left_out``.

    Cannot see: disabled recorders (TORCH_FR_BUFFER_SIZE is 0 in many programs), dumps in a container's own files once
    the container is gone, and which job a dump belongs to where two jobs of one user write to the same default path.
    """

    name = "flight_recorder"

    def __init__(
        self,
        processes: TrainingProcesses,
        drops: Drops,
        prefixes: Sequence[str] = (),
        pipe_prefixes: Sequence[str] = (),
        *,
        taken: Callable[[int], bool] = lambda _device: False,
        proc: Path = Path("/proc"),
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``taken`` says whether another source reports a device's sequences: the two are not comparable."""
        self._processes = processes
        self._drops = drops
        self._prefixes = tuple(prefixes)
        self._pipe_prefixes = tuple(pipe_prefixes)
        self._taken = taken
        self._proc = proc
        self._environments = Environments(proc)
        self._monotonic_s = monotonic_s
        self._watched: dict[Path, _Watched] = {}
        self._lock = threading.Lock()
        self._dumps: dict[tuple[str, int], RankDump] = {}

    def collect(self, now_s: float) -> Observed:
        """Return the sequences found in new dumps."""
        observed = Observed()
        monotonic_s = self._monotonic_s()
        self._watch(monotonic_s)
        problems = [] if self._prefixes else [self._environments.problem()]
        read = 0
        for path, place in self._watched.items():
            stamp = self._stamp(path, place, problems)
            if not place.looked:
                place.looked = True
                if stamp is not None and abs(now_s - stamp[2] / 1e9) > FRESH_S:
                    place.read = stamp  # left by an earlier job
            settled = stamp is not None and stamp == place.seen and stamp[1] > 0  # it is written in place
            place.seen = stamp
            if stamp is None or stamp == place.read or not settled:
                continue
            if read >= READ_PER_COLLECT_MAX:
                continue  # at the next collection
            read += 1
            place.read = stamp
            problems.append(self._take(path, place, stamp, monotonic_s, observed))
        observed.problem = "; ".join(text for text in problems if text)
        return observed

    def dumps(self) -> list[RankDump]:
        """Return each rank's newest dump; thread-safe."""
        with self._lock:
            return list(self._dumps.values())

    def request(self, deadline_s: float) -> DumpRequest:
        """Ask this node's ranks for dumps now and wait for them; thread-safe.

        The next collections read what they write; it is then in ``dumps``.
        """
        processes = self._processes.all()
        environments = Environments(self._proc)
        return request_dumps(
            processes, deadline_s, environments, self._prefixes, self._pipe_prefixes, drops=self._drops
        )

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _watch(self, monotonic_s: float) -> None:
        processes = self._processes.all()
        environments = self._environments.of(processes)
        for process in processes:
            environment = environments.get(process)
            uid = environment.uid if environment is not None else None
            for path in dump_paths(process, environment, self._prefixes):
                place = self._watched.get(path)
                if place is not None:
                    place.process, place.present_s = process, monotonic_s
                    place.uid = uid if uid is not None else place.uid
                elif len(self._watched) < PATHS_MAX:
                    self._watched[path] = _Watched(process, root_of(path, environment), uid, monotonic_s)
                else:
                    self._drops.count("flight_recorder_beyond")
        for path in [p for p, place in self._watched.items() if monotonic_s - place.present_s > DEPARTED_KEPT_S]:
            del self._watched[path]

    def _stamp(self, path: Path, place: _Watched, problems: list[str]) -> Stamp | None:
        try:
            stamp = stamp_of(path, place.root)
        except NotTheirs as error:
            problems.append(str(error))
            self._drops.count("flight_recorder_refused", 0 if place.refused else 1)
            place.refused = True
            return None
        place.refused = False
        return stamp

    def _take(self, path: Path, place: _Watched, stamp: Stamp, monotonic_s: float, observed: Observed) -> str:
        """Read a dump into the row and the store; return why it cannot be read, or ""."""
        process = place.process
        try:
            dump = read(_content(path, place), process.rank)
        except BadDump as error:
            self._drops.count("flight_recorder_oversized" if stamp[1] > DUMP_BYTES_MAX else "flight_recorder_bad")
            return f"{shown(path)}: {error}"
        except NotTheirs as error:
            self._drops.count("flight_recorder_refused")
            return str(error)
        except OSError as error:
            return f"{shown(path)}: {error.strerror or error}"
        self._drops.count("flight_recorder_operations_left_out", dump.left_out)
        with self._lock:
            self._dumps.pop((process.job, process.rank), None)
            self._dumps[process.job, process.rank] = RankDump(process, stamp[2] / 1e9, dump)
            while len(self._dumps) > DUMPS_KEPT:
                del self._dumps[next(iter(self._dumps))]
        if dump.ranks not in (None, process.world_size):
            ranks = f"{dump.ranks} ranks, the job {process.world_size}"
            return f"{shown(path)}: its widest group has {ranks}: of another job?"
        if dump.enqueued is None or dump.completed is None or dump.enqueued < 0:
            return ""
        if place.present_s == monotonic_s and not self._taken(process.device):
            row = observed.devices.setdefault(process.device, {})
            row["nccl_sequence"] = float(dump.enqueued)
            row["nccl_completed_sequence"] = float(max(0, dump.completed))
        return ""


def _content(path: Path, place: _Watched) -> bytes:
    """Return a file's bytes, up to one more than the limit. Raises OSError, NotTheirs."""
    with os.fdopen(open_file(path, place.root, place.uid), "rb") as file:
        return file.read(DUMP_BYTES_MAX + 1)
