"""Reading a step out of memory: this node's own, or another node's over TCP, each chunk verified before it is used."""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from eagle_eye.checkpoint.checksums import CHUNK_BYTES, Damaged, check, chunks
from eagle_eye.checkpoint.connection import BlockingConnection, ProtocolError
from eagle_eye.checkpoint.layout import JobLayout, TensorPlace
from eagle_eye.checkpoint.messages import Bytes, Read
from eagle_eye.checkpoint.storage import shard_file

_log = logging.getLogger(__name__)
WINDOW_CHUNKS = 16  # that are asked for at once over the network


class Shard(Protocol):
    """The bytes of a shard, wherever it lies."""

    def chunk(self, number: int, last: int) -> memoryview:
        """Return a verified chunk; those up to ``last`` will be wanted next. Raises Damaged, OSError."""

    def close(self) -> None:
        """Let go of it."""


class LocalShard:
    """A shard in this node's shared memory."""

    def __init__(self, path: str, length: int, sums: bytes, what: str) -> None:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # Private: torch looks at nothing that it could not write to. Nobody does.
            self._map = mmap.mmap(handle, length, access=mmap.ACCESS_COPY)
        finally:
            os.close(handle)
        self._view = memoryview(self._map)
        self._sums = sums
        self._what = what

    def chunk(self, number: int, last: int) -> memoryview:  # noqa: ARG002 - nothing to ask for ahead
        """Return a verified chunk."""
        view = self._view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        check(view, self._sums, number, self._what)
        return view

    def close(self) -> None:
        """Unmap it, as soon as nothing looks at it any more: the trace of an error may still."""
        self._view.release()
        with contextlib.suppress(BufferError):
            self._map.close()


class RemoteShard:
    """A shard in another node's memory."""

    def __init__(self, connection: BlockingConnection, named: tuple[str, int, int], length: int, what: str) -> None:
        self._connection = connection
        self._named = named  # plan, rank, step
        self._length = length
        self._what = what
        self._buffer = memoryview(bytearray(min(WINDOW_CHUNKS * CHUNK_BYTES, length)))
        self._first, self._ends = 0, [0]

    def chunk(self, number: int, last: int) -> memoryview:
        """Return a verified chunk, fetched with those that follow where it was not there yet."""
        if not self._first <= number < self._first + len(self._ends) - 1:
            self._fetch(number, min(last, number + WINDOW_CHUNKS - 1))
        place = number - self._first
        return self._buffer[self._ends[place] : self._ends[place + 1]]

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _fetch(self, first: int, last: int) -> None:
        offset = first * CHUNK_BYTES
        length = min((last + 1) * CHUNK_BYTES, self._length) - offset
        self._first, self._ends = first, [0]
        told = self._connection.ask(Read(*self._named, offset, length), Bytes)
        if told.length != length:
            raise ProtocolError(f"{self._what} is not held there any more")
        for place, (start, end) in enumerate(chunks(0, length)):
            view = self._buffer[start:end]
            self._connection.receive_into(view)
            check(view, told.sums, place, self._what)
            self._ends.append(end)


class MemoryReader(StorageReader):
    """Reads one step for torch.distributed.checkpoint, out of shards whose copies ``find`` yields, by rank."""

    def __init__(
        self, layout: JobLayout, tails: dict[int, Sequence[int]], find: Callable[[int], Iterator[Shard]], step: int
    ) -> None:
        self._metadata = layout.metadata_of(tails, f"memory:{step}")
        self._find = find
        self._ranks = {shard_file(rank): rank for rank in range(len(layout.shards))}
        self._places = {place.index: place for shard in layout.shards for place in shard.tensors}
        self.bytes_read = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a reader reads one step."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the step's."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return them as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No path leads to memory."""
        del checkpoint_id
        return False

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load every item, shard by shard in the order of the bytes. Raises Damaged, OSError."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._info(item.storage_index).relative_path, []).append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: int(self._info(item.storage_index).offset))
            self._load_all(self._ranks[name], items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load_all(self, rank: int, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Load the items of a rank's shard from its first copy that is as it was, each anew from the next one."""
        failures: list[OSError | Damaged] = []
        for shard in self._find(rank):
            try:
                for item in items:
                    self._load(shard, item, planner)
            except (OSError, Damaged) as error:
                _log.warning("the next copy is read: %s", error)
                failures.append(error)
            else:
                return
            finally:
                shard.close()
        raise failures[-1] if failures else OSError(f"no copy of rank {rank}'s shard is left")

    def _info(self, index: MetadataIndex) -> Any:
        return self._metadata.storage_data[index]

    def _load(self, shard: Shard, item: ReadItem, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            info = self._info(item.storage_index)
            data = bytearray(info.length)
            self._read(shard, info.offset, torch.frombuffer(data, dtype=torch.uint8))
            planner.load_bytes(item, io.BytesIO(data))
            return
        place = self._places[item.storage_index]
        target = planner.resolve_tensor(item).detach()
        whole = tuple(item.lengths) == place.shape and target.shape == item.lengths
        if whole and target.is_contiguous() and target.device.type == "cpu" and target.dtype == place.dtype:
            self._into(shard, place, target)
        else:
            source = torch.empty(place.shape, dtype=place.dtype)
            self._into(shard, place, source)
            for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(axis, start, length)
            target.copy_(source)
        planner.commit_tensor(item, target)

    def _into(self, shard: Shard, place: TensorPlace, target: torch.Tensor) -> None:
        if place.data_bytes:
            self._read(shard, place.data_offset, target.view(-1).view(torch.uint8))

    def _read(self, shard: Shard, offset: int, into: torch.Tensor) -> None:
        first, last = offset // CHUNK_BYTES, (offset + len(into) - 1) // CHUNK_BYTES
        filled = 0
        for number in range(first, last + 1):
            if filled == len(into):
                break
            begin = max(offset - number * CHUNK_BYTES, 0)
            piece = shard.chunk(number, last)[begin : begin + len(into) - filled]
            into[filled : filled + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))
            filled += len(piece)
        self.bytes_read += filled
