"""Reads the TensorBoard event files of training processes. Touches: event files, read only."""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from eagle_eye.agent.collector import Drops, Observed, Unsupported
from eagle_eye.agent.foreign_files import Identity, NotTheirs, open_file, shown
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.agent.training_logs.followed_logs import FoundLog, LogOrigin, LogTrouble, Missing, Pattern, writer_of
from eagle_eye.agent.training_logs.lines import STEP_MAX, LineWriter, LogLine, LogReading
from eagle_eye.agent.training_logs.rank_courses import RankCourses

# Reads TensorBoard event files: records with checksums, their few numeric fields, and what tags mean.
#
# A file is a sequence of TFRecords: length (8 bytes, little-endian), masked CRC-32C of those, data, masked CRC-32C of
# the data. The data is a protobuf message Event: 1 wall_time (double), 2 step (varint), 5 summary; a Summary has values
# (1); a Value has 1 tag, 2 simple_value (float), 8 tensor; a TensorProto has 1 dtype, 4 tensor_content, 5 float_val,
# 6 double_val.
SCALAR_BYTES_MAX = 16_384  # a record with a step's scalars has some hundred; images and graphs are larger
RECORD_BYTES_MAX = 1 << 31  # a larger length is taken for damage
HEADER_BYTES, FOOTER_BYTES = 12, 4
SCALARS_MAX = 256  # per record
TRIES_MAX = 4_096  # places that look like a record's start; each costs a checksum
_DT_FLOAT, _DT_DOUBLE = 1, 2
_SHORT = bytes(6)  # the upper bytes of a short record's length
_MASK_DELTA = 0xA282EAD8
_POLYNOMIAL = 0x82F63B78  # CRC-32C, reversed


class DamagedRecord(ValueError):
    """Bytes that are not a record: a wrong checksum."""


@dataclass(frozen=True)
class Scalar:
    """One number, with its tag, step and time (Unix seconds)."""

    tag: str
    step: int
    time_s: float
    value: float


@dataclass(frozen=True)
class Records:
    """The records in bytes that start at a record.

    ``used`` is the number of bytes consumed: more than given where a large record is skipped, fewer where the last one
    is incomplete. ``damaged`` records had a valid length but a wrong data checksum.
    """

    scalars: list[Scalar]
    used: int
    damaged: int


def read_records(data: bytes, records_max: int) -> Records:
    """Return the scalars of up to ``records_max`` records. Raises Damaged where the first one's length is wrong."""
    scalars: list[Scalar] = []
    at = damaged = 0
    for _ in range(records_max):
        if len(data) - at < HEADER_BYTES:
            break
        length = _length(data, at)
        if length is None:
            if at == 0:
                raise DamagedRecord("a record's length does not fit its checksum")
            break
        end = at + HEADER_BYTES + length + FOOTER_BYTES
        if length > SCALAR_BYTES_MAX:
            at = end  # no scalars: skipped unread
            continue
        if end > len(data):
            break
        content = data[at + HEADER_BYTES : end - FOOTER_BYTES]
        (checksum,) = struct.unpack_from("<I", data, end - FOOTER_BYTES)
        if masked_crc(content) == checksum:
            scalars += _event(content)
        else:
            damaged += 1
        at = end
    return Records(scalars, at, damaged)


def next_record(data: bytes, begin: int = 0) -> int | None:
    """Return the start of the first record at or after ``begin``, None if there is none: for entering a file midway."""
    at = data.find(_SHORT, begin)
    for _ in range(TRIES_MAX):
        if at < 0:
            break
        start = at - 2
        if start >= begin and _length(data, start) is not None:
            return start
        at = data.find(_SHORT, at + 1)
    return None


def masked_crc(data: bytes) -> int:
    """Return the data's CRC-32C, rotated and shifted as in TFRecords."""
    crc = 0xFFFFFFFF
    table = _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _table()


def _length(data: bytes, at: int) -> int | None:
    """Return the length of the record at this place; None where there is no record."""
    if len(data) - at < HEADER_BYTES:
        return None
    length, checksum = struct.unpack_from("<QI", data, at)
    if length > RECORD_BYTES_MAX or masked_crc(data[at : at + 8]) != checksum:
        return None
    return int(length)


def _event(content: bytes) -> list[Scalar]:
    """Return a record's scalars; none if it is not a valid message."""
    try:
        fields = _fields(content)
        time_s = next((_double(value) for number, value in fields if number == 1), 0.0)
        step = next((value for number, value in fields if number == 2 and isinstance(value, int)), 0)
        scalars: list[Scalar] = []
        for number, value in fields:
            if number == 5 and isinstance(value, bytes):
                for inner, item in _fields(value):
                    if inner == 1 and isinstance(item, bytes) and len(scalars) < SCALARS_MAX:
                        scalars += _value(item, _signed(step), time_s)
    except (ValueError, struct.error, IndexError):
        return []
    return scalars


def _value(content: bytes, step: int, time_s: float) -> list[Scalar]:
    tag, found = "", None
    for number, value in _fields(content):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif number == 2 and isinstance(value, bytes):
            found = float(struct.unpack("<f", value)[0])
        elif number == 8 and isinstance(value, bytes):
            found = _tensor(value)
    return [Scalar(tag, step, time_s, found)] if tag and found is not None else []


def _tensor(content: bytes) -> float | None:
    """Return the number in a one-element tensor; None for any other."""
    kind = 0
    numbers: bytes | None = None
    for number, value in _fields(content):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            numbers = value
    if numbers is None or (kind, len(numbers)) not in ((_DT_FLOAT, 4), (_DT_DOUBLE, 8)):
        return None
    return float(struct.unpack("<f" if kind == _DT_FLOAT else "<d", numbers)[0])


def _fields(content: bytes) -> list[tuple[int, int | bytes]]:
    """Return a message's fields: varints as int, all others as their bytes. Raises ValueError, IndexError."""
    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        kind = key & 7
        if kind == 0:
            whole, at = _varint(content, at)
            found.append((key >> 3, whole))
            continue
        if kind == 2:
            size, at = _varint(content, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(content):
            raise ValueError("a field goes on behind the end")
        found.append((key >> 3, content[at : at + size]))
        at += size
    return found


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _double(value: int | bytes) -> float:
    return float(struct.unpack("<d", value)[0]) if isinstance(value, bytes) else 0.0


ENTER_BYTES = 1 << 14  # from the end of a pre-existing file: some hundred scalars
READ_BYTES_MAX = 1 << 17  # per read: more than the records that one collection takes
TORN_READS_MAX = 10  # reads after which an invalid record is damaged rather than incomplete, on a network file system


class EventFile:
    """The records added to a file since the last read.

    An incomplete record waits. Records with a wrong checksum are counted as ``tensorboard_damaged``; reading continues
    at the next record. A truncated file is read from its beginning.
    """

    def __init__(self, path: Path, drops: Drops, identity: Identity | None = None) -> None:
        """Open the file; reading starts at the beginning. Raises OSError, NotTheirs as ``open_file`` does."""
        self._descriptor = open_file(path, identity=identity)
        self._drops = drops
        self._at = self._size = 0
        self._torn_reads = 0

    def enter(self) -> list[Scalar]:
        """Seek to the end; return the last scalars before it. Raises OSError."""
        size = os.fstat(self._descriptor).st_size
        self._at = max(0, size - ENTER_BYTES)
        if self._at:
            start = next_record(os.pread(self._descriptor, ENTER_BYTES, self._at))
            if start is None:
                self._at = size
                return []
            self._at += start
        return self.read(ENTER_BYTES)

    def read(self, records_max: int) -> list[Scalar]:
        """Return the scalars of the next records; none: nothing is new. Raises OSError."""
        size = os.fstat(self._descriptor).st_size
        if size < self._size:
            self._at = 0
        self._size = size
        if size <= self._at:  # a large record being skipped may still be incomplete
            return []
        data = os.pread(self._descriptor, min(READ_BYTES_MAX, size - self._at), self._at)
        try:
            records = read_records(data, records_max)
        except DamagedRecord:
            self._torn_reads += 1
            if self._torn_reads > TORN_READS_MAX:
                self._torn_reads = 0
                self._drops.count("tensorboard_damaged")
                self._at += next_record(data, 1) or len(data)
            return []
        self._torn_reads = 0
        self._drops.count("tensorboard_damaged", records.damaged)
        self._at += records.used
        return records.scalars

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Tag(NamedTuple):
    """A tag's meaning: a field of LogReading, its multiplier, and which rank by convention writes it."""

    field: str
    scale: float = 1.0
    writer: LineWriter = LineWriter.FIRST


# Exact names, in lower case. Missing here: tags whose step counts samples or tokens, or that follow no standard.
TAGS = MappingProxyType(
    {
        "lm loss": Tag("loss", writer=LineWriter.LAST),  # Megatron-LM
        "lm-loss-training/lm loss": Tag("loss", writer=LineWriter.LAST),  # Megatron-DeepSpeed
        "grad-norm": Tag("grad_norm", writer=LineWriter.LAST),
        "grad-norm/grad-norm": Tag("grad_norm", writer=LineWriter.LAST),
        "iteration-time": Tag("step_s", writer=LineWriter.LAST),
        "iteration-time/iteration-time": Tag("step_s", writer=LineWriter.LAST),
        "loss_metrics/global_avg_loss": Tag("loss"),  # torchtitan
        "training_metrics/grad_norm": Tag("grad_norm"),
        "time_metrics/end_to_end(s)": Tag("step_s"),
        "throughput(tps)": Tag("tokens_per_second"),
        "train/loss": Tag("loss"),  # Hugging Face
        "train/grad_norm": Tag("grad_norm"),
        "reduced_train_loss": Tag("loss"),  # NeMo
        "train_step_timing in s": Tag("step_s"),
        "train_loss": Tag("loss"),  # Lightning modules
        "train_loss_step": Tag("loss"),
        "loss": Tag("loss"),
        "grad_norm": Tag("grad_norm"),
        "lm_loss": Tag("loss"),  # nanotron
        "time_per_iteration_ms": Tag("step_s", 1e-3),
        "elapsed_time_per_iteration_ms": Tag("step_s", 1e-3),
        "tokens_per_sec_per_gpu": Tag("tokens_per_second"),
        "tokens_per_sec": Tag("job_tokens_per_second"),
        "loss/train/total": Tag("loss"),  # Composer
        "l2_norm/grad/global": Tag("grad_norm"),
        "throughput/device/tokens_per_sec": Tag("tokens_per_second"),
        "throughput/tokens_per_sec": Tag("job_tokens_per_second"),
    }
)


def reading(scalar: Scalar) -> LogReading | None:
    """Convert the scalar to a reading, None where its tag is not in the table."""
    tag = TAGS.get(scalar.tag.lower())
    if tag is None or not 0 <= scalar.step < STEP_MAX:
        return None
    value = {tag.field: scalar.value * tag.scale}
    return LogReading(step=scalar.step, stamp_s=scalar.time_s, writer=tag.writer, **value)  # type: ignore[arg-type]


# Finds the event files and reads what is new in them.
FILES_MAX = 32  # newest first: a run writes at most one per rank, older ones are from earlier attempts
RECORDS_MAX = 1_000  # over all files per collection, at 10 microseconds each; the rest waits
ACTIVE_S = 3_600.0  # a file not written to for this long belongs to a run that ended
LOOK_S = 10.0  # between two searches: writers flush every two minutes by default
LOOK_RATIO = 100.0  # and at least this many times the duration of a search
DEPTH_MAX = 3  # folders below the configured one
SEEN_MAX = 65_536  # files seen; beyond this all are forgotten and treated as pre-existing

_NAME = re.compile(r"events\.out\.tfevents\.[0-9]{1,20}\.(.{1,253}?)(?:\.([0-9]{1,10})\.[0-9]{1,10})?(?:\.v2)?")
_NO_LINE = LogLine("")


@dataclass
class _Followed:
    file: EventFile
    found: FoundLog


class TensorBoardCollector:
    """Steps, losses and rates of ranks from their event files, where no other source has them.

    ``patterns`` come from ``event_files``. A file belongs to the process whose host and pid its name contains, else to
    the rank in its path or the rank that by convention writes such tags. Rows of ``reported_devices`` are left out:
    hooks and logs are faster, as event files are flushed every two minutes. A file reached through another user's link
    is counted as ``tensorboard_refused`` and named.
    """

    name = "tensorboard"

    def __init__(
        self,
        processes: TrainingProcesses,
        drops: Drops,
        patterns: Sequence[Pattern],
        reported_devices: Callable[[], set[int]] = set,
        *,
        host: str = "",
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``host`` is this machine's name in event files; empty: its host name."""
        self._processes = processes
        self._drops = drops
        self._patterns = patterns
        self._reported_devices = reported_devices
        self._host = (host or socket.gethostname()).partition(".")[0]
        self._monotonic_s = monotonic_s
        self._ranks = RankCourses()
        self._files: dict[Identity, _Followed] = {}
        self._seen: set[Identity] | None = None
        self._due_s = 0.0
        self._nothing = ""
        self._trouble = LogTrouble()

    def collect(self, now_s: float) -> Observed:
        """Return the rows for the interval ending now. Raises Unsupported where no folder is configured."""
        if not self._patterns:
            raise Unsupported("tensorboard_logs names no folder")
        monotonic_s = self._monotonic_s()
        listed = self._processes.all()
        self._ranks.update_processes(listed, monotonic_s)
        if listed and monotonic_s >= self._due_s:
            self._look(listed, now_s, monotonic_s)
            self._due_s = monotonic_s + max(LOOK_S, LOOK_RATIO * (self._monotonic_s() - monotonic_s))
        for identity, followed in list(self._files.items()):
            try:
                for scalar in followed.file.read(RECORDS_MAX // len(self._files) + 1):
                    self._take(scalar, followed.found, monotonic_s, new=True)
            except OSError as error:
                self._trouble.set_text(f"{shown(followed.found.path)}: {error.strerror or error}", monotonic_s)
                self._let_go(identity)
        problem = "; ".join(text for text in (self._nothing, self._trouble.text(monotonic_s)) if text)
        return Observed(devices=self._ranks.rows(self._reported_devices(), self._drops), problem=problem)

    def close(self) -> None:
        """Close the files."""
        for identity in list(self._files):
            self._let_go(identity)

    def _look(self, listed: Sequence[TrainingProcess], now_s: float, monotonic_s: float) -> None:
        jobs = [process.job for process in listed]
        found = [log for pattern in self._patterns for log in pattern.files(jobs)]
        self._nothing = "" if found else f"tensorboard_logs: no event file below {self._patterns[0].text}"
        active = [log for log in found if log.changed_s >= now_s - ACTIVE_S and _NAME.fullmatch(log.path.name)]
        active.sort(key=lambda log: -log.changed_s)
        kept = {log.identity: log for log in active[:FILES_MAX]}
        self._drops.count("tensorboard_files_over_limit", len(active) - FILES_MAX)
        for identity in self._files.keys() - kept.keys():
            self._let_go(identity)
        for identity, log in kept.items():
            if identity in self._files:
                self._files[identity].found = log
                continue
            try:
                self._open(identity, log, monotonic_s, new=self._seen is not None and identity not in self._seen)
            except NotTheirs as error:
                self._drops.count("tensorboard_refused")
                self._trouble.set_text(str(error), monotonic_s)
            except OSError as error:
                self._trouble.set_text(f"{shown(log.path)}: {error.strerror or error}", monotonic_s)
        if self._seen is None or len(self._seen) > SEEN_MAX:
            self._seen = set()
        self._seen.update(log.identity for log in found)

    def _open(self, identity: Identity, log: FoundLog, monotonic_s: float, *, new: bool) -> None:
        file = EventFile(log.path, self._drops, identity)
        self._files[identity] = _Followed(file, log)
        if not new:
            for scalar in file.enter():
                self._take(scalar, log, monotonic_s, new=False)

    def _take(self, scalar: Scalar, log: FoundLog, monotonic_s: float, *, new: bool) -> None:
        said = reading(scalar)
        if said is None:
            return
        processes = self._ranks.processes()
        origin = LogOrigin((), log.rank, log.local_rank, log.job)
        named = self._by_name(log.path.name, processes)
        process = named or writer_of(_NO_LINE, None, said.writer, origin, processes, {})
        if isinstance(process, Missing):
            if process is Missing.UNKNOWN:
                self._drops.count("tensorboard_unattributed")
                remedy = "name the rank with {rank} in tensorboard_logs"
                self._trouble.set_text(f"{shown(log.path)}: nothing says which rank wrote it; {remedy}", monotonic_s)
            return
        course = self._ranks.of(process)
        if course is None:
            return
        if not new:
            course.learn(said, log.identity, monotonic_s)
        else:
            course.read_line(said, log.identity, monotonic_s)

    def _by_name(self, name: str, processes: Sequence[TrainingProcess]) -> TrainingProcess | None:
        """Return the process whose host and pid are in the file's name."""
        said = _NAME.fullmatch(name)
        if said is None or said[2] is None or said[1].partition(".")[0] != self._host:
            return None
        return next((process for process in processes if process.pid == int(said[2])), None)

    def _let_go(self, identity: Identity) -> None:
        self._files.pop(identity).file.close()


def event_files(folder: str, node: str) -> list[Pattern]:
    """Return patterns of the event files in the folders that ``folder`` matches, and some levels below.

    Raises BadPattern as Pattern does.
    """
    below = ["/*" * depth for depth in range(DEPTH_MAX + 1)]
    return [Pattern(f"{folder.rstrip('/')}{levels}/events.out.tfevents.*", node) for levels in below]
