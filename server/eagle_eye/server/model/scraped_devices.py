"""What the store keeps of remote write: which devices a node's series told of, and their last error codes."""

from __future__ import annotations

import msgspec


class Watched(msgspec.Struct, frozen=True):
    """A device of which samples came first at ``since_s``; ``code`` is what its gauge of the last error says.

    ``time_s`` is when it was first seen to say so; both None: no such gauge was seen. Unix seconds of the samples.
    """

    since_s: float
    time_s: float | None = None
    code: float | None = None


class LastCodes(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of one node."""

    node: str
    devices: dict[int, Watched] = {}
