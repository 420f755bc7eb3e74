"""A relay before a server that can be closed, or cut PostgreSQL's connections where a client commits."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Cut = Literal["", "the commit", "its answer"]  # what does not arrive


class CuttingRelay:
    """Passes on what clients and server say, until ``loses`` says what is to be lost, once."""

    def __init__(self, port: int) -> None:
        """``port`` is the server's, on 127.0.0.1."""
        self.to_port = port
        self.loses: Cut = ""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Break off, and take no connection any more."""
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.to_port))
                self._open += [client, server]
                lost = threading.Event()  # from then on the server's answers go nowhere
                threading.Thread(target=self._ask, args=(client, server, lost), daemon=True).start()
                threading.Thread(target=self._answer, args=(client, server, lost), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65_536):
                if self.loses and b"COMMIT" in data:
                    cut, self.loses = self.loses, ""
                    if cut == "the commit":
                        break
                    lost.set()
                server.sendall(data)
            for one in (client, server):
                one.shutdown(socket.SHUT_RDWR)

    def _answer(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65_536):
                if lost.is_set():
                    break
                client.sendall(data)
            for one in (client, server):
                one.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_relay(port: int = 0) -> Iterator[CuttingRelay]:
    """Relay while the block runs."""
    relay = CuttingRelay(port)
    try:
        yield relay
    finally:
        relay.close()
