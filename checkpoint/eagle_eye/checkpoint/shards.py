"""A rank's shard: laid out as the file that torch.distributed.checkpoint would write, and read from memory again.

Each tensor is stored as ``torch.save`` writes it: the bytes around its data (the envelope) are written to a slot once,
and a capture copies only the data. Objects of variable length follow after the tensors (the tail). A step is read from
this node's memory or another node's over TCP; each chunk is verified before use.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import io
import logging
import os
import pickle
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from torch.optim import Optimizer

from eagle_eye.checkpoint.connection import BlockingConnection, ProtocolError, expected
from eagle_eye.checkpoint.messages import Bytes, Read
from eagle_eye.checkpoint.shared_memory import mapped
from eagle_eye.checkpoint.state import StateDict, address_of
from eagle_eye.checkpoint.storage import CHUNK_BYTES, SUM_BYTES, Damaged, Verifying, shard_file

# Copies a state into a slot from host memory, and from a GPU concurrently with the following steps.
#
# GPU tensors are copied to pinned memory without blocking the host. Parameters and optimizer tensors change only in an
# optimizer step: they are copied on a separate stream, for which the next step waits on the GPU. All other tensors,
# which may change at any time, are copied on the program's own stream, in order.
_log = logging.getLogger(__name__)


class DeviceCopies(Protocol):
    """Copies one rank's tensors into its slots. One capture at a time, by one thread."""

    def attach(self, slot: memoryview) -> None:
        """Prepare a slot for copies."""

    def detach(self, slot: memoryview) -> None:
        """Release a slot: no copy into it is or will be in progress."""

    def begin(self) -> None:
        """Start a capture: from now on copies take the current values."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor into the slot, or schedule the copy."""

    def end(self) -> Callable[[], None] | None:
        """Return a function that waits, in another thread, until all copies are done; None if they are."""

    def close(self) -> None:
        """Stop: no copy is in progress, and no slot is attached."""


class HostCopies:
    """For host tensors: each copy is done when ``copy`` returns."""

    def attach(self, slot: memoryview) -> None:
        """See Copies."""

    def detach(self, slot: memoryview) -> None:
        """See Copies."""

    def begin(self) -> None:
        """See Copies."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Copies."""
        target.copy_(source)

    def end(self) -> Callable[[], None] | None:
        """See Copies."""
        return None

    def close(self) -> None:
        """See Copies."""


class CudaCopies:
    """For tensors of one GPU, and of the host. ``cuda`` is ``torch.cuda``.

    Our own stream is used only after an observed step, and never again once a step was captured into a CUDA graph: a
    replay is not observable.
    """

    def __init__(self, device: torch.device, optimizers: Sequence[Optimizer], cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._optimizers = optimizers
        self._stream = cuda.Stream(device)
        self._optimized: frozenset[int] = frozenset()
        self._events: list[Any] = []  # behind the last capture's copies: on our own stream, on the program's
        # Slots by address. What is pinned must not be unmapped: whatever is mapped there next would be taken for it.
        self._pinned: dict[int, memoryview] = {}
        self._step_seen = self._in_graphs = False
        # An optimizer may outlive capturing, and must keep nothing else alive.
        before_step = weakref.WeakMethod(self._before_step)
        self._hooks = [one.register_step_pre_hook(lambda *_: _call(before_step)) for one in optimizers]
        self._unpin_all = weakref.finalize(self, _unpin_all, cuda, self._events, self._pinned)
        self._unpin_all.atexit = False  # at exit nothing is mapped any more

    def attach(self, slot: memoryview) -> None:
        """See Copies. Memory that cannot be pinned is still copied into, but blocks the host."""
        if not self._unpin_all.alive:
            return  # closed
        address = _address(slot)
        code = int(self._cuda.cudart().cudaHostRegister(address, len(slot), 0))
        if code == 0:
            self._pinned[address] = slot
        else:
            _log.warning("%d bytes of shared memory are not pinned, and captures wait: CUDA error %d", len(slot), code)
            _forget_error()

    def detach(self, slot: memoryview) -> None:
        """See Copies."""
        _wait_for(self._events)
        address = _address(slot)
        if self._pinned.pop(address, None) is not None:
            _unpin(self._cuda, address)

    def close(self) -> None:
        """See Copies."""
        for hook in self._hooks:
            hook.remove()
        self._unpin_all()

    def begin(self) -> None:
        """See Copies."""
        aside = self._step_seen and not self._in_graphs
        self._step_seen = False
        self._optimized = frozenset(_addresses_of(self._optimizers)) if aside else frozenset()
        self._stream.wait_stream(self._cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Copies."""
        if source.device != self._device or source.data_ptr() not in self._optimized:
            target.copy_(source, non_blocking=source.device.type == "cuda")
            return
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)  # its memory is not reused before it is copied

    def end(self) -> Callable[[], None] | None:
        """See Copies."""
        events = (self._stream.record_event(), self._cuda.current_stream(self._device).record_event())
        self._events[:] = events
        return partial(_wait_for, events)

    def _before_step(self) -> None:
        """Make an optimizer's stream, not the host, wait for copies before it changes their sources."""
        if self._cuda.is_current_stream_capturing():
            self._in_graphs = True
            return
        self._step_seen = True
        if self._events:
            self._cuda.current_stream(self._device).wait_event(self._events[0])


def copies_for(devices: Collection[torch.device], optimizers: Sequence[Optimizer]) -> DeviceCopies:
    """Return how to copy tensors of these devices. On several GPUs, or another accelerator, the host blocks."""
    gpus = [device for device in devices if device.type == "cuda"]
    return CudaCopies(gpus[0], optimizers) if len(gpus) == 1 else HostCopies()


def _addresses_of(optimizers: Sequence[Optimizer]) -> list[int]:
    """Return the addresses of the tensors that these optimizers change."""
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensors = [parameter, *optimizer.state.get(parameter, {}).values()]
                found += [address_of(one) for one in tensors if isinstance(one, torch.Tensor)]
    return found


def _wait_for(events: Sequence[Any]) -> None:
    for event in events:
        event.synchronize()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call it if its object still exists."""
    found = method()
    if found is not None:
        found()


def _unpin_all(cuda: Any, events: Sequence[Any], pinned: dict[int, memoryview]) -> None:
    with contextlib.suppress(RuntimeError):  # the GPU has failed: no copy is in progress any more
        _wait_for(events)
    while pinned:
        address, slot = pinned.popitem()
        _unpin(cuda, address)
        del slot  # not before


def _unpin(cuda: Any, address: int) -> None:
    if int(cuda.cudart().cudaHostUnregister(address)):
        _forget_error()


def _forget_error() -> None:
    """Clear a failed call's error from the CUDA runtime, which keeps it for this thread.

    Otherwise the training's next kernel launch in this thread fails with it. Torch has no call for this.
    """
    version = torch.version.cuda
    if version is not None:
        with contextlib.suppress(OSError, AttributeError):  # linked statically: there is no other way to it
            ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}").cudaGetLastError()


def _address(slot: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(slot))


ALIGNED_BYTES = 64  # so that every data type may be viewed in place
TAIL_SPARE_BYTES = 1 << 20  # objects may grow by as much again and this
MAC_BYTES = 32
PY_BUF_WRITE = 0x200
_memoryview_of = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_of.argtypes, _memoryview_of.restype = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int), ctypes.py_object


class DoesNotMatch(ValueError):
    """The state has changed: an item is new, missing, too long, or of another shape or type."""


@dataclass(frozen=True)
class TensorPlace:
    """The offsets of a tensor's envelope and data."""

    index: MetadataIndex
    offset: int
    length: int
    data_offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def data_bytes(self) -> int:
        """The length of its data."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class ShardLayout:
    """The layout of one rank's shard."""

    tensors: tuple[TensorPlace, ...]
    objects: tuple[MetadataIndex, ...]
    tail_offset: int


@dataclass(frozen=True)
class JobLayout:
    """All ranks' layout, with the metadata of the whole state; ``plan`` is its name, which begins with their number."""

    plan: str
    shards: tuple[ShardLayout, ...]
    metadata: Metadata

    def metadata_of(self, tails: dict[int, Sequence[int]], checkpoint_id: str = "") -> Metadata:
        """Return the metadata of one step, given the lengths of each rank's objects."""
        places: dict[MetadataIndex, Any] = {}
        for rank, shard in enumerate(self.shards):
            name = shard_file(rank)
            for place in shard.tensors:
                places[place.index] = _StorageInfo(name, place.offset, place.length)
            offset = shard.tail_offset
            for index, length in zip(shard.objects, tails[rank], strict=True):
                places[index] = _StorageInfo(name, offset, length)
                offset += length
        return Metadata(
            state_dict_metadata=self.metadata.state_dict_metadata,
            planner_data=self.metadata.planner_data,
            storage_data=places,
            storage_meta=StorageMeta(checkpoint_id=checkpoint_id),
            version=CURRENT_DCP_VERSION,
        )

    def pack(self, key: bytes) -> bytes:
        """Return it for stores to keep: pickled, so it is only read back if signed with this job's key."""
        data = pickle.dumps(self)
        return hmac.new(key, data, hashlib.sha256).digest() + data


def unpack(blob: bytes, key: bytes) -> JobLayout:
    """Return what ``pack`` packed. Raises ValueError without the key's signature."""
    mac, data = blob[:MAC_BYTES], blob[MAC_BYTES:]
    if not hmac.compare_digest(mac, hmac.new(key, data, hashlib.sha256).digest()):
        raise ValueError("a plan without this job's key on it")
    layout: JobLayout = pickle.loads(data)  # noqa: S301 - made by a rank of this job: the line before
    return layout


def named(shards: Sequence[ShardLayout], metadata: Metadata) -> JobLayout:
    """Return a job's layout with a name that is the same for the same state on the same number of ranks."""
    text = hashlib.sha256()
    for shard in shards:
        for place in shard.tensors:
            text.update(
                repr((place.index.fqn, place.index.offset, place.data_offset, place.dtype, place.shape)).encode()
            )
        text.update(repr(([(index.fqn, index.offset) for index in shard.objects], shard.tail_offset)).encode())
    return JobLayout(f"{len(shards)}-{text.hexdigest()[:16]}", tuple(shards), metadata)


class ShardWriter:
    """Writes one rank's shards by a plan agreed by all ranks."""

    def __init__(self, planner: DefaultSavePlanner, plan: SavePlan) -> None:
        self._planner = planner
        self._tensor_items = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        self._object_items = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        self._pickled: dict[int, tuple[bytes, bytes]] = {}
        self._envelopes: list[tuple[bytes, bytes]] = []
        self._keys = frozenset(planner.state_dict)
        places = []
        offset = 0
        self.devices: set[torch.device] = set()
        for item in self._tensor_items:
            tensor = self._tensor(item)
            self.devices.add(tensor.device)
            place, envelope = _enveloped(item.index, tensor, offset)
            places.append(place)
            self._envelopes.append(envelope)
            offset = _aligned(place.offset + place.length)
        self.layout = ShardLayout(tuple(places), tuple(item.index for item in self._object_items), offset)
        tail = sum(len(data) for data in self._objects())
        # In whole spares: objects of a few bytes more than in the last attempt need no other slots.
        self.capacity_bytes = offset + -(-2 * tail // TAIL_SPARE_BYTES) * TAIL_SPARE_BYTES + TAIL_SPARE_BYTES

    def prepare(self, slot: memoryview) -> list[torch.Tensor]:
        """Write the envelopes into a slot; return views into it, the targets of a capture."""
        targets = []
        for place, (before, behind) in zip(self.layout.tensors, self._envelopes, strict=True):
            slot[place.offset : place.data_offset] = before
            end = place.data_offset + place.data_bytes
            slot[end : place.offset + place.length] = behind
            targets.append(tensor_at(slot, place))
        return targets

    def write(
        self, state: StateDict, slot: memoryview, targets: Sequence[torch.Tensor], copies: DeviceCopies
    ) -> tuple[int, tuple[int, ...]]:
        """Copy the state into a prepared slot; return the shard's length and those of its objects.

        GPU data is complete once ``copies`` reports it. Raises DoesNotMatch where the state has another shape than the
        plan: then the slot holds nothing of use.
        """
        self._planner.set_up_planner(state, is_coordinator=self._planner.is_coordinator)
        if self._planner.state_dict.keys() != self._keys:
            changed = sorted(self._planner.state_dict.keys() ^ self._keys)
            raise DoesNotMatch(f"{len(changed)} entries have come or gone, the first is {changed[0]}")
        with torch.no_grad():
            for item, target in zip(self._tensor_items, targets, strict=True):
                source = self._tensor(item)
                if source.shape != target.shape or source.dtype != target.dtype:
                    was, now = (tuple(target.shape), target.dtype), (tuple(source.shape), source.dtype)
                    raise DoesNotMatch(f"{item.index.fqn} is {now}, and was {was}")
                copies.copy(target, source)
        offset, lengths = self.layout.tail_offset, []
        for data in self._objects():
            if offset + len(data) > len(slot):
                raise DoesNotMatch(f"objects of {offset + len(data) - self.layout.tail_offset:,} bytes do not fit")
            slot[offset : offset + len(data)] = data
            lengths.append(len(data))
            offset += len(data)
        return offset, tuple(lengths)

    def _tensor(self, item: WriteItem) -> torch.Tensor:
        found: torch.Tensor = self._planner.lookup_object(item.index)
        return found.detach()

    def _objects(self) -> list[bytes]:
        """Return the objects as they are saved. Most never change, and are not saved anew."""
        found = []
        for number, item in enumerate(self._object_items):
            value = self._planner.lookup_object(item.index)
            plain = pickle.dumps(value)
            before = self._pickled.get(number)
            if before is None or before[0] != plain:
                buffer = io.BytesIO()
                torch.save(value, buffer)
                before = self._pickled[number] = (plain, buffer.getvalue())
            found.append(before[1])
        return found


def tensor_at(data: memoryview, place: TensorPlace) -> torch.Tensor:
    """Return a view of the tensor there."""
    if place.data_bytes == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    count = place.data_bytes // place.dtype.itemsize
    return torch.frombuffer(data, dtype=place.dtype, count=count, offset=place.data_offset).view(place.shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor of the CPU, to be written, for as long as the tensor is there."""
    view: memoryview = _memoryview_of(tensor.data_ptr(), tensor.nbytes, PY_BUF_WRITE)
    return view


def _enveloped(index: MetadataIndex, tensor: torch.Tensor, offset: int) -> tuple[TensorPlace, tuple[bytes, bytes]]:
    """Return where a tensor will lie, and what ``torch.save`` writes before and behind its data."""
    buffer = io.BytesIO()
    computes_sums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # they would be of other data; torch.load does not look at them
    try:
        torch.save(torch.zeros(tensor.shape, dtype=tensor.dtype), buffer)
    finally:
        torch.serialization.set_crc32_options(computes_sums)
    data = buffer.getbuffer()
    buffer.seek(0)
    reader: Any = torch._C.PyTorchFileReader(buffer)  # its stub lacks what follows
    begin = reader.get_record_offset("data/0")
    place = TensorPlace(index, offset, len(data), offset + begin, tensor.dtype, tuple(tensor.shape))
    return place, (bytes(data[:begin]), bytes(data[begin + place.data_bytes :]))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNED_BYTES) * ALIGNED_BYTES


# Reads a step from memory: this node's own, or another node's over TCP.
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
