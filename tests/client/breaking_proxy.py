"""A way to a server that a test can break: connections are cut at once, or after so many bytes of the answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16


class BreakingProxy:
    """Hands bytes on to ``url``, and counts ``connections``. While ``away`` it closes what connects.

    It cuts a connection after ``answer_bytes`` of the answer, or when it has handed ``last_words`` on; None: never.
    """

    def __init__(self, url: str, listener: socket.socket) -> None:
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.away = False
        self.answer_bytes: int | None = None
        self.last_words: bytes | None = None
        self.connections = 0
        self._listener = listener
        self._to = (urlsplit(url).hostname, urlsplit(url).port)
        self._open: list[socket.socket] = []

    def cut(self) -> None:
        """Cut all connections that there are."""
        for end in self._open:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve(self) -> None:
        """Take connections until the listener is shut down."""
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.away:
                client.close()
                continue
            server = socket.create_connection(self._to)
            self._open += [client, server]
            for source, target, counted in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._carry, args=(source, target, counted), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, answer: bool) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while content := source.recv(CHUNK_BYTES):
                if answer and self.answer_bytes is not None and carried + len(content) > self.answer_bytes:
                    target.sendall(content[: self.answer_bytes - carried])
                    break
                target.sendall(content)
                carried += len(content)
                if answer and self.last_words is not None and self.last_words in content:
                    break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def breaking(url: str) -> Iterator[BreakingProxy]:
    """Run such a proxy."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = BreakingProxy(url, listener)
        thread = threading.Thread(target=proxy.serve)
        thread.start()
        try:
            yield proxy
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            proxy.cut()
            thread.join(10.0)
            for end in proxy._open:
                end.close()
            assert not thread.is_alive()
