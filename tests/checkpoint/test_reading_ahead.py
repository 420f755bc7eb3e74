"""A shard in another node's memory: what is asked for ahead, in which order, and what each answer must be."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest

from eagle_eye.checkpoint.checksums import CHUNK_BYTES, Damaged, sums_in, sums_of
from eagle_eye.checkpoint.connection import BlockingConnection, ProtocolError
from eagle_eye.checkpoint.messages import Bytes, Read, encode
from eagle_eye.checkpoint.reading import RUN_CHUNKS, RemoteShard, _runs

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


def test_every_chunk_is_what_the_other_node_holds(holder: Holder) -> None:
    shard = holder.shard()
    shard.expect([0, 0, 1, 2, 2, 2, 3])
    for number in (0, 0, 1, 2, 2, 2, 3):
        assert shard.chunk(number) == DATA[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]


def test_nothing_is_fetched_that_is_not_expected(holder: Holder) -> None:
    shard = holder.shard()
    shard.expect([1, 3, 1])
    assert shard.chunk(1) == DATA[CHUNK_BYTES : 2 * CHUNK_BYTES]
    assert shard.chunk(3) == DATA[3 * CHUNK_BYTES :]
    assert shard.chunk(1) == DATA[CHUNK_BYTES : 2 * CHUNK_BYTES]
    assert holder.asked == [(CHUNK_BYTES, CHUNK_BYTES), (3 * CHUNK_BYTES, 1_000), (CHUNK_BYTES, CHUNK_BYTES)]


def test_a_chunk_that_is_not_what_was_written_is_damaged(holder: Holder) -> None:
    holder.data[CHUNK_BYTES] ^= 1
    shard = holder.shard()
    shard.expect([0, 1])
    shard.chunk(0)
    with pytest.raises(Damaged, match="chunk"):
        shard.chunk(1)


def test_a_shard_that_is_gone_meanwhile_is_said_to_be(holder: Holder) -> None:
    holder.gone = True
    shard = holder.shard()
    shard.expect([0])
    with pytest.raises(ProtocolError, match="not held there any more"):
        shard.chunk(0)


def test_runs_follow_the_order_and_are_no_longer_than_asked_for() -> None:
    numbers = [*range(RUN_CHUNKS + 3), RUN_CHUNKS + 2, 0, 5]
    runs = list(_runs(numbers))
    assert [number for run in runs for number in run] == [*range(RUN_CHUNKS + 3), 0, 5]
    assert max(len(run) for run in runs) == RUN_CHUNKS
