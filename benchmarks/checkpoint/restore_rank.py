"""A rank that loads its state over and over, as ``restore.py`` says. Run as ``-m`` with its folder, stores and disk."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.checkpoint.machine import Memcpy, forget_cached, receive_over_loopback, send_over_loopback
from benchmarks.checkpoint.rank import begun, ended
from benchmarks.checkpoint.restore import RestorePlan
from benchmarks.checkpoint.site import Site, await_that
from eagle_eye.checkpoint import MemoryCheckpointer
from eagle_eye.schema.checkpoint_files import FOLDER_VARIABLE

JOB = "restore"
SETTLED_WITHIN_S = 120.0
MEMCPY_BYTES_MAX = 512 << 20  # more fits in no cache, and the copies need the memory


class Timed(MemoryCheckpointer):
    """One that knows how long the loading itself took: planning and reading, not the reserving of memory after it."""

    load_s = 0.0
    restored_step = 0

    def _load(self, reader: Any) -> None:
        began_s = time.perf_counter()
        super()._load(reader)
        self.load_s = time.perf_counter() - began_s


class Pace:
    """Waits until as many bytes as have passed may have."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = time.perf_counter()

    def passed(self, count: int) -> None:
        """So many bytes have."""
        self._free_s = max(self._free_s, time.perf_counter() - 0.01) + count / self._bytes_per_s
        if (ahead_s := self._free_s - time.perf_counter()) > 0.001:
            time.sleep(ahead_s)


class Slow(io.RawIOBase):
    """A file that is read no faster than the rate."""

    def __init__(self, file: io.BufferedReader, pace: Pace) -> None:
        self._file = file
        self._pace = pace

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go there."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return where it stands."""
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, and wait."""
        count = self._file.readinto(buffer)
        self._pace.passed(count)
        return count


class SharedFileSystem(FileSystem):
    """torch's file system, at a rank's share of a shared one: reads are no faster."""

    def __init__(self, bytes_per_s: float) -> None:
        self._pace = Pace(bytes_per_s)

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file."""
        with Path(path).open(mode) as file:
            yield Slow(cast("io.BufferedReader", file), self._pace) if mode == "rb" else cast("io.IOBase", file)


class Rank:
    """The state, and what was found so far."""

    def __init__(self, rank: int, plan: RestorePlan, site: Site) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(plan.seed + rank)
        self.rank = rank
        self.plan = plan
        self.site = site
        self.nodes = ["n1", "n2"]
        elements = plan.rank_bytes // plan.tensors // 4
        self.state = {f"rank{rank}_{number}": torch.randn(elements) for number in range(plan.tensors)}
        self.sum = self._sum()
        self.right = True
        self.checkpointer = self._begun()
        self.load_s: dict[str, list[float]] = {}
        self.restore_s: dict[str, list[float]] = {}

    def keep(self) -> None:
        """The first step is whole in memory, and on the disk."""
        self.checkpointer.capture(1)
        await_that(lambda: self.checkpointer.whole_step == 1, SETTLED_WITHIN_S, "step 1 whole")
        self._leave()
        save(self.state, checkpoint_id=self.site.disk / "step_1")

    def own(self) -> None:
        """Both ranks start again where they were."""
        self._restored("own")

    def neighbour(self) -> None:
        """The second rank's node is lost; it starts again on a new one."""
        if self.rank == 1:
            self.site.lose_node(self.nodes[1])
        self.nodes[1] = f"n{int(self.nodes[1][1:]) + 1}"
        if self.rank == 1:
            self.site.start_store(self.nodes[1])
        self._restored("neighbour")

    def storage(self) -> None:
        """Out of files that the page cache does not hold."""
        dist.barrier()
        forget_cached(self.site.disk / "step_1")
        self._loaded("storage", FileSystemReader(self.site.disk / "step_1"))

    def share(self) -> None:
        """Out of files that the page cache holds, no faster than a share of a shared file system."""
        reader = FileSystemReader(self.site.disk / "step_1")
        reader.fs = SharedFileSystem(self.plan.share_bytes_per_s)
        self._loaded("share", reader)

    def _begun(self) -> Timed:
        os.environ[FOLDER_VARIABLE] = str(self.site.folder(self.nodes[self.rank]))
        directory = self.site.disk / "checkpoints"
        one = Timed(self.state, directory, keep=1, job=JOB, node=self.nodes[self.rank])
        one.restored_step = one.restore()
        return one

    def _leave(self) -> None:
        """This attempt is over, as when the rank dies: its memory stays, and is mapped by the stores alone."""
        self.checkpointer._client.close(ended=False)
        self.checkpointer._slots.clear()
        gc.collect()
        dist.barrier()

    def _restored(self, arm: str) -> None:
        self._spoil()
        dist.barrier()
        began_s = time.perf_counter()
        self.checkpointer = self._begun()
        self._found(arm, self.checkpointer.load_s)
        self.restore_s.setdefault(arm, []).append(time.perf_counter() - began_s)
        self.right &= self.checkpointer.restored_step == 1
        await_that(self._whole_again, SETTLED_WITHIN_S, "both copies on both nodes")
        self._leave()

    def _loaded(self, arm: str, reader: FileSystemReader) -> None:
        self._spoil()
        dist.barrier()
        began_s = time.perf_counter()
        load(self.state, storage_reader=reader)
        self._found(arm, time.perf_counter() - began_s)
        dist.barrier()

    def _found(self, arm: str, took_s: float) -> None:
        self.load_s.setdefault(arm, []).append(took_s)
        self.right &= self._sum() == self.sum

    def _whole_again(self) -> bool:
        held = [
            {copy["rank"] for copy in job["copies"] if copy["step"] == 1}
            for node in self.nodes
            for job in self.site.jobs_of(node)
        ]
        return held == [{0, 1}, {0, 1}]

    def _spoil(self) -> None:
        for tensor in self.state.values():
            tensor.fill_(-1.0)

    def _sum(self) -> int:
        found = xxhash.xxh3_64()
        for tensor in self.state.values():
            found.update(tensor.numpy().tobytes())
        return found.intdigest()


def main() -> None:
    """Measure, and write what was found."""
    rank, work, stores, disk, plan = begun(RestorePlan)
    job = Rank(rank, plan, Site(stores, disk))
    job.keep()
    copied_bytes = min(plan.rank_bytes, MEMCPY_BYTES_MAX)
    memcpy, copies, sent = Memcpy(copied_bytes), [], []
    for _ in range(plan.rounds):
        dist.barrier()
        copies.append(min(memcpy.seconds() for _ in range(3)) * plan.rank_bytes / copied_bytes)
        sent.append(_over_loopback(rank, plan.rank_bytes))
        for arm in (job.own, job.neighbour, job.storage, job.share):
            arm()
    found = {"load_s": job.load_s, "restore_s": job.restore_s, "memcpy_s": copies, "tcp_s": sent, "right": job.right}
    ended(work, rank, found)


def _over_loopback(rank: int, size_bytes: int) -> float:
    """Return how long TCP takes from rank 0 to rank 1, at rank 1; 0 at rank 0."""
    reported: list[Any] = [None]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reported[0] = listener.getsockname()[1]
        dist.broadcast_object_list(reported, src=1)
        took_s = 0.0
        if rank == 1:
            took_s = receive_over_loopback(listener, size_bytes)
        else:
            send_over_loopback(reported[0], size_bytes)
        dist.barrier()
        return took_s


if __name__ == "__main__":
    main()
