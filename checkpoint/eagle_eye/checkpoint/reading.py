"""Reads a step from memory: this node's own, or another node's over TCP; each chunk is verified before use."""

from __future__ import annotations

import io
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from eagle_eye.checkpoint.connection import BlockingConnection, ProtocolError, expected
from eagle_eye.checkpoint.layout import JobLayout, TensorPlace, bytes_of
from eagle_eye.checkpoint.messages import Bytes, Read
from eagle_eye.checkpoint.shared_memory import mapped
from eagle_eye.checkpoint.storage import CHUNK_BYTES, SUM_BYTES, Damaged, Verifying, shard_file

_log = logging.getLogger(__name__)
RUN_CHUNKS = 16  # that are asked for at once over the network; one run is on its way while one is read
CACHED_BYTES = 128 << 10  # so much was just copied is still in the core's cache when its checksum is made


class Shard(Protocol):
    """The bytes of a shard, wherever stored."""

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Announce the ranges (offset, length) to be read, in this order. Raises OSError."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill the view with verified bytes from an offset on; undefined after an error. Raises Damaged, OSError."""

    def close(self) -> None:
        """Release it."""


class _Chunked(ABC):
    """A shard that comes in chunks: straight to where they belong if all of one does, else over a buffer."""

    def __init__(self, length: int, what: str) -> None:
        self._length = length
        self._what = what
        self._buffer = memoryview(bytearray(min(CHUNK_BYTES, length)))
        self._buffered = -1

    def read(self, offset: int, into: memoryview) -> None:
        """See Shard."""
        for number, part, at in _parts(offset, len(into)):
            target = into[at : at + len(part)]
            if self._is_whole(number, part):
                self._fill(number, target)
                continue
            if number != self._buffered:
                self._buffered = -1
                self._fill(number, self._buffer[: self._size(number)])
                self._buffered = number
            target[:] = self._buffer[part.start : part.stop]

    @abstractmethod
    def _fill(self, number: int, into: memoryview) -> None:
        """Fill the view with a chunk that is verified. Raises Damaged, OSError."""

    def _filled(self, ranges: Iterable[tuple[int, int]]) -> Iterator[int]:
        """Yield the chunks that reading these ranges fills something with, in this order."""
        buffered = self._buffered
        for offset, count in ranges:
            for number, part, _ in _parts(offset, count):
                if self._is_whole(number, part):
                    yield number
                elif number != buffered:
                    buffered = number
                    yield number

    def _size(self, number: int) -> int:
        return min(CHUNK_BYTES, self._length - number * CHUNK_BYTES)

    def _is_whole(self, number: int, part: range) -> bool:
        return len(part) == self._size(number)


class LocalShard(_Chunked):
    """A shard in this node's shared memory."""

    def __init__(self, path: str, length: int, sums: bytes, what: str) -> None:
        super().__init__(length, what)
        self._map = mapped(path, length, writable=False)
        self._view = memoryview(self._map)
        self._sums = sums

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """All of them are here."""

    def close(self) -> None:
        """Unmap it."""
        self._view.release()
        self._map.close()

    def _fill(self, number: int, into: memoryview) -> None:
        start, verifying = number * CHUNK_BYTES, Verifying()
        for begin in range(0, len(into), CACHED_BYTES):
            piece = into[begin : begin + CACHED_BYTES]
            piece[:] = self._view[start + begin : start + begin + len(piece)]
            verifying.add(piece)
        verifying.check(self._sums, number, self._what)


class RemoteShard(_Chunked):
    """A shard in another node's memory."""

    def __init__(self, connection: BlockingConnection, named: tuple[str, int, int], length: int, what: str) -> None:
        super().__init__(length, what)
        self._connection = connection
        self._named = named  # plan, rank, step
        self._wanted: deque[range] = deque()
        self._asked: deque[range] = deque()
        self._coming, self._sums = range(0), b""

    def expect(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Ask for the first of them."""
        self._wanted.extend(_runs(self._filled(ranges)))
        self._ask()
        self._ask()

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _ask(self) -> None:
        if self._wanted:
            run = self._wanted.popleft()
            self._asked.append(run)
            self._connection.send(Read(*self._named, *self._bytes(run)))

    def _fill(self, number: int, into: memoryview) -> None:
        if not self._coming and self._asked:
            self._coming = self._asked.popleft()
            reported = expected(self._connection.receive(), Bytes)
            if reported.length != self._bytes(self._coming)[1]:
                raise ProtocolError(f"{self._what} is not held there any more")
            self._sums = reported.sums
            self._ask()
        if not self._coming or self._coming[0] != number:
            raise ValueError(f"chunk {number} of {self._what} was not expected now")
        self._coming = self._coming[1:]
        verifying = Verifying()
        self._connection.receive_into(into, verifying.add)
        verifying.check(self._sums, 0, self._what)
        self._sums = self._sums[SUM_BYTES:]

    def _bytes(self, run: range) -> tuple[int, int]:
        """Return where these chunks begin, and their length."""
        begin = run.start * CHUNK_BYTES
        return begin, min(run.stop * CHUNK_BYTES, self._length) - begin


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
            items.sort(key=lambda item: self._range(item)[0])
            self._load_all(self._ranks[name], items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load_all(self, rank: int, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Load the items of a rank's shard from its first copy that is as it was, each anew from the next one."""
        failures: list[OSError | Damaged] = []
        for shard in self._find(rank):
            try:
                shard.expect([self._range(item) for item in items])
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
            offset, length = self._range(item)
            data = bytearray(length)
            self._read(shard, offset, memoryview(data))
            planner.load_bytes(item, io.BytesIO(data))
            return
        place = self._places[item.storage_index]
        target = planner.resolve_tensor(item).detach()
        in_one = _rows(item, place) is not None and target.shape == item.lengths
        if in_one and target.is_contiguous() and target.device.type == "cpu" and target.dtype == place.dtype:
            self._into(shard, item, target)
        else:
            source = self._part(shard, item, place)
            target.copy_(source)
        planner.commit_tensor(item, target)

    def _part(self, shard: Shard, item: ReadItem, place: TensorPlace) -> torch.Tensor:
        """Return the part of a stored tensor that an item wants."""
        if _rows(item, place) is not None:
            source = torch.empty(tuple(item.lengths), dtype=place.dtype)
            self._into(shard, item, source)
            return source
        source = torch.empty(place.shape, dtype=place.dtype)
        self._into(shard, item, source)
        for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            source = source.narrow(axis, start, length)
        return source

    def _into(self, shard: Shard, item: ReadItem, target: torch.Tensor) -> None:
        offset, length = self._range(item)
        if length:
            self._read(shard, offset, bytes_of(target))

    def _range(self, item: ReadItem) -> tuple[int, int]:
        """Return where the bytes begin that are read for an item, and how many there are."""
        if item.type == LoadItemType.BYTE_IO:
            info = self._info(item.storage_index)
            return info.offset, info.length
        place = self._places[item.storage_index]
        first, count = _rows(item, place) or (0, place.data_bytes)
        return place.data_offset + first, count

    def _read(self, shard: Shard, offset: int, into: memoryview) -> None:
        shard.read(offset, into)
        self.bytes_read += len(into)


def _rows(item: ReadItem, place: TensorPlace) -> tuple[int, int] | None:
    """Return where in a tensor's bytes an item begins, and how many it has; None where it is not one piece of them.

    Whole rows are: so other numbers of ranks read what they need of a tensor that is sharded along its first axis.
    """
    starts, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    if lengths == place.shape:
        return 0, place.data_bytes
    if not lengths or lengths[1:] != place.shape[1:] or not place.data_bytes:
        return None
    row_bytes = place.data_bytes // place.shape[0]
    return starts[0] * row_bytes, lengths[0] * row_bytes


def _parts(offset: int, count: int) -> Iterator[tuple[int, range, int]]:
    """Yield the chunks in which so many bytes from an offset on lie, which part of each it is, and where it goes."""
    at = 0
    while at < count:
        number, begin = divmod(offset + at, CHUNK_BYTES)
        part = range(begin, min(CHUNK_BYTES, begin + count - at))
        yield number, part, at
        at += len(part)


def _runs(numbers: Iterable[int]) -> Iterator[range]:
    """Yield the chunks in their order as runs that follow each other."""
    run = range(0)
    for number in numbers:
        if run and number == run.stop and len(run) < RUN_CHUNKS:
            run = range(run.start, number + 1)
            continue
        if run:
            yield run
        run = range(number, number + 1)
    if run:
        yield run
