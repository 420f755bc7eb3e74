"""Checksums of a shard's chunks: xxh3, 64 bits, eight bytes each in one string. Pure.

They find damage by hardware, memory above all, and not forgery: who may write is decided by keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

CHUNK_BYTES = 1 << 20  # small enough that what was just checked is copied out of a cache
SUM_BYTES = 8


class Damaged(ValueError):
    """A chunk is not what was written."""


def chunks(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the chunks of a range that starts at a chunk's beginning."""
    for start in range(offset, offset + length, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, offset + length)


def sums_of(data: memoryview) -> bytes:
    """Return the checksums of all chunks."""
    return b"".join(xxhash.xxh3_64_digest(data[start:end]) for start, end in chunks(0, len(data)))


def sums_in(sums: bytes, offset: int, length: int) -> bytes:
    """Return those of a range that starts at a chunk's beginning."""
    first = offset // CHUNK_BYTES
    return sums[first * SUM_BYTES : (first + -(-length // CHUNK_BYTES)) * SUM_BYTES]


def check(chunk: memoryview, sums: bytes, number: int, what: str) -> None:
    """Raise Damaged, naming what it is, unless the chunk is the one that was written."""
    verifying = Verifying()
    verifying.add(chunk)
    verifying.check(sums, number, what)


class Verifying:
    """Makes the checksum of one chunk, piece by piece: of what was just copied, while it is in a cache."""

    def __init__(self) -> None:
        self._sum = xxhash.xxh3_64()

    def add(self, piece: memoryview) -> None:
        """This comes next."""
        self._sum.update(piece)

    def check(self, sums: bytes, number: int, what: str) -> None:
        """Raise Damaged, naming what it is, unless the pieces are the chunk that was written."""
        if self._sum.digest() != sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]:
            raise Damaged(f"{what}: chunk {number} of {CHUNK_BYTES >> 20} MiB does not have its checksum")


def check_all(data: memoryview, sums: bytes, what: str) -> None:
    """Raise Damaged unless every chunk is the one that was written."""
    if len(sums) != -(-len(data) // CHUNK_BYTES) * SUM_BYTES:
        raise Damaged(f"{what}: {len(data)} bytes with {len(sums) // SUM_BYTES} checksums")
    for number, (start, end) in enumerate(chunks(0, len(data))):
        check(data[start:end], sums, number, what)
