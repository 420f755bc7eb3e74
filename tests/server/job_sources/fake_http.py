"""A small HTTP server for tests: each path answers what a function makes of the request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

from tests.loopback import served


@dataclass
class Asked:
    """One request; ``write`` sends a part of a body without a given length."""

    path: str
    query: dict[str, str]
    headers: dict[str, str]
    write: Callable[[bytes], None] = field(repr=False, default=lambda _: None)


Answer = tuple[int, bytes] | None  # None: it has written its answer itself


@contextmanager
def serving(answer: Callable[[Asked], Answer]) -> Iterator[str]:
    """Serve on a free port of loopback; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            split = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(split.query).items()}
            headers = {name.lower(): value for name, value in self.headers.items()}
            begun = False

            def write(part: bytes) -> None:
                nonlocal begun
                if not begun:
                    self.send_response(200)
                    self.end_headers()
                    begun = True
                self.wfile.write(part)
                self.wfile.flush()

            try:
                said = answer(Asked(split.path, query, headers, write))
                if said is not None:
                    self.send_response(said[0])
                    self.send_header("content-length", str(len(said[1])))
                    self.end_headers()
                    self.wfile.write(said[1])
            except (BrokenPipeError, ConnectionResetError):
                return  # the client had enough

        def log_message(self, *_: object) -> None:
            return

    with served(Handler) as port:
        yield f"http://127.0.0.1:{port}"
