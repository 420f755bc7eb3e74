"""A lighthouse that is played: its page has what is read of torchft 0.2's, and nothing else."""

from __future__ import annotations

import html
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


def status_page(quorum_id: int, replicas: Mapping[str, tuple[int, str]], ages: Mapping[str, float]) -> str:
    """Return the page for replicas (step and manager's URL by id), of which it heard so many seconds ago."""
    members = "".join(
        f'<div class="member\n ">\n<b>{html.escape(replica)}</b> <br/>\n'
        f"Step: {step} <br/>\nManager: {manager} <br/>\n</div>\n"
        for replica, (step, manager) in replicas.items()
    )
    beats = "".join(f"<li>\n    {html.escape(replica)}: seen {age}s ago\n</li>\n" for replica, age in ages.items())
    return f"Current quorum_id: {quorum_id} <br>\n{members}<h2>Heartbeats</h2>\n{beats}"


@dataclass
class FakeLighthouse:
    """Replicas take a step each time that somebody looks. ``hung`` ones ignore being killed.

    ``replaced_on`` starts what was killed again on that host, as a launcher would; what is new takes steps.
    """

    replicas: dict[str, str] = field(default_factory=dict)  # host by id
    step: int = 7
    quorum_id: int = 1
    replaced_on: str = ""
    hung: set[str] = field(default_factory=set)
    stands_still: bool = False
    flaps: bool = False  # each look sees a new quorum
    killed: list[str] = field(default_factory=list)
    dead: dict[str, float] = field(default_factory=dict)
    page: str = ""  # instead of the usual one
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, fake.status() if self.path == "/status" else "")

            def do_POST(self) -> None:
                self._answer(500, fake.kill(unquote(self.path.split("/")[2])))

            def _answer(self, status: int, text: str) -> None:
                content = text.encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def status(self) -> str:
        with self._lock:
            if self.page:
                return self.page
            self.step += not self.stands_still
            self.quorum_id += self.flaps
            replicas = {replica: (self.step, f"http://{host}:40251") for replica, host in self.replicas.items()}
            return status_page(self.quorum_id, replicas, {**dict.fromkeys(self.replicas, 0.05), **self.dead})

    def kill(self, replica: str) -> str:
        with self._lock:
            if replica not in self.replicas:
                return "Something went wrong: failed to find replica"
            self.killed.append(replica)
            if replica not in self.hung:
                del self.replicas[replica]
                self.dead[replica] = 6.0
                self.quorum_id += 1
                if self.replaced_on:
                    self.stands_still = False
                    self.replicas[f"{replica.rpartition(':')[0]}:new-{len(self.killed)}"] = self.replaced_on
            return 'Something went wrong: status: Unknown, message: "transport error"'
