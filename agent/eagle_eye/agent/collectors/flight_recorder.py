"""Reads PyTorch flight-recorder dumps of this node's ranks as they appear. Touches: the dump files, /proc."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.agent.collector import Drops, Observed
from eagle_eye.agent.foreign_files import OWN_ROOT, NotTheirs, open_file, open_pipe, shown, stat_of
from eagle_eye.agent.processes.process_files import Environments, ProcessEnvironment, root_of
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.schema.flight_recorder import (
    COMPLETED,
    INTEGER_MAX,
    LAST_COMPLETED,
    BadDump,
    decode,
    dump_of,
    entries_of,
    group_of,
    has_completed,
    integer_of,
    mapping_of,
    names_by_id,
    sequence_of,
    status_of,
    text_of,
)

# Finds the dumps of PyTorch's flight recorder, and requests new ones. Touches: files, named pipes.
#
# A dump is requested by writing a byte to the pipe ``<TORCH_NCCL_DEBUG_INFO_PIPE_FILE><rank>.pipe``; the process then
# writes ``<prefix><rank>`` from a separate thread while training continues.
POLL_S = 0.1  # the recorder's thread checks its pipe every second
OLD_DEFAULT = "/tmp/nccl_trace_rank_"  # noqa: S108 - PyTorch before 2.7 writes there
NEW_DEFAULT = "torch/comm_lib_trace_rank_"  # in the user's cache folder

Stamp = tuple[int, int, int]  # inode, size, time of the last change in ns
_Place = tuple[Path, Path]  # a file, and the folder that no link on the way may lead out of


@dataclass(frozen=True)
class DumpRequest:
    """Which of the ranks asked have written a dump, and why the others have not."""

    answered: tuple[TrainingProcess, ...] = ()
    silent: Mapping[TrainingProcess, str] = field(default_factory=dict)


def dump_paths(process: TrainingProcess, environment: ProcessEnvironment | None, prefixes: Sequence[str]) -> list[Path]:
    """Return the paths where a rank's dump may be: from its environment, else PyTorch's defaults; plus ``prefixes``."""
    paths = [Path(f"{prefix}{process.rank}") for prefix in prefixes]
    if environment is not None:
        said = environment.first("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        cache = environment.first("XDG_CACHE_HOME") or f"{environment.first('HOME') or '/tmp'}/.cache"  # noqa: S108 - as PyTorch
        own = (said,) if said else (f"{cache}/{NEW_DEFAULT}", OLD_DEFAULT)
        paths += [environment.path(f"{prefix}{process.rank}") for prefix in own]
    return list(dict.fromkeys(paths))


def stamp_of(path: Path, root: Path = OWN_ROOT) -> Stamp | None:
    """Return a stamp that changes when a file below ``root`` is written; None where it is missing or not visible.

    Raises NotTheirs where it is something else.
    """
    try:
        found = stat_of(path, root)
    except NotTheirs:
        raise
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise NotTheirs(f"{shown(path)}: not a regular file")
    return found.st_ino, found.st_size, found.st_mtime_ns


def request_dumps(
    processes: Sequence[TrainingProcess],
    deadline_s: float,
    environments: Environments,
    prefixes: Sequence[str] = (),
    pipe_prefixes: Sequence[str] = (),
    *,
    drops: Drops | None = None,
    monotonic_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> DumpRequest:
    """Ask the ranks for dumps and wait at most ``deadline_s``; return which ranks answered.

    ``pipe_prefixes`` are tried in addition to the processes' environments. Training is not delayed: writes are
    non-blocking, and each rank dumps from a separate thread. A rank without a pipe reader was not asked; one that was
    asked and wrote nothing is stopped, stuck, or older than the pipe, which alone is no evidence against it. A path
    that is not a pipe, or not the process's own, is counted in ``drops`` as ``flight_recorder_refused``.
    """
    known = environments.of(processes)
    silent: dict[TrainingProcess, str] = {}
    waiting: dict[TrainingProcess, dict[_Place, Stamp | None]] = {}
    for process in processes:
        environment = known.get(process)
        places = [(path, root_of(path, environment)) for path in dump_paths(process, environment, prefixes)]
        before = {place: _stamp(place) for place in places}
        why_not = _ask(process, environment, pipe_prefixes, drops or Drops())
        if why_not:
            silent[process] = why_not
        elif before:
            waiting[process] = before
        else:
            silent[process] = "where it writes its dump is not known"
    answered = _await(waiting, monotonic_s() + deadline_s, monotonic_s, sleep)
    for process in waiting:
        if process not in answered:
            silent[process] = f"asked, but wrote no dump within {deadline_s:g} s"
    return DumpRequest(tuple(answered), silent)


def _ask(
    process: TrainingProcess, environment: ProcessEnvironment | None, prefixes: Sequence[str], drops: Drops
) -> str:
    """Write to the process's pipe; return why this failed, or ""."""
    paths = [Path(f"{prefix}{process.rank}.pipe") for prefix in prefixes]
    said = environment.first("TORCH_NCCL_DEBUG_INFO_PIPE_FILE") if environment is not None else ""
    if environment is not None and said:
        paths.append(environment.path(f"{said}{process.rank}.pipe"))
    why_not = "no pipe: set TORCH_NCCL_DEBUG_INFO_PIPE_FILE for the job"
    for path in dict.fromkeys(paths):
        try:
            uid = environment.uid if environment is not None else None
            descriptor = open_pipe(path, root_of(path, environment), uid)
        except NotTheirs as error:
            drops.count("flight_recorder_refused")
            why_not = str(error)
            continue
        except OSError as error:
            why_not = f"{shown(path)}: {'nobody reads it' if error.errno == errno.ENXIO else error.strerror or error}"
            continue
        try:
            os.write(descriptor, b"1")
        except OSError as error:
            full = isinstance(error, BlockingIOError)
            why_not = f"{shown(path)}: {'full: its process does not read it' if full else error.strerror or error}"
            continue
        finally:
            os.close(descriptor)
        return ""
    return why_not


def _stamp(place: _Place) -> Stamp | None:
    try:
        return stamp_of(*place)
    except NotTheirs:
        return None  # the reader of dumps reports it


def _await(
    waiting: Mapping[TrainingProcess, Mapping[_Place, Stamp | None]],
    until_s: float,
    monotonic_s: Callable[[], float],
    sleep: Callable[[float], None],
) -> list[TrainingProcess]:
    """Return the processes with a new dump file that no longer changes, as soon as all have one."""
    answered: list[TrainingProcess] = []
    last: dict[_Place, Stamp | None] = {}
    while len(answered) < len(waiting):
        for process, before in waiting.items():
            if process in answered:
                continue
            for place, old in before.items():
                stamp = _stamp(place)
                if stamp is not None and stamp != old and stamp[1] > 0 and stamp == last.get(place):
                    answered.append(process)
                    break
                last[place] = stamp
        if len(answered) == len(waiting) or monotonic_s() >= until_s:
            break
        sleep(POLL_S)
    return answered


# Reduces one rank's dump to what shows which rank blocks a job. Pure.
#
# The reduced dump has the shape of PyTorch's own JSON dumps, so that the same tools read it: all groups and their
# status, the operations that have not completed, and each group's newest completed one.
DUMP_BYTES_MAX = 16 << 20  # the usual 2,000 operations with stacks are 2 to 6 MB; parsing takes ten times as much
OBJECTS_MAX = 500_000  # lists and dictionaries: 2,000 operations with 100 frames each have 200,000
ENTRIES_MAX = 100_000  # large buffers have 20,000; a pickle repeats one in two bytes: a million cost 5 s and 160 MB
GROUPS_MAX = 1_024  # of one rank; large models have about ten
UNFINISHED_MAX = 256  # kept: hosts run ahead by tens of collectives, and a hang is about the oldest
RANKS_CHARS_MAX = 4 << 20  # of all groups: 100,000 ranks spelt out are 700,000, all of them in the widest group
KEPT_BYTES_MAX = 4 << 20  # all kept operations together: UNFINISHED_MAX usually are 75,000
SHAPES_MAX = 64  # kept: tensors per operation, and dimensions per tensor
DEFAULT_GROUP = "0"

ENQUEUED, STARTED = "last_enqueued_collective", "last_started_collective"


@dataclass(frozen=True)
class FlightDump:
    """The contents of one rank's dump.

    ``enqueued`` and ``completed`` are the highest sequences on its widest group, -1: none yet, None: unknown. ``ranks``
    is that group's size; None where the dump does not list its ranks. ``reduced`` is the reduced dump as JSON;
    ``left_out`` counts operations dropped beyond UNFINISHED_MAX.
    """

    enqueued: int | None
    completed: int | None
    ranks: int | None
    reduced: bytes
    left_out: int


def parse_dump(raw: bytes, rank: int) -> FlightDump:
    """Parse a dump's bytes, pickle or JSON, for the rank. Raises BadDump."""
    dump = dump_of(decode(raw, DUMP_BYTES_MAX, OBJECTS_MAX))
    groups = _groups(dump)
    entries = entries_of(dump)
    if len(entries) > ENTRIES_MAX:
        raise BadDump(f"{len(entries)} entries; at most {ENTRIES_MAX} are read")
    operations = [_Operation(entry) for entry in entries]
    status = status_of(dump, groups, names_by_id(entries))
    unfinished: list[_Operation] = []
    newest: dict[tuple[str, bool], _Operation] = {}
    done: dict[str, int] = {}
    left_out = 0
    for item in operations:
        item.finished = has_completed(item.entry, item.sequence, status.get(item.group))
        if item.finished and not item.exchange:
            done[item.group] = max(done.get(item.group, -1), item.sequence)
        key = (item.group, item.exchange)
        if key not in newest and len(newest) >= 2 * GROUPS_MAX:
            left_out += 1
            continue
        if key not in newest or item.sequence >= newest[key].sequence:
            newest[key] = item
        if not item.finished:
            unfinished.append(item)
    left_out += max(0, len(unfinished) - UNFINISHED_MAX)
    kept = unfinished[:UNFINISHED_MAX]
    kept += [item for item in newest.values() if item.finished or item not in kept]
    widest = _widest(groups, [*status, *done, *(name for name, _ in newest)])
    last = newest.get((widest, False))
    return FlightDump(
        enqueued=_said(status, widest, ENQUEUED, last.sequence if last is not None else None),
        completed=_said(status, widest, LAST_COMPLETED, done.get(widest)),
        ranks=groups[widest][1] if widest in groups else None,
        reduced=_reduced(dump, rank, groups, kept),
        left_out=left_out,
    )


class _Operation:
    """The fields of one entry that are needed. Raises BadDump."""

    __slots__ = ("entry", "exchange", "finished", "group", "group_id", "sequence", "state")

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.entry = entry
        self.group, _ = group_of(entry)
        self.group_id = integer_of("pg_id", entry.get("pg_id", 0))
        self.sequence, self.exchange = sequence_of(entry)
        self.state = text_of(entry.get("state", ""))
        self.finished = False


def _groups(dump: Mapping[str, Any]) -> dict[str, tuple[dict[str, str], int | None]]:
    """Return each group as PyTorch writes it, and its size, None where it does not list its ranks."""
    groups = {}
    left = RANKS_CHARS_MAX
    for key, said in list(mapping_of(dump, "pg_config").items())[:GROUPS_MAX]:
        config = said if isinstance(said, dict) else {}
        ranks = _spelt(config.get("ranks"), left)
        left -= len(ranks)
        count = sum(1 for _ in re.finditer(r"[0-9]{1,9}", ranks))
        reported = {"name": text_of(config.get("name", key)), "desc": text_of(config.get("desc", "")), "ranks": ranks}
        groups[text_of(key)] = (reported, count or None)
    return groups


def _spelt(ranks: Any, chars_max: int) -> str:
    """Return a group's ranks as PyTorch spells them; "" where it lists none. Raises BadDump."""
    if isinstance(ranks, (list, tuple)) and len(ranks) <= chars_max:  # a longer one has a longer text
        ranks = str(list(ranks)) if all(type(rank) is int and 0 <= rank < INTEGER_MAX for rank in ranks) else ""
    if isinstance(ranks, (str, list, tuple)) and len(ranks) > chars_max:
        raise BadDump(f"the ranks of all groups have more than {RANKS_CHARS_MAX} characters")
    return ranks if isinstance(ranks, str) and ranks.isascii() else ""


def _widest(groups: Mapping[str, tuple[dict[str, str], int | None]], others: list[str]) -> str:
    """Return the widest group's name; the first created among equally wide ones or where no width is known."""
    width = {name: count for name, (_, count) in groups.items() if name and count}  # gloo lists no ranks: the last made
    names = [name for name in width if width[name] == max(width.values())] or others or [DEFAULT_GROUP]
    return min(names, key=lambda name: (int(name) if name.isascii() and name.isdigit() else INTEGER_MAX, name))


def _said(status: Mapping[str, Mapping[str, Any]], group: str, key: str, otherwise: int | None) -> int | None:
    value = status.get(group, {}).get(key)
    return integer_of(key, value) if value is not None else otherwise


def _reduced(
    dump: Mapping[str, Any],
    rank: int,
    groups: Mapping[str, tuple[dict[str, str], int | None]],
    operations: list[_Operation],
) -> bytes:
    """Return the reduced dump. Raises BadDump."""
    status = {}
    for key, value in list(mapping_of(dump, "pg_status").items())[:GROUPS_MAX]:
        if isinstance(value, dict):
            reported = {
                name: integer_of(name, value[name])
                for name in (ENQUEUED, STARTED, LAST_COMPLETED)
                if value.get(name) is not None
            }
            status[str(integer_of("pg_status", key))] = reported
    entries = []
    left = KEPT_BYTES_MAX
    for item in operations:
        entry = msgspec.json.encode(_entry(item))
        left -= len(entry)
        if left < 0:
            raise BadDump(f"the operations to be kept have more than {KEPT_BYTES_MAX} bytes")
        entries.append(msgspec.Raw(entry))
    return msgspec.json.encode(
        {
            "version": text_of(dump.get("version", "")),
            "rank": rank,
            "pg_config": {name: reported for name, (reported, _) in groups.items()},
            "pg_status": status,
            "entries": entries,
        }
    )


def _entry(item: _Operation) -> dict[str, Any]:
    """Return an operation without its stack, in the current format's terms."""
    entry = item.entry
    kept: dict[str, Any] = {
        "pg_id": item.group_id,
        "p2p_seq_id" if item.exchange else "collective_seq_id": item.sequence,
        "profiling_name": text_of(entry.get("profiling_name", "")),
        "state": COMPLETED if item.finished else item.state,
        "is_p2p": item.exchange,
    }
    if entry.get("process_group"):
        kept["process_group"] = list(group_of(entry))
    for key in ("time_created_ns", "timeout_ms", "time_discovered_started_ns"):
        if entry.get(key) is not None:
            kept[key] = integer_of(key, entry[key])
    for key in ("input_sizes", "output_sizes"):
        kept[key] = _shapes(entry.get(key))
    for key in ("input_dtypes", "output_dtypes"):
        kept[key] = [text_of(name) for name in _list(entry.get(key))]
    return kept


def _shapes(value: Any) -> list[list[int]]:
    return [[integer_of("sizes", number) for number in _list(shape)] for shape in _list(value)]


def _list(value: Any) -> list[Any]:
    return list(value[:SHAPES_MAX]) if isinstance(value, (list, tuple)) else []


# Watches where dumps appear, and reads them.
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
            dump = parse_dump(_content(path, place), process.rank)
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
