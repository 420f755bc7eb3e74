"""Decompresses Snappy's block format within the announced and allowed size. Pure.

Specification: https://github.com/google/snappy/blob/main/format_description.txt; a block begins with its uncompressed
length, so that decompression bombs are refused in advance.
"""

from __future__ import annotations

LENGTH_BYTES_MAX = 5  # of the announced length: a 32-bit varint


class BadSnappy(ValueError):
    """Not a complete block. The message says what is wrong."""


def announced_bytes(block: bytes) -> int:
    """Return the uncompressed size that the block announces. Raises BadSnappy."""
    length = 0
    for at, byte in enumerate(block[:LENGTH_BYTES_MAX]):
        length |= (byte & 0x7F) << 7 * at
        if byte < 0x80:
            if length >= 1 << 32:
                break
            return length
    raise BadSnappy("the body does not begin with a length of at most 32 bits, as a Snappy block does")


def uncompressed(block: bytes, announced: int) -> bytes:
    """Return the uncompressed block. Raises BadSnappy unless it has exactly the announced size."""
    if announced == 0:
        if len(block) == 1:
            return b""
        raise BadSnappy("the Snappy block announces nothing and holds something")
    # Imported at the first request: it takes half a second and 40 MB, needed only by servers with remote write.
    import pyarrow as pa

    try:
        content: bytes = pa.Codec("snappy").decompress(block, announced, asbytes=True)
    except (OSError, ValueError, pa.ArrowException):
        raise BadSnappy(f"the Snappy block is damaged: {len(block)} bytes that announce {announced}") from None
    if len(content) != announced:
        raise BadSnappy(f"the Snappy block announces {announced} bytes and holds {len(content)}")
    return content
