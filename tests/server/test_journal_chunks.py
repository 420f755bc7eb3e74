"""A chunk's directory read at once says what it says line by line."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.history.journal_reader import chunks_of, directory_lines, found_in
from eagle_eye.server.model.batch import Batch, StreamRef

FRAMES = st.tuples(st.integers(0, 5), st.floats(0, 100), st.binary(max_size=9))  # stream, time, bytes
CHUNKS = st.lists(st.lists(FRAMES, max_size=6), max_size=4)


def directory(frames: list[tuple[int, float, bytes]]) -> bytes:
    if not frames:
        return b""
    ref = StreamRef("n", "s")
    batch = Batch.of((ref, sequence, time_s, 1.0, 0.5, raw) for sequence, (_, time_s, raw) in enumerate(frames))
    ids = [stream_id for stream_id, _, _ in frames]
    ((*_, found, _),) = chunks_of(batch, ids, [0] * len(ids), [True] * len(ids), 1 << 20)
    assert isinstance(found, bytes)
    return found


@given(CHUNKS, st.lists(st.integers(0, 5)), st.floats(0, 100), st.floats(0, 100))
def test_the_lines_found_are_those_of_the_streams_in_the_range(
    chunks: list[list[tuple[int, float, bytes]]], streams: list[int], start_s: float, end_s: float
) -> None:
    directories = [(number, directory(frames)) for number, frames in enumerate(chunks)]
    assert list(found_in(directories, streams, start_s, end_s).lines()) == [
        (number, line)
        for number, raw in directories
        for line in directory_lines(raw)
        if line.stream_id in streams and start_s <= line.time_s <= end_s
    ]


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=9), st.booleans()), min_size=1), st.integers(1, 20))
def test_chunks_hold_what_is_new_in_order_and_no_more_than_a_chunk_may(
    frames: list[tuple[int, bytes, bool]], bytes_max: int
) -> None:
    ref = StreamRef("n", "s")
    batch = Batch.of((ref, sequence, 1.0, 2.0, 0.5, raw) for sequence, (_, raw, _) in enumerate(frames))
    shards, new = [shard for shard, _, _ in frames], [one for _, _, one in frames]
    found: dict[int, list[tuple[int, bytes]]] = {0: [], 1: [], 2: []}
    chunks: list[tuple[Any, ...]] = list(chunks_of(batch, shards, shards, new, bytes_max))
    for shard, count, size, received_s, first_s, last_s, directory, raw in chunks:
        told = [(line.sequence, raw[line.at : line.at + line.size]) for line in directory_lines(directory)]
        assert (len(told), len(raw), received_s, first_s, last_s) == (count, size, 2.0, 1.5, 1.5)
        assert size <= bytes_max or count == 1
        found[shard] += told
    for shard, told in found.items():
        assert told == [(at, raw) for at, (of, raw, is_new) in enumerate(frames) if of == shard and is_new]
