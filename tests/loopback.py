"""Ports that are free, and HTTP servers of tests, each on a free port of loopback and a thread of its own."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Below those that Linux gives to outgoing connections and to binds of port 0: nobody gets one of these by chance
# between the question and its use.
PORTS = range(20_000, 30_000)


def free_port() -> int:
    """Return a port on which nobody listens, for what is told its port and opens it later."""
    for port in random.SystemRandom().sample(PORTS, 1_000):  # two processes with the same seed draw differently
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port in {PORTS}")


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Requests are answered by the handler; yields the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
