"""From memory to storage: the shards of a whole step become a plain checkpoint folder, behind the training's back.

Each store writes the files of its node's ranks into ``step_N.partial``; the coordinator adds ``.metadata``, which makes
a torch.distributed.checkpoint folder complete, once every file is there, and gives the folder its name.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

PIECE_BYTES = 4 << 20
METADATA = ".metadata"


def shard_file(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint folder, as torch.distributed.checkpoint names it."""
    return f"__{rank}_0.distcp"


def folder_of(directory: str, step: int) -> Path:
    """Return the folder of a complete checkpoint."""
    return Path(directory) / f"step_{step}"


def write_shard(directory: str, step: int, rank: int, data: memoryview, rate_bytes_per_s: float | None) -> None:
    """Write one shard, at most at a rate, and see it onto the disk. Raises OSError."""
    folder = _partial(directory, step)
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    with (folder / shard_file(rank)).open("wb") as file:
        for start in range(0, len(data), PIECE_BYTES):
            file.write(data[start : start + PIECE_BYTES])
            _keep_to_rate(time.sleep, time.monotonic() - began_s, min(start + PIECE_BYTES, len(data)), rate_bytes_per_s)
        file.flush()
        os.fsync(file.fileno())


def complete(directory: str, step: int, metadata: bytes, captured_s: float) -> Path:
    """All files are there: the folder is complete, and has its name. Raises OSError.

    The modification time of its metadata is the capture's: what was captured later is newer, however late this is done.
    """
    part, folder = _partial(directory, step), folder_of(directory, step)
    with (part / METADATA).open("wb") as file:
        file.write(metadata)
        file.flush()
        os.fsync(file.fileno())
    os.utime(part / METADATA, (captured_s, captured_s))
    if folder.exists():
        shutil.rmtree(folder)  # of an attempt whose steps were not to be trusted, or that was resumed before it
    part.rename(folder)
    return folder


def discard(directory: str, step: int) -> None:
    """What was written of a step that will not be complete is gone. Never raises."""
    shutil.rmtree(_partial(directory, step), ignore_errors=True)


def _partial(directory: str, step: int) -> Path:
    return Path(directory) / f"step_{step}.partial"


def _keep_to_rate(sleep: Callable[[float], None], passed_s: float, written: int, rate: float | None) -> None:
    if rate is not None and written / rate > passed_s:
        sleep(written / rate - passed_s)
