"""The store at which an attempt's agents and ranks meet, served by the launcher. Imports torch."""

from __future__ import annotations

import socket
from datetime import timedelta

# Public and documented, yet not marked as exported.
from torch.distributed import TCPStore  # type: ignore[attr-defined]


class AttemptStore:
    """A fresh store for one attempt, until ``close``, without leftovers of a dead attempt.

    Served by torch's own threads, so that the launcher stays responsive. It listens only on the address given to the
    nodes, since anyone who reaches it can write to it.
    """

    def __init__(self, host: str, port: int) -> None:
        """Raise OSError where the address cannot be listened on. Port 0 picks a free one."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            # The fixed port of the last attempt's store is in TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(4096)
            self.host = host
            self.port: int = listener.getsockname()[1]
        except OSError:
            listener.close()
            raise
        self._store: TCPStore | None = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30),
            master_listen_fd=listener.detach(),
        )  # fmt: skip

    def close(self) -> None:
        """Stop listening."""
        self._store = None
