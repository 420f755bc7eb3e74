"""A chunk's directory read at once says what it says line by line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.history.history import Batch, Entry
from eagle_eye.server.history.journal_chunks import Draft, found_in, lines

FRAMES = st.tuples(st.integers(0, 5), st.floats(0, 100), st.binary(max_size=9))  # stream, time, bytes
CHUNKS = st.lists(st.lists(FRAMES, max_size=6), max_size=4)


def directory(frames: list[tuple[int, float, bytes]]) -> bytes:
    draft = Draft()
    for sequence, (stream_id, time_s, raw) in enumerate(frames):
        draft.add(stream_id, Batch("n", "s", 1.0, 0.5, ()), Entry(sequence, time_s, raw))
    found = draft.row(0)[6]
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
        for line in lines(raw)
        if line.stream_id in streams and start_s <= line.time_s <= end_s
    ]
