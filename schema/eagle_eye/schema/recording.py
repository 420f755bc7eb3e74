"""A job's part of the history as one stream: what ``eagle-eye record`` and the Python client read.

The stream is a sequence of messages, each preceded by its length as four bytes, big-endian: an opening (MessagePack
map), then frames in the encoding of ``docs/reference/wire.md``, their times on the server's clock, part by part of the
history. A length of zero ends it; a stream without it was cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from eagle_eye.schema.frame import FRAME_BYTES_MAX

CONTENT_TYPE = "application/x-eagle-eye-recording"
VERSION = 1
OPENING_BYTES_MAX = 256 << 20


class BrokenStream(ValueError):
    """A recording that ends too early or holds something unexpected."""


def messages(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield the messages of a stream; ``read(n)`` returns up to n bytes of it. Raises BrokenStream."""
    limit = OPENING_BYTES_MAX
    while True:
        length = int.from_bytes(_exactly(read, 4), "big")
        if length == 0:
            return
        if length > limit:
            raise BrokenStream(f"a message of {length} bytes is announced; at most {limit} are read")
        limit = 2 * FRAME_BYTES_MAX  # re-encoding may add some bytes
        yield _exactly(read, length)


def message(content: bytes) -> bytes:
    """Return one message of a stream; an empty one ends it."""
    return len(content).to_bytes(4, "big") + content


def _exactly(read: Callable[[int], bytes], length: int) -> bytes:
    parts = []
    while length:
        part = read(length)
        if not part:
            raise BrokenStream("the server's answer was cut off; its log may say why")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
