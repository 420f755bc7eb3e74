from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.transport.spool_files import (
    FILE_BYTES_MAX,
    RECORD_BYTES,
    NoSpoolFile,
    SpooledFrame,
    SpoolFile,
    opening,
    parse,
    read,
    record,
)
from eagle_eye.schema.frame import FRAME_BYTES_MAX

kept = st.lists(st.tuples(st.floats(0, 4e9), st.binary(max_size=200)), max_size=6).map(
    lambda pairs: [SpooledFrame(number, time_s, frame) for number, (time_s, frame) in enumerate(pairs, 1)]
)


def content(frames: list[SpooledFrame]) -> bytes:
    return opening("n1", "s1") + b"".join(map(record, frames))


@given(frames=kept)
def test_what_was_written_is_read(frames: list[SpooledFrame]) -> None:
    assert parse(content(frames)) == ("n1", "s1", tuple(frames), 0, 0)


@given(junk=st.binary(max_size=400) | st.binary(max_size=60).map(lambda tail: opening("n1", "s1") + tail))
def test_any_bytes_are_read_or_refused(junk: bytes) -> None:
    try:
        found = parse(junk)
    except NoSpoolFile:
        return
    assert sum(RECORD_BYTES + len(each.frame) for each in found.frames) <= len(junk)


@given(frames=kept, data=st.data())
def test_a_file_cut_off_anywhere_has_all_frames_before_the_cut(frames: list[SpooledFrame], data: st.DataObject) -> None:
    whole = content(frames)
    head = len(opening("n1", "s1"))
    cut = data.draw(st.integers(head, len(whole)))
    found = parse(whole[:cut])
    ends = [len(content(frames[:count])) for count in range(len(frames) + 1)]
    assert found.frames == tuple(frames[: sum(end <= cut for end in ends) - 1])
    assert (found.torn_bytes, found.damaged_bytes) == (cut - max(end for end in ends if end <= cut), 0)


@given(frames=kept.filter(bool), data=st.data())
def test_a_damaged_byte_costs_what_follows_it_and_makes_up_nothing(
    frames: list[SpooledFrame], data: st.DataObject
) -> None:
    whole = bytearray(content(frames))
    at = data.draw(st.integers(len(opening("n1", "s1")), len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    found = parse(bytes(whole))
    intact = sum(len(content(frames[:count])) <= at for count in range(len(frames) + 1)) - 1
    assert found.frames == tuple(frames[:intact])
    assert found.torn_bytes + found.damaged_bytes == len(whole) - len(content(frames[:intact]))


def test_a_record_longer_than_any_frame_is_damage() -> None:
    long = record(SpooledFrame(1, 1.0, bytes(FRAME_BYTES_MAX + 1)))
    assert parse(opening("n1", "s1") + long).damaged_bytes == len(long)


def test_a_sequence_that_goes_back_is_damage() -> None:
    assert parse(content([SpooledFrame(2, 1.0, b"a"), SpooledFrame(2, 1.0, b"b")])).damaged_bytes == RECORD_BYTES + 1


def test_a_file_of_any_size_is_read_to_a_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as made:
        made.write(content([SpooledFrame(1, 1.0, b"a")]))
        made.truncate(1 << 34)
    found = read(file)
    assert found.frames == (SpooledFrame(1, 1.0, b"a"),)
    assert found.damaged_bytes < FILE_BYTES_MAX


def test_beginning_anew_forgets_what_was_there(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "file", "n1", "s1")
    file.write([SpooledFrame(1, 1.0, b"a" * 100), SpooledFrame(2, 1.0, b"b")], anew=False)
    file.write([SpooledFrame(3, 1.0, b"c")], anew=True)
    file.write([SpooledFrame(4, 1.0, b"d")], anew=False)
    file.close()
    assert [each.sequence for each in read(file.path).frames] == [3, 4]


def test_a_write_that_fails_half_way_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SpoolFile(tmp_path / "file", "n1", "s1")
    file.write([SpooledFrame(1, 1.0, b"a")], anew=False)
    whole, calls = os.pwrite, []

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "no space left on device")
        return whole(descriptor, data[: len(data) // 2], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="no space"):
            file.write([SpooledFrame(2, 1.0, b"b" * 100)], anew=False)
    assert read(file.path) == ("n1", "s1", (SpooledFrame(1, 1.0, b"a"),), 0, 0)
    file.write([SpooledFrame(2, 1.0, b"b")], anew=False)
    assert [each.sequence for each in read(file.path).frames] == [1, 2]
    file.close()
