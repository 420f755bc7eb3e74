"""Reading a shard: every byte wherever chunks begin; of another node's what is asked for ahead, in which order."""

from __future__ import annotations

import random
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from eagle_eye.checkpoint.connection import BlockingConnection, ProtocolError
from eagle_eye.checkpoint.messages import Bytes, Read, encode
from eagle_eye.checkpoint.shards import RUN_CHUNKS, LocalShard, RemoteShard, Shard, TensorPlace, _rows, _runs
from eagle_eye.checkpoint.storage import CHUNK_BYTES, SUM_BYTES, Damaged, sums_in, sums_of

DATA = random.Random(1).randbytes(3 * CHUNK_BYTES + 1_000)


class Holder:
    """Answers reads of one shard, over a socket of this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.data = bytearray(DATA)
        self.sums = sums_of(memoryview(DATA))
        self.asked: list[tuple[int, int]] = []
        self.gone = False
        self.connection = BlockingConnection(ours, 10.0)
        self._socket, self._theirs = theirs, BlockingConnection(theirs, 10.0)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def shard(self) -> RemoteShard:
        return RemoteShard(self.connection, ("1-plan", 0, 7), len(DATA), "rank 0's shard")

    def close(self) -> None:
        self.connection.close()
        self._thread.join()
        self._theirs.close()

    def _serve(self) -> None:
        while True:
            try:
                message = self._theirs.receive()
            except OSError:
                return
            if not isinstance(message, Read):
                return
            self.asked.append((message.offset, message.length))
            answer = Bytes(-1 if self.gone else message.length, sums_in(self.sums, message.offset, message.length))
            try:
                self._socket.sendall(encode(answer))
                if not self.gone:
                    self._socket.sendall(self.data[message.offset : message.offset + message.length])
            except OSError:
                return


@pytest.fixture
def holder() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.close()


def _read(shard: Shard, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    found = []
    for offset, count in ranges:
        into = bytearray(count)
        shard.read(offset, memoryview(into))
        found.append(bytes(into))
    return found


def _of(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    return [DATA[offset : offset + count] for offset, count in ranges]


RANGES = st.lists(
    st.integers(0, len(DATA) - 1).flatmap(lambda at: st.tuples(st.just(at), st.integers(0, len(DATA) - at))),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40)
@given(RANGES)
def test_every_byte_is_what_the_other_node_holds_wherever_chunks_begin(ranges: list[tuple[int, int]]) -> None:
    holder = Holder()
    try:
        shard = holder.shard()
        shard.expect(ranges)
        assert _read(shard, ranges) == _of(ranges)
    finally:
        holder.close()


@settings(max_examples=40)
@given(RANGES)
def test_every_byte_is_what_this_node_holds_wherever_chunks_begin(ranges: list[tuple[int, int]]) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(DATA)
        file.flush()
        shard = LocalShard(file.name, len(DATA), sums_of(memoryview(DATA)), "rank 0's shard")
        try:
            shard.expect(ranges)
            assert _read(shard, ranges) == _of(ranges)
        finally:
            shard.close()


def test_a_chunk_of_this_node_that_is_not_what_was_written_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    path.write_bytes(DATA)
    sums = bytearray(sums_of(memoryview(DATA)))
    sums[SUM_BYTES] ^= 1
    shard = LocalShard(str(path), len(DATA), bytes(sums), "rank 0's shard")
    try:
        assert _read(shard, [(0, CHUNK_BYTES)]) == _of([(0, CHUNK_BYTES)])
        with pytest.raises(Damaged, match="chunk 1"):
            _read(shard, [(CHUNK_BYTES, 10)])
    finally:
        shard.close()


def test_nothing_is_fetched_that_is_not_expected(holder: Holder) -> None:
    shard = holder.shard()
    ranges = [(CHUNK_BYTES, CHUNK_BYTES), (3 * CHUNK_BYTES + 5, 10), (CHUNK_BYTES + 5, 10)]
    shard.expect(ranges)
    assert _read(shard, ranges) == _of(ranges)
    assert holder.asked == [(CHUNK_BYTES, CHUNK_BYTES), (3 * CHUNK_BYTES, 1_000), (CHUNK_BYTES, CHUNK_BYTES)]


def test_a_chunk_in_which_several_tensors_lie_is_fetched_once(holder: Holder) -> None:
    shard = holder.shard()
    ranges = [(0, 10), (10, 10), (20, CHUNK_BYTES), (CHUNK_BYTES + 30, 10)]
    shard.expect(ranges)
    assert _read(shard, ranges) == _of(ranges)
    assert holder.asked == [(0, 2 * CHUNK_BYTES)]


def test_a_chunk_that_is_not_what_was_written_is_damaged(holder: Holder) -> None:
    holder.data[CHUNK_BYTES] ^= 1
    shard = holder.shard()
    shard.expect([(0, 2 * CHUNK_BYTES)])
    with pytest.raises(Damaged, match="chunk"):
        shard.read(0, memoryview(bytearray(2 * CHUNK_BYTES)))


def test_a_shard_that_is_gone_meanwhile_is_said_to_be(holder: Holder) -> None:
    holder.gone = True
    shard = holder.shard()
    shard.expect([(0, 10)])
    with pytest.raises(ProtocolError, match="not held there any more"):
        shard.read(0, memoryview(bytearray(10)))


def test_runs_follow_the_order_and_are_no_longer_than_asked_for() -> None:
    numbers = [*range(RUN_CHUNKS + 3), RUN_CHUNKS + 2, 0, 5]
    runs = list(_runs(numbers))
    assert [number for run in runs for number in run] == numbers
    assert max(len(run) for run in runs) == RUN_CHUNKS


@st.composite
def parts_of_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    starts = tuple(draw(st.integers(0, size - 1)) for size in shape)
    lengths = tuple(draw(st.integers(1, size - start)) for size, start in zip(shape, starts, strict=True))
    return shape, starts, lengths


@given(parts_of_tensors())
def test_what_is_read_of_a_tensor_is_the_part_that_is_wanted(
    part: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
) -> None:
    shape, starts, lengths = part
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    place = TensorPlace(MetadataIndex("weight"), 0, tensor.nbytes, 0, tensor.dtype, shape)
    index = MetadataIndex("weight")
    item = ReadItem(LoadItemType.TENSOR, index, torch.Size(starts), index, torch.Size(starts), torch.Size(lengths))
    wanted = tensor
    for axis, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        wanted = wanted.narrow(axis, start, length)
    rows = _rows(item, place)
    if rows is None:
        assert lengths[1:] != shape[1:]
    else:
        assert tensor.numpy().tobytes()[rows[0] : sum(rows)] == wanted.numpy().tobytes()
