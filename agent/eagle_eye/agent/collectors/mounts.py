"""Detects network filesystems that have stopped answering. Touches: /proc/self/mountinfo, ``stat`` per mount."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from eagle_eye.agent.collector import CollectFailed, Observed, Unsupported
from eagle_eye.agent.foreign_files import content

ASK_EVERY_S = 15.0  # per mount; an answer costs a millisecond here and one request at the file server
ANSWER_S = 5.0  # healthy servers answer within milliseconds, busy ones within a second or two
MOUNTS_MAX = 64  # watched; nodes have a handful
STARTS_MAX = 8  # programs started per collection: a start blocks the agent's other threads for a millisecond
NAMED_MAX = 8  # mounts named in one problem
LIST_BYTES_MAX = 4 << 20  # 20,000 mounts, far more than any node running containers has
ERROR_BYTES_MAX = 4_096
NAME_CHARS_MAX = 200
POLL_S = 0.01
KILLED_S = 0.1  # a killed program exits at once, unless it is blocked in the kernel

# Filesystem types of storage shared by nodes, as mounts show them. A user's own sshfs or archive is not the node's
# storage.
KINDS = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "wekafs", "panfs", "pvfs2", "afs"}
    | {"9p", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.juicefs", "fuse.dfuse", "fuse.mfs", "fuse.quobyte"}
    | {"fuse.s3fs", "fuse.gcsfuse", "fuse.mount-s3", "fuse.mountpoint-s3", "fuse.blobfuse", "fuse.blobfuse2"}
    | {"fuse.alluxio-fuse", "fuse.goofys"}
)
# Errors that mean the mount is unusable for everyone; others (no permission) come from a server that is up.
_BROKEN = (
    errno.ESTALE,
    errno.EIO,
    errno.EREMOTEIO,
    errno.ENOTCONN,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.ESHUTDOWN,
    errno.ENODEV,
)
_OCTAL = re.compile(r"\\([0-7]{3})")


class NetworkMount(NamedTuple):
    """A mounted network filesystem: mount point, type, source; ``device`` is the kernel's number for it."""

    path: str
    kind: str
    source: str
    device: str


class _Watch:
    """A filesystem's pending query, if any, and the last result."""

    def __init__(self, mount: NetworkMount) -> None:
        self.mount = mount
        self.process: subprocess.Popen[bytes] | None = None
        self.due_s = 0.0
        self.asked_s = 0.0
        self.asked_at_s = 0.0  # Unix seconds
        self.trouble: str | None = None  # None: unknown, "": it answers
        self.unasked = ""  # why it is unknown


class MountsCollector:
    """The number of network filesystems that do not answer; ``problem`` names them, and since when.

    Each is queried for its size (statfs), which the server must answer; file attributes may come from a cache. A
    process that queries a dead server may be unkillable until the server is back, and would hold the agent's locks and
    sockets. So a separate program asks, one per filesystem and never a second while one is pending; it holds none of
    our resources. Bind mounts of one filesystem share one query.

    The row starts with the first answer; a filesystem that may not be queried counts neither way. Queries keep an
    automounted filesystem from expiring.
    """

    name = "mounts"

    def __init__(
        self,
        patience_s: float = 0.0,
        proc: Path = Path("/proc"),
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``patience_s``: how long a collection waits for answers; later ones are picked up by the next collection."""
        self._patience_s = patience_s
        self._list = f"{proc}/self/mountinfo"
        self._monotonic_s = monotonic_s
        self._watches: dict[str, _Watch] = {}
        self._unwatched = 0
        self._list_due_s = 0.0
        self._listed = False

    def collect(self, now_s: float) -> Observed:
        """Return the node's row. Raises Unsupported, CollectFailed."""
        if not self._listed or self._monotonic_s() >= self._list_due_s:
            self._look()
        self._ask(now_s)
        patient_until_s = self._monotonic_s() + self._patience_s
        while self._hear() and self._monotonic_s() < patient_until_s:
            time.sleep(POLL_S)
        known = [watch for watch in self._watches.values() if watch.trouble is not None]
        bad = [watch for watch in known if watch.trouble]
        observed = Observed()
        if known:
            observed.node["node_mounts_unresponsive"] = float(len(bad))
        said = [str(watch.trouble) for watch in bad] + [w.unasked for w in self._watches.values() if w.unasked]
        if len(said) > NAMED_MAX:
            said[NAMED_MAX:] = [f"and {len(said) - NAMED_MAX} more"]
        if self._unwatched:
            said.append(f"{self._unwatched} network filesystems beyond the first {MOUNTS_MAX} are not watched")
        observed.problem = "; ".join(said)
        return observed

    def close(self) -> None:
        """Kill the programs that are still waiting."""
        asking = [watch.process for watch in self._watches.values() if watch.process is not None]
        for process in asking:
            process.kill()
        deadline_s = time.monotonic() + KILLED_S
        for process in asking:
            _end(process, max(0.0, deadline_s - time.monotonic()))
        self._watches.clear()

    def _look(self) -> None:
        """Refresh the list of filesystems."""
        try:
            text = content(self._list, LIST_BYTES_MAX).decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            raise Unsupported(f"no {self._list}: not Linux") from None
        except OSError as error:
            raise CollectFailed(f"{self._list}: {error.strerror or error}") from None
        mounts = network_mounts(text)
        watched = dict(list(mounts.items())[:MOUNTS_MAX])
        self._unwatched = len(mounts) - len(watched)
        for device in self._watches.keys() - watched.keys():
            process = self._watches.pop(device).process
            if process is not None:
                _end(process)
        for device, mount in watched.items():
            if device not in self._watches:
                self._watches[device] = _Watch(mount)
        self._list_due_s = self._monotonic_s() + ASK_EVERY_S
        self._listed = True

    def _ask(self, now_s: float) -> None:
        monotonic_s = self._monotonic_s()
        due = [w for w in self._watches.values() if w.process is None and monotonic_s >= w.due_s]
        due.sort(key=lambda watch: watch.due_s)
        for watch in due[:STARTS_MAX]:
            try:
                watch.process = _start(watch.mount.path)
            except FileNotFoundError:
                raise Unsupported("the program stat (coreutils) is missing: filesystems cannot be asked") from None
            except OSError as error:
                raise CollectFailed(f"stat cannot be started: {error.strerror or error}") from None
            watch.asked_s, watch.asked_at_s = monotonic_s, now_s
            watch.due_s = monotonic_s + ASK_EVERY_S

    def _hear(self) -> bool:
        """Take the answers that have arrived; return whether any may still arrive in time."""
        monotonic_s = self._monotonic_s()
        waiting = False
        for watch in self._watches.values():
            process = watch.process
            if process is None:
                continue
            if process.poll() is not None:
                watch.trouble, watch.unasked = _judged(watch.mount, process)
                watch.process = None
                _end(process)
            elif monotonic_s - watch.asked_s < ANSWER_S:
                waiting = True
            else:
                since = datetime.fromtimestamp(watch.asked_at_s, timezone.utc)
                watch.trouble = f"{_said(watch.mount)} has not answered since {since:%Y-%m-%dT%H:%M:%SZ}"
        return waiting


def _start(path: str) -> subprocess.Popen[bytes]:
    """Start the query program: its errors go to a pipe, in the C locale. Raises OSError."""
    return subprocess.Popen(
        ("stat", "-f", "--", path),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
    )


def _end(process: subprocess.Popen[bytes], wait_s: float = KILLED_S) -> None:
    """Kill the program if it still runs and close its pipe; one blocked in the kernel is left behind."""
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    if process.stderr is not None:
        process.stderr.close()


def network_mounts(text: str) -> dict[str, NetworkMount]:
    """Return the network filesystems of a mountinfo (proc_pid_mountinfo(5)), each once, by device number."""
    found: dict[str, NetworkMount] = {}
    for line in text.split("\n"):
        before, dash, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if dash and len(fields) >= 6 and len(rest) >= 2 and rest[0] in KINDS:
            path = _OCTAL.sub(lambda digits: chr(int(digits[1], 8)), fields[4])
            if path.startswith("/") and "\0" not in path:
                found.setdefault(fields[2], NetworkMount(path, rest[0], rest[1], fields[2]))
    return found


def _judged(mount: NetworkMount, process: subprocess.Popen[bytes]) -> tuple[str | None, str]:
    """Return the trouble that an exited program's answer shows ("": none, None: unknown), and why it is unknown."""
    if process.returncode == 0:
        return "", ""
    pipe = process.stderr
    said = os.read(pipe.fileno(), ERROR_BYTES_MAX).decode("utf-8", "replace") if pipe is not None else ""
    for number in _BROKEN:
        if os.strerror(number) in said:
            return f"{_said(mount)}: {os.strerror(number)}", ""
    reason = said.strip().rpartition(": ")[2] or f"stat ended with {process.returncode}"
    return None, f"{_said(mount)} cannot be asked: {_printable(reason)}"


def _said(mount: NetworkMount) -> str:
    return f"{_printable(mount.path)} ({mount.kind} from {_printable(mount.source)})"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:NAME_CHARS_MAX])
