"""A target on loopback that hands deliveries on to another one, each when a test lets it pass."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx


@dataclass
class Gate:
    """``before`` is called with each event, and may block; ``passed`` has the events handed on and their answers."""

    to: str = ""  # "": nowhere, and each is answered with 200
    url: str = ""
    before: Callable[[dict[str, Any]], None] = lambda _: None
    passed: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, type_: str, epoch: int, within_s: float = 60.0) -> int:
        """Return the answer to an event of this type and epoch once it has passed."""

        def found() -> list[int]:
            return [status for event, status in self.passed if (event["type"], _epoch(event)) == (type_, epoch)]

        with self.changed:
            assert self.changed.wait_for(lambda: bool(found()), within_s), self.passed
            return found()[0]

    def _pass(self, headers: dict[str, str], body: bytes) -> httpx.Response:
        event = json.loads(body)
        self.before(event)
        answer = httpx.Response(200)
        if self.to:
            with httpx.Client(trust_env=False) as client:
                answer = client.post(self.to, content=body, headers=headers)
        with self.changed:
            self.passed.append((event, answer.status_code))
            self.changed.notify_all()
        return answer


def _epoch(event: dict[str, Any]) -> int:
    epoch: int = event["data"].get("epoch", 0)
    return epoch


@contextmanager
def gate(to: str = "") -> Iterator[Gate]:
    state = Gate(to)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            answer = state._pass(kept, body)
            self.send_response(answer.status_code)
            for name in set(answer.headers) - {"content-length", "date", "server"}:
                self.send_header(name, answer.headers[name])
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # the server that sent it is gone

    with Server(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()
