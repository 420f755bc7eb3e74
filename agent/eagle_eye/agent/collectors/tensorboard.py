"""Reads the TensorBoard event files of training processes. Touches: event files, read only."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle_eye.agent.files.foreign import Identity, NotTheirs, shown
from eagle_eye.agent.loop.collector import Drops, Observed, Unsupported
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.agent.training_logs.followed_logs import LogOrigin, LogTrouble, Missing, writer_of
from eagle_eye.agent.training_logs.lines import LogLine
from eagle_eye.agent.training_logs.log_finder import FoundLog, Pattern
from eagle_eye.agent.training_logs.rank_courses import RankCourses
from eagle_eye.agent.training_logs.tensorboard_events import EventFile, Scalar, reading

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
        self._ranks.note(listed, monotonic_s)
        if listed and monotonic_s >= self._due_s:
            self._look(listed, now_s, monotonic_s)
            self._due_s = monotonic_s + max(LOOK_S, LOOK_RATIO * (self._monotonic_s() - monotonic_s))
        for identity, followed in list(self._files.items()):
            try:
                for scalar in followed.file.read(RECORDS_MAX // len(self._files) + 1):
                    self._take(scalar, followed.found, monotonic_s, new=True)
            except OSError as error:
                self._trouble.note(f"{shown(followed.found.path)}: {error.strerror or error}", monotonic_s)
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
                self._trouble.note(str(error), monotonic_s)
            except OSError as error:
                self._trouble.note(f"{shown(log.path)}: {error.strerror or error}", monotonic_s)
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
                self._trouble.note(f"{shown(log.path)}: nothing says which rank wrote it; {remedy}", monotonic_s)
            return
        course = self._ranks.of(process)
        if course is None:
            return
        if not new:
            course.learn(said, log.identity, monotonic_s)
        else:
            course.take(said, log.identity, monotonic_s)

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
