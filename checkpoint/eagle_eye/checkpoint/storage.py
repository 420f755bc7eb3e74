"""Persists the shards of a whole step from memory as a plain checkpoint folder, in the background.

Each store writes the files of its node's ranks into a folder ``step_N.attempt_K.partial``; the coordinator adds
``.metadata``, which makes a torch.distributed.checkpoint folder complete, once every file is there, and renames the
folder. An earlier attempt that is still writing uses a folder of its own, never one that is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from eagle_eye.schema.checkpoint_files import METADATA, step_folders

# Checksums of a shard's chunks: xxh3, 64 bits, eight bytes each in one string.
#
# They detect hardware damage, above all of memory, not forgery: write access is protected by keys.
CHUNK_BYTES = 1 << 20  # small enough that a chunk is still in a cache after being checked
SUM_BYTES = 8


class Damaged(ValueError):
    """A chunk differs from what was written."""


def chunks(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the chunks of a range that starts at a chunk boundary."""
    for start in range(offset, offset + length, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, offset + length)


def sums_of(data: memoryview) -> bytes:
    """Return the checksums of all chunks."""
    return b"".join(xxhash.xxh3_64_digest(data[start:end]) for start, end in chunks(0, len(data)))


def sums_in(sums: bytes, offset: int, length: int) -> bytes:
    """Return the checksums of a range that starts at a chunk boundary."""
    first = offset // CHUNK_BYTES
    return sums[first * SUM_BYTES : (first + -(-length // CHUNK_BYTES)) * SUM_BYTES]


def check(chunk: memoryview, sums: bytes, number: int, what: str) -> None:
    """Raise Damaged, naming ``what``, unless the chunk is unchanged."""
    verifying = Verifying()
    verifying.add(chunk)
    verifying.check(sums, number, what)


class Verifying:
    """Computes one chunk's checksum piece by piece, while each just-copied piece is in a cache."""

    def __init__(self) -> None:
        self._sum = xxhash.xxh3_64()

    def add(self, piece: memoryview) -> None:
        """Add the next piece."""
        self._sum.update(piece)

    def check(self, sums: bytes, number: int, what: str) -> None:
        """Raise Damaged, naming ``what``, unless the pieces are the unchanged chunk."""
        if self._sum.digest() != sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]:
            raise Damaged(f"{what}: chunk {number} of {CHUNK_BYTES >> 20} MiB does not have its checksum")


def check_all(data: memoryview, sums: bytes, what: str) -> None:
    """Raise Damaged unless every chunk is unchanged."""
    if len(sums) != -(-len(data) // CHUNK_BYTES) * SUM_BYTES:
        raise Damaged(f"{what}: {len(data)} bytes with {len(sums) // SUM_BYTES} checksums")
    for number, (start, end) in enumerate(chunks(0, len(data))):
        check(data[start:end], sums, number, what)


PARTIAL, SET_ASIDE = ".partial", ".set_aside_"

T = TypeVar("T")


def shard_file(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint folder, as torch.distributed.checkpoint names it."""
    return f"__{rank}_0.distcp"


def folder_of(directory: str, step: int) -> Path:
    """Return the folder of a complete checkpoint."""
    return Path(directory) / f"step_{step}"


def partial(directory: str, step: int, attempt: int) -> Path:
    """Return the folder of one that is being written."""
    return Path(directory) / f"step_{step}.attempt_{attempt}{PARTIAL}"


def write_shard(
    folder: Path, rank: int, data: memoryview, sums: bytes, rate_bytes_per_s: float | None, wanted: Callable[[], bool]
) -> None:
    """Write one shard, at most at a rate, and see it onto the disk, as long as it is wanted.

    Each chunk is compared with its checksum: memory that is damaged gets no further. Raises OSError, Damaged.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    with (folder / shard_file(rank)).open("wb") as file:
        for number, (start, end) in enumerate(chunks(0, len(data))):
            if not wanted():
                raise InterruptedError("another attempt has begun")
            check(data[start:end], sums, number, f"rank {rank}")
            file.write(data[start:end])
            _keep_to_rate(time.sleep, time.monotonic() - began_s, end, rate_bytes_per_s)
        file.flush()
        os.fsync(file.fileno())


def complete(directory: str, step: int, attempt: int, metadata: bytes, captured_s: float) -> Path:
    """All files are there: the folder is complete, and has its name. Raises OSError.

    The modification time of its metadata is the capture's: what was captured later is newer, however late this is done.
    """
    part, folder = partial(directory, step, attempt), folder_of(directory, step)
    with (part / METADATA).open("wb") as file:
        file.write(metadata)
        file.flush()
        os.fsync(file.fileno())
    os.utime(part / METADATA, (captured_s, captured_s))
    _synced(part)
    old = folder.with_name(f"{folder.name}.before_attempt_{attempt}{PARTIAL}")
    if folder.exists():  # of an attempt whose steps were not to be trusted, or that was resumed before it
        folder.rename(old)
    part.rename(folder)
    _synced(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
    for left in folder.parent.glob(f"step_*{PARTIAL}"):  # by a coordinator that was started anew in between
        of_step, _, _ = left.name.removeprefix("step_").partition(".")
        if of_step.isdecimal() and int(of_step) < step:
            shutil.rmtree(left, ignore_errors=True)
    return folder


def set_aside(directory: str, step: int, attempt: int) -> list[str]:
    """Complete checkpoints of later steps than this one, which are not to be trusted, are found no more.

    Return the names that they have now, for people: each ends in the ``attempt`` that did so. Raises OSError.
    """
    later = [one.path for one in step_folders(Path(directory)) if one.step > step]
    return sorted(path.rename(path.with_name(f"{path.name}{SET_ASIDE}{attempt}")).name for path in later)


def discard(directory: str, step: int, attempt: int) -> None:
    """What was written of a step that will not be complete is gone. Never raises."""
    shutil.rmtree(partial(directory, step, attempt), ignore_errors=True)


def discard_others(directory: str, attempt: int) -> None:
    """What other attempts have not completed is gone. Never raises."""
    for path in Path(directory).glob(f"step_*{PARTIAL}"):
        _, _, of_attempt = path.name.removesuffix(PARTIAL).rpartition("attempt_")
        if of_attempt.isdecimal() and int(of_attempt) != attempt:
            shutil.rmtree(path, ignore_errors=True)


async def apart(work: Callable[..., T], *arguments: Any) -> T:
    """Return what the work returns, in a thread of its own.

    Storage may hang for as long as it likes: neither what else waits for threads nor the end of the process does so
    for it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # the work has returned

    def run() -> None:
        result, failure = None, None
        try:
            result = work(*arguments)
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits for it
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, result, failure)

    threading.Thread(target=run, name=f"storage-{work.__name__}", daemon=True).start()
    return await done


def _synced(folder: Path) -> None:
    """The names in the folder are on the disk, where the filesystem knows how."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def _keep_to_rate(sleep: Callable[[float], None], passed_s: float, written: int, rate: float | None) -> None:
    if rate is not None and written / rate > passed_s:
        sleep(written / rate - passed_s)
