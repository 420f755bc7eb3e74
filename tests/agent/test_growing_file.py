"""One file that another process writes, read line by line while it grows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.agent.foreign_files import LINE_BYTES_MAX, GrowingFile

MUCH = 1 << 20


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "train.log"
    file.write_bytes(b"")
    return file


def tail_of(log: Path) -> GrowingFile:
    return GrowingFile(os.open(log, os.O_RDONLY))


def append(log: Path, data: bytes) -> None:
    with log.open("ab") as file:
        file.write(data)


def test_each_line_is_read_once_and_a_partial_one_waits(log: Path) -> None:
    tail = tail_of(log)
    append(log, b"one\ntw")
    assert tail.read(MUCH) == b"one\n"
    assert tail.read(MUCH) == b""
    append(log, b"o\nthree")
    assert tail.read(MUCH) == b"two\n"
    append(log, b"\n")
    assert tail.read(MUCH) == b"three\n"
    assert tail.skipped_bytes == 0
    tail.close()


def test_a_carriage_return_ends_a_line(log: Path) -> None:
    tail = tail_of(log)
    append(log, b" 10%|\r 20%|\r 30%|")
    assert tail.read(MUCH).split() == [b"10%|", b"20%|"]
    tail.close()


def test_a_file_that_was_cut_short_is_read_from_its_beginning(log: Path) -> None:
    tail = tail_of(log)
    append(log, b"a long first line\nsecond par")
    tail.read(MUCH)
    log.write_bytes(b"new\n")
    assert tail.read(MUCH) == b"new\n"
    tail.close()


def test_a_file_that_was_renamed_or_removed_is_read_to_its_end(log: Path) -> None:
    tail = tail_of(log)
    with log.open("ab") as file:
        log.rename(log.with_suffix(".log.1"))
        log.write_bytes(b"the next file\n")
        file.write(b"last words\n")
        file.flush()
        assert tail.read(MUCH) == b"last words\n"
        log.with_suffix(".log.1").unlink()
        file.write(b"the very last\n")
        file.flush()
        assert tail.read(MUCH) == b"the very last\n"
    tail.close()


def test_of_a_flood_the_newest_is_read_and_the_rest_counted(log: Path) -> None:
    tail = tail_of(log)
    append(log, b"".join(b"line %06d\n" % number for number in range(100_000)))
    lines = tail.read(4_096)
    assert lines.endswith(b"line 099999\n")
    assert all(len(line) == 11 for line in lines.splitlines())
    assert tail.skipped_bytes == 100_000 * 12 - len(lines)
    assert tail.read(4_096) == b""
    assert tail.skipped_bytes == 0
    tail.close()


def test_a_line_of_ten_megabytes_is_left_out_and_costs_no_memory(log: Path) -> None:
    tail = tail_of(log)
    append(log, b"before\n")
    read, skipped, long_lines = [], 0, 0
    for piece in (*[b"x" * 100_000] * 100, b"\nafter\n"):
        append(log, piece)
        read.append(tail.read(MUCH))
        skipped += tail.skipped_bytes
        long_lines += tail.long_lines
        assert len(tail._rest) <= LINE_BYTES_MAX
    assert b"".join(read) == b"before\nafter\n"
    assert (skipped, long_lines) == (10_000_001, 1)
    tail.close()


def test_a_line_that_is_longer_than_what_is_read_at_once_is_whole(log: Path) -> None:
    tail = tail_of(log)
    line = b"x" * 250 + b"\n"
    read = []
    for begin in range(0, len(line), 100):
        append(log, line[begin : begin + 100])
        read.append(tail.read(100))
    assert b"".join(read) == line
    tail.close()


def test_reading_may_begin_inside_a_line_which_is_left_out(log: Path) -> None:
    append(log, b"one\ntwo\nthree\n")
    tail = tail_of(log)
    tail.begin_at(2)
    assert tail.read(MUCH) == b"two\nthree\n"
    tail.close()


@settings(max_examples=100)
@given(st.lists(st.tuples(st.binary(max_size=60), st.integers(1, 64), st.booleans()), max_size=20))
def test_of_any_bytes_in_any_pieces_whole_lines_are_read_each_once_and_all_else_is_counted(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[bytes, int, bool]]
) -> None:
    log = tmp_path_factory.mktemp("tail") / "log"
    log.write_bytes(b"")
    tail = tail_of(log)
    reported = written = 0
    left: list[bytes] = []
    for data, most, cut in pieces:
        if cut:
            log.write_bytes(b"")
            tail.read(most)
            reported, written, left = 0, 0, []
        append(log, data)
        written += len(data)
        left = (b"".join(left) + data.replace(b"\r", b"\n")).splitlines(keepends=True)
        lines = tail.read(most)
        assert len(lines) <= most + LINE_BYTES_MAX
        assert lines == b"" or lines.endswith(b"\n")
        reported += len(lines) + tail.skipped_bytes
        assert reported + len(tail._rest) == written
        for line in lines.splitlines(keepends=True):  # in their order, each once
            assert line in left
            left = left[left.index(line) + 1 :]
    tail.close()
