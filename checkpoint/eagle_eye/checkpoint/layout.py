"""The layout of a rank's shard: a file as torch.distributed.checkpoint would write it.

Each tensor is stored as ``torch.save`` writes it: the bytes around its data (the envelope) are written to a slot once,
and a capture copies only the data. Objects of variable length follow after the tensors (the tail).
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from eagle_eye.checkpoint.device_copies import DeviceCopies
from eagle_eye.checkpoint.state import StateDict
from eagle_eye.checkpoint.storage import shard_file

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
