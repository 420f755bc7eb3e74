"""Reads a database's write-ahead log (SQLite's format: https://www.sqlite.org/fileformat2.html#walformat).

SQLite uses the frames up to the first wrong checksum and silently ignores the rest: after a power cut that is the
transaction that was never acknowledged. More than that is damage.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

HEADER = struct.Struct(">IIIIIIII")  # magic, version, page size, checkpoint, two salts, two sums
FRAME = struct.Struct(">IIIIII")  # page, database size in pages if it ends a commit, two salts, two sums
MAGIC, BIG_ENDIAN = 0x377F0682, 1
_MASK = 0xFFFFFFFF

_Sums = tuple[int, int]


class Log(NamedTuple):
    """The whole commits are in the first ``bytes``: ``pages``, and the database's ``size_pages`` (0: no commit).

    ``damaged``: behind them is more than one unacknowledged commit.
    """

    bytes: int
    pages: frozenset[int]
    size_pages: int
    damaged: bool


def read(path: Path) -> Log:
    """Return the log's contents; one that does not exist or was never written is empty. Raises OSError."""
    try:
        with path.open("rb") as file:
            return _read(file)
    except FileNotFoundError:
        return Log(0, frozenset(), 0, damaged=False)


def _read(file: BinaryIO) -> Log:
    head = file.read(HEADER.size)
    if len(head) < HEADER.size or not any(head):
        return Log(0, frozenset(), 0, damaged=False)
    magic, _, page_bytes, _, *salts, one, two = HEADER.unpack(head)
    order = ">u4" if magic & BIG_ENDIAN else "<u4"
    sums = (one, two)
    whole = magic & ~BIG_ENDIAN == MAGIC and sums == _sums(np.frombuffer(head[:24], order), (0, 0))
    if not whole:
        return Log(0, frozenset(), 0, damaged=bool(file.read(1)))
    pages: set[int] = set()
    pending: set[int] = set()
    end, size_pages, lost = HEADER.size, 0, 0
    while len(frame := file.read(FRAME.size + page_bytes)) == FRAME.size + page_bytes:
        page, commit, *of_frame, one, two = FRAME.unpack_from(frame)
        if of_frame != salts:  # of an earlier round, already in the database
            if whole:
                break
            continue
        if whole:
            sums = _sums(np.frombuffer(frame[:8] + frame[FRAME.size :], order), sums)
            whole = sums == (one, two)
        if not whole:
            lost += commit != 0
            continue
        pending.add(page)
        if commit:
            pages |= pending
            pending.clear()
            end, size_pages = file.tell(), commit
    return Log(end, frozenset(pages), size_pages, damaged=lost > 1)


def _sums(words: np.ndarray[Any, Any], before: _Sums) -> _Sums:
    """Return SQLite's checksum of the words, continuing from ``before``: s0 += x0 + s1; s1 += x1 + s0 for each pair."""
    weights = _weights(len(words) // 2)
    (a, b), (c, d) = weights.before
    words = words.astype(np.uint32)
    return (
        (a * before[0] + b * before[1] + int(np.dot(weights.first, words))) & _MASK,
        (c * before[0] + d * before[1] + int(np.dot(weights.second, words))) & _MASK,
    )


class _Weights(NamedTuple):
    before: tuple[_Sums, _Sums]
    first: np.ndarray[Any, Any]
    second: np.ndarray[Any, Any]


@lru_cache(maxsize=8)
def _weights(pairs: int) -> _Weights:
    """Return the weight of each word in the sums of ``pairs`` pairs: the recurrence is linear."""
    (a, b), (c, d) = (1, 0), (0, 1)  # the steps after a pair, as a matrix
    first, second = np.empty(2 * pairs, np.uint32), np.empty(2 * pairs, np.uint32)
    for at in range(2 * pairs - 2, -1, -2):
        first[at], first[at + 1] = (a + b) & _MASK, b
        second[at], second[at + 1] = (c + d) & _MASK, d
        (a, b), (c, d) = ((a + b) & _MASK, (a + 2 * b) & _MASK), ((c + d) & _MASK, (c + 2 * d) & _MASK)
    return _Weights(((a, b), (c, d)), first, second)
