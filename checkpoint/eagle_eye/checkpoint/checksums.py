"""Checksums of a shard's chunks: xxh3, 64 bits, eight bytes each in one string. Pure.

They detect hardware damage, above all of memory, not forgery: write access is protected by keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

CHUNK_BYTES = 1 << 20  # small enough that a chunk is still in a cache after being checked
SUM_BYTES = 8


class Damaged(ValueError):
    """A chunk differs from what was written."""


def chunks(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the chunks of a range that starts at a chunk boundary."""
    for start in range(offset, offset + length, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, offset + length)


def sums_of(data: memoryview) -> bytes:
    """Return the checksums of all chunks."""
    return b"".join(xxhash.xxh3_64_digest(data[start:end]) for start, end in chunks(0, len(data)))


def sums_in(sums: bytes, offset: int, length: int) -> bytes:
    """Return the checksums of a range that starts at a chunk boundary."""
    first = offset // CHUNK_BYTES
    return sums[first * SUM_BYTES : (first + -(-length // CHUNK_BYTES)) * SUM_BYTES]


def check(chunk: memoryview, sums: bytes, number: int, what: str) -> None:
    """Raise Damaged, naming ``what``, unless the chunk is unchanged."""
    verifying = Verifying()
    verifying.add(chunk)
    verifying.check(sums, number, what)


class Verifying:
    """Computes one chunk's checksum piece by piece, while each just-copied piece is in a cache."""

    def __init__(self) -> None:
        self._sum = xxhash.xxh3_64()

    def add(self, piece: memoryview) -> None:
        """Add the next piece."""
        self._sum.update(piece)

    def check(self, sums: bytes, number: int, what: str) -> None:
        """Raise Damaged, naming ``what``, unless the pieces are the unchanged chunk."""
        if self._sum.digest() != sums[number * SUM_BYTES : (number + 1) * SUM_BYTES]:
            raise Damaged(f"{what}: chunk {number} of {CHUNK_BYTES >> 20} MiB does not have its checksum")


def check_all(data: memoryview, sums: bytes, what: str) -> None:
    """Raise Damaged unless every chunk is unchanged."""
    if len(sums) != -(-len(data) // CHUNK_BYTES) * SUM_BYTES:
        raise Damaged(f"{what}: {len(data)} bytes with {len(sums) // SUM_BYTES} checksums")
    for number, (start, end) in enumerate(chunks(0, len(data))):
        check(data[start:end], sums, number, what)
