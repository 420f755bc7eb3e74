"""A child that writes a file, syncs it to disk, and reads it back. Touches: one folder; leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from .lines import OPENING, WORKING, WorkerOutput, bounded, side_by_side

BLOCK_BYTES = 1 << 20
SYNC_BYTES = 4_096
SYNCS = 8
FREE_TIMES_MIN = 10  # a file of a tenth of the free space at most
SYNC_EVERY_BLOCKS = 16  # so that only a hung disk is silent for seconds
HARDWARE_ERRORS = (errno.EIO, errno.EUCLEAN)  # the kernel's errors when a disk or its filesystem has failed
# These become read-only by themselves after an error; others for other reasons.
GIVES_UP = ("ext3", "ext4", "btrfs")
MOUNTS_BYTES_MAX = 1 << 20


class Mount(NamedTuple):
    """The mount of a folder. ``given_up``: mounted writable, and made read-only by the kernel since."""

    kind: str = ""
    given_up: bool = False


class NoDisk(Exception):
    """The folder is not on a usable disk; the message says why."""


def main(job_json: str) -> None:
    """Do it in the parent's ``folder`` with so many ``bytes``."""
    job: dict[str, Any] = json.loads(job_json)
    bounded(int(job["parent"]), float(job["until_s"]))
    side_by_side(1, float(job["until_s"]), lambda _worker, line: _try(job, line))


def _try(job: dict[str, Any], line: WorkerOutput) -> None:
    line.phase(OPENING)
    try:
        line.values(_written_and_read(Path(job["folder"]), int(job["bytes"]), line))
    except OSError as error:
        given_up = error.errno == errno.EROFS and _mount(Path(job["folder"])).given_up
        line.error(error, hardware=error.errno in HARDWARE_ERRORS or given_up)


def _written_and_read(folder: Path, size: int, line: WorkerOutput) -> dict[str, float]:
    kind = _mount(folder).kind
    if kind in ("tmpfs", "ramfs"):
        raise NoDisk(f"{folder} is kept in memory ({kind}); name a folder on a disk with --folder")
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize < FREE_TIMES_MIN * size:
        raise NoDisk(f"{folder} has less than {FREE_TIMES_MIN * size >> 20} MiB free")
    blocks = size // BLOCK_BYTES
    content = os.urandom(BLOCK_BYTES - 8)
    with tempfile.TemporaryFile(dir=folder) as file:  # it has no name: a kill leaves nothing behind
        line.phase(WORKING)
        syncs_s = []
        for number in range(SYNCS):
            file.write(number.to_bytes(8, "little") * (SYNC_BYTES // 8))
            begin_s = time.perf_counter()
            file.flush()
            os.fsync(file.fileno())
            syncs_s.append(time.perf_counter() - begin_s)
            line.phase(WORKING)
        file.seek(0)
        begin_s = time.perf_counter()
        for number in range(blocks):
            file.write(number.to_bytes(8, "little") + content)
            if (number + 1) % SYNC_EVERY_BLOCKS == 0 or number + 1 == blocks:
                file.flush()
                os.fsync(file.fileno())
            line.phase(WORKING)
        written_s = time.perf_counter() - begin_s
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
        file.seek(0)
        begin_s = time.perf_counter()
        wrong = 0
        for number in range(blocks):
            wrong += file.read(BLOCK_BYTES) != number.to_bytes(8, "little") + content
            line.phase(WORKING)
        read_s = time.perf_counter() - begin_s
    return {
        "bytes": blocks * BLOCK_BYTES,
        "wrong_blocks": wrong,
        "sync_seconds": median(syncs_s),
        "sync_seconds_max": max(syncs_s),
        "write_bytes_per_second": blocks * BLOCK_BYTES / written_s,
        "read_bytes_per_second": blocks * BLOCK_BYTES / read_s,
    }


def _mount(folder: Path) -> Mount:
    number = folder.stat().st_dev
    with Path("/proc/self/mountinfo").open(encoding="utf-8", errors="replace") as file:
        return mount(file.read(MOUNTS_BYTES_MAX), f"{os.major(number)}:{os.minor(number)}")


def mount(mountinfo: str, device: str) -> Mount:
    """Return what is mounted from a device, an empty one where the kernel does not tell. Source: proc(5), mountinfo."""
    for text in mountinfo.splitlines():
        of_mount, _, of_filesystem = text.partition(" - ")
        fields, rest = of_mount.split(), of_filesystem.split()
        if len(fields) > 5 and len(rest) > 2 and fields[2] == device:
            writable, closed = "rw" in fields[5].split(","), "ro" in rest[2].split(",")
            return Mount(rest[0], rest[0] in GIVES_UP and writable and closed)
    return Mount()
