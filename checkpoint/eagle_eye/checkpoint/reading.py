"""Reading a step out of memory: this node's own, or another node's over TCP, each chunk verified before it is used."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from eagle_eye.checkpoint.checksums import CHUNK_BYTES, SUM_BYTES, Damaged, check
from eagle_eye.checkpoint.connection import BlockingConnection, ProtocolError, expected
from eagle_eye.checkpoint.layout import JobLayout, TensorPlace
from eagle_eye.checkpoint.messages import Bytes, Read
from eagle_eye.checkpoint.shared_memory import mapped
from eagle_eye.checkpoint.storage import shard_file

_log = logging.getLogger(__name__)
RUN_CHUNKS = 16  # that are asked for at once over the network; one run is on its way while one is read


class Shard(Protocol):
    """The bytes of a shard, wherever it lies."""

    def expect(self, numbers: Sequence[int]) -> None:
        """These chunks will be read, in this order, each perhaps several times in a row. Raises OSError."""

    def chunk(self, number: int) -> memoryview:
        """Return a verified chunk, which stays as it is until the next one is read. Raises Damaged, OSError."""

    def close(self) -> None:
        """Let go of it."""


class LocalShard:
    """A shard in this node's shared memory."""

    def __init__(self, path: str, length: int, sums: bytes, what: str) -> None:
        # To read and write, as torch looks at nothing that it could not write to: nobody does. All pages at once, for
        # one by one they cost as much as the copy.
        self._map = mapped(path, length)
        self._view = memoryview(self._map)
        self._sums = sums
        self._what = what
        self._verified = -1

    def expect(self, numbers: Sequence[int]) -> None:
        """All of them are here."""

    def chunk(self, number: int) -> memoryview:
        """Return a verified chunk: verified once for all of the tensors that lie in it, if they are small."""
        view = self._view[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        if number != self._verified:
            check(view, self._sums, number, self._what)
            self._verified = number
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
        self._buffer = memoryview(bytearray(min(CHUNK_BYTES, length)))
        self._number = -1
        self._view = self._buffer[:0]
        self._wanted: deque[range] = deque()
        self._asked: deque[range] = deque()
        self._coming, self._sums = range(0), b""

    def expect(self, numbers: Sequence[int]) -> None:
        """Ask for the first of them."""
        self._wanted.extend(_runs(numbers))
        self._ask()
        self._ask()

    def chunk(self, number: int) -> memoryview:
        """Return a verified chunk: the one that was read last, or the next that is expected."""
        if number != self._number:
            self._receive(number)
        return self._view

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _ask(self) -> None:
        if self._wanted:
            run = self._wanted.popleft()
            self._asked.append(run)
            self._connection.send(Read(*self._named, *self._bytes(run)))

    def _receive(self, number: int) -> None:
        if not self._coming and self._asked:
            self._coming = self._asked.popleft()
            told = expected(self._connection.receive(), Bytes)
            if told.length != self._bytes(self._coming)[1]:
                raise ProtocolError(f"{self._what} is not held there any more")
            self._sums = told.sums
            self._ask()
        if not self._coming or self._coming[0] != number:
            raise ValueError(f"chunk {number} of {self._what} was not expected now")
        self._coming, self._number = self._coming[1:], number
        self._view = self._buffer[: self._bytes(range(number, number + 1))[1]]
        self._connection.receive_into(self._view)
        check(self._view, self._sums, 0, self._what)
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
                shard.expect([number for item in items for number in self._chunks(item)])
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

    def _chunks(self, item: ReadItem) -> range:
        """Return the chunks that an item is in."""
        if item.type == LoadItemType.BYTE_IO:
            info = self._info(item.storage_index)
            return _chunks_of(info.offset, info.length)
        place = self._places[item.storage_index]
        return _chunks_of(place.data_offset, place.data_bytes)

    def _read(self, shard: Shard, offset: int, into: torch.Tensor) -> None:
        filled = 0
        for number in _chunks_of(offset, len(into)):
            begin = max(offset - number * CHUNK_BYTES, 0)
            piece = shard.chunk(number)[begin : begin + len(into) - filled]
            into[filled : filled + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))
            filled += len(piece)
        self.bytes_read += filled


def _chunks_of(offset: int, length: int) -> range:
    """Return the chunks that so many bytes from an offset on lie in; none for none."""
    return range(offset // CHUNK_BYTES, -(-(offset + length) // CHUNK_BYTES) if length else offset // CHUNK_BYTES)


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Yield the chunks in their order as runs that follow each other; one that comes again at once is one."""
    run = range(0)
    for number in numbers:
        if run and number == run[-1]:
            continue
        if run and number == run.stop and len(run) < RUN_CHUNKS:
            run = range(run.start, number + 1)
            continue
        if run:
            yield run
        run = range(number, number + 1)
    if run:
        yield run
