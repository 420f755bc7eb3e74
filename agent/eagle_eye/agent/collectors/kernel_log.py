"""Reads the kernel log and crash dumps: /dev/kmsg, pstore. Touches: those, and one small state file of our own."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.agent.collector import CollectFailed, Drops, Observed, Unsupported
from eagle_eye.agent.kernel_messages import (
    STACK_FRAMES_MAX,
    TEXT_CHARS_MAX,
    KernelMessage,
    KernelRecord,
    LinkChanges,
    NewMessage,
    Repeats,
    StackFrame,
    begins_task,
    bus_address,
    lock_holder,
    message,
    panic,
    record,
    stack_frame,
    whole_machine_check,
)
from eagle_eye.agent.network import LinkNames
from eagle_eye.schema.driver_facts import BY_NAME, TASK_BLOCKED
from eagle_eye.schema.events import WHOLE_NODE, Event
from eagle_eye.schema.frame import TIME_S_MAX

# Panics of earlier boots, in the dumps in persistent storage.
DUMPS_MAX = 256
DUMP_BYTES_MAX = 1 << 20
DEPTH_MAX = 3  # systemd-pstore: /var/lib/systemd/pstore/<time>/<part>/dmesg.txt

Panics = dict[str, tuple[str, float]]  # by the dump's line: message, and Unix seconds


def panics(folders: Sequence[Path], oldest_s: float) -> tuple[Panics, str]:
    """Return the panics whose dumps were written since ``oldest_s``, and what could not be read, "" if nothing.

    The parts of one dump are in one folder and are one panic.
    """
    all_found: Panics = {}
    problem = ""
    for folder in folders:
        dumps: dict[Path, list[Path]] = {}
        try:
            for file in _dumps(folder, DEPTH_MAX):
                dumps.setdefault(file.parent, []).append(file)
        except OSError as error:
            problem = problem or f"{folder}: {error.strerror or error}"
        for files in dumps.values():
            try:
                found = _panics(files, oldest_s)
            except OSError as error:
                problem = problem or f"{error.filename or folder}: {error.strerror or error}"
                continue
            for line, reported in found.items():
                all_found.setdefault(line, reported)
    return all_found, problem


def _dumps(folder: Path, depth: int) -> list[Path]:
    """Return the dumps under a folder, none where the folder does not exist. Raises OSError."""
    found: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and depth > 1:
                    found += _dumps(Path(entry.path), depth - 1)
                elif entry.name.startswith(("dmesg", "console-")) and entry.is_file(follow_symlinks=False):
                    found.append(Path(entry.path))
                if len(found) >= DUMPS_MAX:
                    break
    except FileNotFoundError:
        return []
    return sorted(found[:DUMPS_MAX])


def _panics(files: Sequence[Path], oldest_s: float) -> Panics:
    """Return the panics in one folder's dumps: text and time (Unix seconds) by line. Raises OSError."""
    found: Panics = {}
    unnamed: list[tuple[str, float]] = []
    for file in files:
        with file.open("rb") as dump:
            time_s = os.fstat(dump.fileno()).st_mtime
            seen = panic(dump.read(DUMP_BYTES_MAX)) if time_s >= oldest_s else None
        if seen is not None and seen.line:
            found.setdefault(seen.line, (seen.text, time_s))
        elif seen is not None:
            unnamed.append((seen.text, time_s))
    if unnamed and not found:
        text, time_s = max(unnamed, key=lambda item: (len(item[0]), item[1]))
        found[f"{text} at {time_s:.0f}"] = (text, time_s)
    return found


# The log itself.
RECORDS_MAX = 4_096  # read per collection; the rest waits in the kernel for the next
WHOLE_RECORDS_MAX = 200_000  # more than a buffer of 16 MB holds
NEWS_MAX = 256  # reported per collection
RECORD_BYTES_MAX = 16_384  # the kernel's own limit is 8,192
OLD_S = 300.0
BURST_S = 1.0  # the lines of one machine check come within this
PLACES_S = 10.0  # an XID waits this long for the driver to say which GPU has the address
PANIC_BEFORE_BOOT_S = 86_400.0  # a panic may precede the following boot by this much
PANICS_KEPT = 64
STATE_FILE = "kernel_log.json"

_log = logging.getLogger("eagle_eye.agent")


class _State(msgspec.Struct):
    """What survives an agent restart: the last record handed on, in which boot, and the panics already reported."""

    boot_id: str = ""
    sequence: int = -1
    panics: list[str] = []


def open_log(path: Path) -> int:
    """Return a non-blocking descriptor of the log, positioned at its oldest record. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


@dataclass(frozen=True)
class KernelLogHost:
    """Where a host keeps its log and its dumps, and how they are read.

    ``panic_folders``: where the kernel exposes dumps, and where systemd moves them soon after boot. ``monotonic_s``
    counts seconds since boot, as the kernel's own stamps do.
    """

    path: Path = Path("/dev/kmsg")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    panic_folders: Sequence[Path] = (Path("/sys/fs/pstore"), Path("/var/lib/systemd/pstore"))
    monotonic_s: Callable[[], float] = time.monotonic
    opener: Callable[[Path], int] = open_log
    read: Callable[[int, int], bytes] = os.read


THIS_HOST = KernelLogHost()


class KernelLogCollector:
    """Events from the kernel log: each record once, across agent restarts, with the time it happened.

    The last record handed on is kept in ``state_folder`` (None: only in memory). It is written at the next collection,
    after the frame was made: an agent killed in between reports the last records twice rather than never. Records that
    the kernel overwrote before they were read are counted as ``kernel_log_overwritten``, unparsable ones as
    ``kernel_log_malformed``, failed state writes as ``kernel_log_unsaved``.

    At the first start the log since boot may be long. GPU, NVSwitch and machine errors of this boot are reported with
    their true time, however old: they hold until the GPU is reset, and detectors and people judge them by that time.
    Kills and link changes older than OLD_S are not reported: those processes are gone, and rows carry the links'
    current state.

    Cannot see: records logged while no agent ran and since overwritten; panics that left no dump.
    """

    name = "kernel_log"

    def __init__(
        self,
        drops: Drops,
        devices_by_bus_id: Mapping[str, int] | None = None,
        state_folder: Path | None = None,
        *,
        places_s: float = PLACES_S,
        to_the_end: bool = False,
        host: KernelLogHost = THIS_HOST,
    ) -> None:
        """``devices_by_bus_id`` may be filled later, by the GPU collector: XIDs wait ``places_s`` for it.

        ``to_the_end``: each collection reads the whole log, at most WHOLE_RECORDS_MAX records, and fails where it is
        longer: a verdict must not rest on a part.
        """
        self._drops = drops
        self._devices_by_bus_id = {} if devices_by_bus_id is None else devices_by_bus_id
        self._state_file = state_folder / STATE_FILE if state_folder is not None else None
        self._places_s = places_s
        self._records_max = WHOLE_RECORDS_MAX if to_the_end else RECORDS_MAX
        self._news_max = WHOLE_RECORDS_MAX if to_the_end else NEWS_MAX
        self._to_the_end = to_the_end
        self._since_s = 0.0  # since boot: the time of the first record that the kernel had kept
        self._path = host.path
        self._proc = host.proc
        self._panic_folders = host.panic_folders
        self._monotonic_s = host.monotonic_s
        self._open = host.opener
        self._read = host.read
        self._descriptor: int | None = None
        self._started_s: float | None = None  # since boot; None: not yet
        self._state = _State()
        self._saved = b""
        self._sequence: int | None = None  # of the last record read; None: no earlier record is known
        self._read_again: int | None = None  # the sequence number of the record read last, if it had been read before
        self._drained_s = 0.0  # since boot: when the log was last read to its end
        self._skip_old = False
        self._repeats = Repeats()
        self._changes = LinkChanges()
        self._burst: list[KernelMessage] = []
        self._burst_s = 0.0
        self._blocked: KernelMessage | None = None  # a task whose stack is being read
        self._blocked_s = 0.0
        self._stack: list[StackFrame] = []
        self._holder = ""
        self._stacks = 0  # begun since: the second is that of the lock's holder
        self._waiting: list[NewMessage] = []  # until the GPUs are known
        self._links = LinkNames(host.sys)

    def collect(self, now_s: float) -> Observed:
        """Return what was logged since the last collection. Raises Unsupported, CollectFailed."""
        self._save()
        monotonic_s = self._monotonic_s()
        observed = Observed()
        if self._descriptor is None:
            self._descriptor = self._opened()
        if self._started_s is None:
            self._started_s = monotonic_s
            self._restore()
            observed.problem = self._look_for_panics(now_s, monotonic_s, observed.events)
        news, waiting = self._waiting, []
        problem = self._read_records(monotonic_s, news)
        if self._burst and monotonic_s - self._burst_s >= BURST_S:
            news += self._end_burst()
        if monotonic_s - self._blocked_s >= BURST_S:
            news += self._end_stack()
        news += self._repeats.due(monotonic_s) + self._changes.due(monotonic_s)
        devices = {bus_address(bus_id): device for bus_id, device in dict(self._devices_by_bus_id).items()}
        may_wait = not devices and monotonic_s - self._started_s < self._places_s
        for item in news:
            if may_wait and item.message.kind == "xid":
                waiting.append(item)
            else:
                observed.events.append(_event(item, devices, now_s - monotonic_s, self._links.of_device))
        self._waiting = waiting
        if not waiting and not self._burst and self._blocked is None and self._sequence is not None:
            self._state.sequence = self._sequence
        observed.events.sort(key=lambda event: event.time_s)
        observed.read_since_s = now_s - monotonic_s + self._since_s if self._since_s else 0.0
        observed.problem = "; ".join(text for text in (observed.problem, problem) if text)
        if problem and not observed.events:
            raise CollectFailed(observed.problem)
        return observed

    def close(self) -> None:
        """Save the position in the log and close it."""
        self._save()
        self._close_log()

    def _opened(self) -> int:
        try:
            return self._open(self._path)
        except FileNotFoundError:
            raise Unsupported(f"no {self._path}: not Linux, or a container without it") from None
        except PermissionError:
            raise Unsupported(
                f"{self._path} may not be read: run the agent as root or grant it CAP_SYSLOG"
                " (in a container also the device); kernel.dmesg_restrict=0 lets everyone read"
            ) from None
        except OSError as error:
            raise CollectFailed(f"{self._path}: {error.strerror or error}") from None

    def _close_log(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read_records(self, monotonic_s: float, news: list[NewMessage]) -> str:
        """Read until nothing is left or a limit is reached, adding to ``news``; return what went wrong, or ""."""
        descriptor, read = self._descriptor, self._read
        assert descriptor is not None  # noqa: S101 - the caller opened it
        drained_s = self._drained_s
        for _ in range(self._records_max):
            if len(news) >= self._news_max:
                break
            try:
                raw = read(descriptor, RECORD_BYTES_MAX)
            except BlockingIOError:
                self._note_drained(monotonic_s)
                return ""
            except OSError as error:
                problem = self._note_error(error)
                if problem:
                    return problem
                continue
            if not raw:
                if self._sequence is None:
                    raise Unsupported(f"{self._path} is empty: it is not the kernel's log")
                return ""
            found = self._unread(raw)
            if found is not None:
                # The kernel's timestamps drift from the clock over months, but a new record was written after the log
                # was last read to its end.
                news += self._take(found.text, min(monotonic_s, max(drained_s, found.stamp_s)), monotonic_s)
        return f"{self._path}: not read to its end, it has too many records" if self._to_the_end else ""

    def _unread(self, raw: bytes) -> KernelRecord | None:
        """Parse one record; return None where it is malformed or was read before."""
        found = record(raw)
        if found is None:
            self._drops.count("kernel_log_malformed")
            return None
        last = self._sequence
        if last is not None:
            if found.sequence <= last:
                self._read_again = found.sequence
                return None
            self._drops.count("kernel_log_overwritten", found.sequence - last - 1)
        if found.sequence and (last is None or found.sequence > last + 1):
            self._since_s = found.stamp_s
        self._sequence = found.sequence
        self._read_again = None
        return found

    def _note_error(self, error: OSError) -> str:
        """Return why the log cannot be read, "" where the next record can be."""
        if error.errno == errno.EPIPE:  # overwritten before we read it: the next number shows how many were lost
            return ""
        if error.errno == errno.EINVAL:  # longer than the buffer; the kernel moves on to the next
            self._drops.count("kernel_log_malformed")
            return ""
        self._close_log()  # reopening starts at the oldest record: those already read are skipped by number
        return f"{self._path}: {error.strerror or error}"

    def _note_drained(self, monotonic_s: float) -> None:
        self._drained_s = monotonic_s
        if self._read_again is not None and self._sequence is not None and self._read_again < self._sequence:
            _log.warning("%s was written for another kernel log; reading goes on from here", self._state_file)
            self._sequence = self._read_again

    def _take(self, text: bytes, at_s: float, monotonic_s: float) -> list[NewMessage]:
        said = message(text)
        if said is None:
            return self._take_frame(text, at_s) if self._blocked is not None else []
        if said.kind == "machine_check":
            ended: list[NewMessage] = []
            if self._burst and (at_s - self._burst_s > BURST_S or said.address != self._burst[0].address):
                ended = self._end_burst()
            if not self._burst:
                self._burst_s = at_s
            if len(self._burst) < NEWS_MAX:
                self._burst.append(said)
            return ended
        if said.subject.startswith(TASK_BLOCKED) and said.kind == "host_error":
            ended = self._end_stack()
            self._blocked, self._blocked_s = said, at_s
            return ended
        if said.kind in ("link_down", "link_up"):
            news = self._changes.add(said._replace(subject=self._links.of_interface(said.subject)), at_s)
        else:
            news = self._repeats.add(said, at_s)
        return [] if self._is_old_news(said, at_s, monotonic_s) else news

    def _is_old_news(self, said: KernelMessage, at_s: float, monotonic_s: float) -> bool:
        """Whether it is outdated at this first start: rows and later lines show the current state."""
        fact = BY_NAME.get(said.subject.partition(" ")[0]) if said.kind == "host_error" else None
        passing = said.kind in ("oom_kill", "link_down", "link_up") or (fact is not None and fact.passes)
        return self._skip_old and passing and monotonic_s - at_s > OLD_S

    def _take_frame(self, text: bytes, at_s: float) -> list[NewMessage]:
        """Take a line that may belong to the blocked task's stack, or name the holder of its lock."""
        if at_s - self._blocked_s > BURST_S or len(self._stack) >= STACK_FRAMES_MAX:
            return self._end_stack()
        self._holder = lock_holder(text) or self._holder
        self._stacks += begins_task(text)
        if self._stacks > 1:
            return self._end_stack()
        frame = stack_frame(text)
        if frame is not None:
            self._stack.append(frame)
        return []

    def _end_stack(self) -> list[NewMessage]:
        """Return the blocked task's message with the functions that it waits in, their module and the lock's holder."""
        said, stack, holder = self._blocked, self._stack, self._holder
        if said is None:
            return []
        self._blocked, self._stack, self._holder, self._stacks = None, [], "", 0
        names = dict.fromkeys(frame.module or frame.function for frame in stack)
        where = f" in {', '.join(names)}" if names else ""
        where += f"; its lock is held by {holder}" if holder else ""
        if self._is_old_news(said, self._blocked_s, self._monotonic_s()):
            return []
        module = next((frame.module for frame in stack if frame.module and frame.sure), "")
        text = f"{said.text}{where}"[:TEXT_CHARS_MAX]
        return self._repeats.add(said._replace(text=text, module=module, holder=holder), self._blocked_s)

    def _end_burst(self) -> list[NewMessage]:
        whole = whole_machine_check(self._burst)
        self._burst = []
        if whole is None or self._is_old_news(whole, self._burst_s, self._monotonic_s()):
            return []
        return self._repeats.add(whole, self._burst_s)

    def _restore(self) -> None:
        """Find the position in the log: after the last record of this boot, or the start for a new boot."""
        try:
            boot_id = (self._proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            boot_id = ""  # never equal to a stored boot id
        known = None
        if self._state_file is not None:
            try:
                known = msgspec.json.decode(self._state_file.read_bytes(), type=_State)
            except FileNotFoundError:
                pass
            except (OSError, msgspec.MsgspecError) as error:
                _log.warning("%s cannot be used, this counts as a first start: %s", self._state_file, error)
        if known is not None:
            self._state.panics = known.panics[-PANICS_KEPT:]
            if not boot_id or known.boot_id != boot_id:
                self._sequence = -1
            elif known.sequence >= 0:
                self._sequence = self._state.sequence = known.sequence
        self._state.boot_id = boot_id
        self._skip_old = self._sequence is None

    def _save(self) -> None:
        if self._state_file is None or self._started_s is None:
            return
        state = msgspec.json.encode(self._state)
        if state == self._saved:
            return
        written = self._state_file.with_name(STATE_FILE + ".new")
        try:
            written.write_bytes(state)
            written.replace(self._state_file)
        except OSError:
            self._drops.count("kernel_log_unsaved")
            return
        self._saved = state

    def _look_for_panics(self, now_s: float, monotonic_s: float, events: list[Event]) -> str:
        """Add the panics that led to this boot and were not yet reported; return what could not be read, or ""."""
        found, problem = panics(self._panic_folders, now_s - monotonic_s - PANIC_BEFORE_BOOT_S)
        for line, (text, time_s) in found.items():
            if line not in self._state.panics:
                self._state.panics = [*self._state.panics, line][-PANICS_KEPT:]
                events.append(Event(min(now_s, time_s), "kernel_panic", attributes={"text": text}))
        return problem


def _event(news: NewMessage, devices: Mapping[str, int], boot_s: float, named: Callable[[str], str]) -> Event:
    """Return news as an event; ``boot_s`` is the boot's Unix time by the current wall clock, jumps included.

    ``named`` maps an interface or PCI function to its link name in rows.
    """
    said = news.message
    time_s = min(max(boot_s + news.at_s, 1e-3), TIME_S_MAX - 1.0)
    device = devices.get(said.address, WHOLE_NODE) if said.kind in ("xid", "host_error") else WHOLE_NODE
    if said.kind in ("link_down", "link_up"):
        return Event(time_s, said.kind, attributes={"link": said.subject})
    if said.kind == "oom_kill":
        return Event(time_s, said.kind, attributes={"process": said.subject})
    text = said.text
    if said.kind == "xid" and device == WHOLE_NODE and said.address:
        text = f"PCI:{said.address}, {text}"
    if news.more:
        until = datetime.fromtimestamp(time_s, timezone.utc)
        text += f" ({news.more} more until {until:%Y-%m-%dT%H:%M:%SZ})"
    if said.kind == "host_error":
        what, _, part = said.subject.partition(" ")
        reported = {"what": what, "device": part, "text": text}
        if what.startswith("nic_"):
            reported["link"] = named(part)
        reported |= {"module": said.module, "holder": said.holder}
        return Event(time_s, said.kind, device, {key: value for key, value in reported.items() if value})
    attributes: dict[str, Any] = {"text": text} if said.kind == "machine_check" else {"code": said.code, "text": text}
    return Event(time_s, said.kind, device, attributes)
