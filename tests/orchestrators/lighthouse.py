"""A lighthouse that answers as torchft 0.2.0's does (tests/data/torchft/status.html is a page of the real one)."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

_MEMBER = """
<div class="member
">
  <b>{id}</b> <br/>
  Step: {step} <br/>
  Manager: http://{host}:40251 <br/>
  TCPStore: 127.0.0.1:41597 <br/>
  World size: 1 <br/>
  <button hx-post="/replica/{id}/kill"
          hx-trigger="click">
    Kill
  </button>
</div>
"""
_HEARTBEAT = """
  <li class="heartbeat
  ">
    {id}: seen {age}s ago
  </li>
"""


@dataclass
class FakeLighthouse:
    """Replicas take a step each time that somebody looks. ``hung`` ones ignore being killed.

    ``replaced_on`` starts what was killed again on that host, as a launcher would.
    """

    replicas: dict[str, str] = field(default_factory=dict)  # host by id
    step: int = 7
    quorum_id: int = 1
    replaced_on: str = ""
    hung: set[str] = field(default_factory=set)
    stands_still: bool = False
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
            if not self.stands_still:
                self.step += 1
            members = "".join(_MEMBER.format(id=i, step=self.step, host=host) for i, host in self.replicas.items())
            ages = {**dict.fromkeys(self.replicas, 0.05), **self.dead}
            beats = "".join(_HEARTBEAT.format(id=replica, age=age) for replica, age in ages.items())
            return (
                f"\nCurrent quorum_id: {self.quorum_id} <br>\nNext quorum status: waiting\n\n<h3>Previous Quorum</h3>\n"
                f"Previous quorum id: {self.quorum_id} <br>\n<div>{members}</div>\n"
                f"<h2>Heartbeats</h2>\n<ul>{beats}</ul>"
            )

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
                    self.replicas[f"{replica.rpartition(':')[0]}:new-{len(self.killed)}"] = self.replaced_on
            return 'Something went wrong: status: Unknown, message: "transport error"'
