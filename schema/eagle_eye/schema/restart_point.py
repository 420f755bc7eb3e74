"""Messages between a rank at its restart point and the launcher's runner on its node, one per packet.

The runner listens on a Unix socket in Linux's abstract namespace (SOCK_SEQPACKET), and accepts only processes of its
own user. A rank reports that it has a restart point; that it waits there, once its process group has failed and is
destroyed; and again that it has one, as soon as it has been told to continue.
"""

from __future__ import annotations

import msgspec

PACKET_BYTES_MAX = 256 << 10  # an attempt's environment includes a layout if the job follows a plan
REASON_CHARS_MAX = 300


class AtPoint(msgspec.Struct, frozen=True):
    """A rank of an attempt has a restart point. It ``waits`` there, for the ``reason`` that its collective gave."""

    rank: int
    attempt: int
    waits: bool = False
    reason: str = ""


class GoOn(msgspec.Struct, frozen=True):
    """The next attempt begins for a waiting rank: ``env`` holds the changes to its environment."""

    attempt: int
    env: dict[str, str]
