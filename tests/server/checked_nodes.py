"""Nodes that are out of service and may be checked, each on a server that many tests share."""

from __future__ import annotations

from typing import Any

import httpx
from msgspec.structs import replace

from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.records import Node
from eagle_eye.server.store.store import EVENTS, Change
from tests.server.builders import NOW, FakeClock, Running, body, frame

PASSED = {"name": "gemm", "state": "passed", "reason": "fine", "duration_s": 3.0, "expected": True, "values": []}
OUT = Node(node="n1", state="excluded", reason="gpu_lost: inc_1", updated_s=NOW - 10, by="server", fault="gpu_lost")


class Site:
    """A node of its own on a server that many tests share."""

    def __init__(self, server: Running, clock: Clock, node: str = "n1") -> None:
        self.server = server
        self.clock = clock
        self.node = node
        self.store = server.dispatcher.services.store
        self._sequence = 0

    def hear(self, says: str = "ok") -> dict[str, Any]:
        """Have the node's agent send a frame; return the answer. A second passes, in which open requests are read."""
        self.wait(1.0)
        self._sequence += 1
        time_s = self.clock.now_s()
        collectors = {"node_check": says} if says else {}
        sent = frame(self._sequence, self.node, time_s, collectors=collectors, job="", ranks=[])
        reported: dict[str, Any] = self.server.send(body(sent, sent_s=time_s)).json()
        return reported

    def wait(self, seconds: float) -> None:
        """Let the time pass, where it does not do so by itself."""
        if isinstance(self.clock, FakeClock):
            self.clock.advance(seconds)

    def out(self, **more: Any) -> None:
        self.store.commit(Change(nodes=(replace(OUT, node=self.node, **more),)))

    def readmit(self, **query: Any) -> httpx.Response:
        return self.server.client.post(f"/api/v1/nodes/{self.node}/readmit", params=query)

    def look(self, **query: Any) -> httpx.Response:
        return self.server.client.post(f"/api/v1/nodes/{self.node}/check", params=query)

    def tell(self, id_: str, state: str = "done", **more: Any) -> httpx.Response:
        return self.server.client.put(f"/api/v1/node-checks/{id_}", json={"state": state, **more})

    def check(self, id_: str) -> dict[str, Any]:
        found: dict[str, Any] = self.server.client.get(f"/api/v1/node-checks/{id_}").json()
        return found

    def checks(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.server.client.get(f"/api/v1/nodes/{self.node}/checks").json()["items"]
        return found

    def shown(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.client.get(f"/api/v1/nodes/{self.node}").json()
        return found

    def announced(self) -> list[str]:
        return [event.type for event in self.store.all(EVENTS) if event.subject == self.node]

    def audit(self) -> list[tuple[str, str]]:
        entries = self.store.audit(limit=1_000).items
        return [(entry.who, entry.verb) for entry in reversed(entries) if entry.subject == self.node]

    def checking(self, **more: Any) -> str:
        """Have the node out and its return asked for; return its check's id."""
        self.out(**more)
        self.hear()
        asked = self.readmit()
        assert asked.status_code == 202, asked.text
        return str(asked.json()["check_id"])


def report(*names: str, verdict: str = "healthy", reason: str = "fine") -> dict[str, Any]:
    return {"verdict": verdict, "reason": reason, "checks": [{**PASSED, "name": name} for name in names]}
