"""What a rank at its restart point and the launcher's runner on its node say to each other, one message a packet.

The runner listens on a Unix socket in Linux's abstract namespace (SOCK_SEQPACKET), and takes processes of its own user
alone. A rank says that it has a restart point; that it waits there, once its process group broke and is gone; and again
that it has one, as soon as it has been told to go on.
"""

from __future__ import annotations

import msgspec

PACKET_BYTES_MAX = 256 << 10  # the environment of an attempt has a layout in it, where the job follows a plan
REASON_CHARS_MAX = 300


class AtPoint(msgspec.Struct, frozen=True):
    """A rank of an attempt has a restart point. It ``waits`` there, for the ``reason`` that its collective gave."""

    rank: int
    attempt: int
    waits: bool = False
    reason: str = ""


class GoOn(msgspec.Struct, frozen=True):
    """The next attempt begins for a rank that waits: ``env`` is what of its environment is new."""

    attempt: int
    env: dict[str, str]
