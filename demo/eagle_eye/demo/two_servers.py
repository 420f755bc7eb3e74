"""The demo with two servers on one PostgreSQL: one leads, the other stands by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import httpx

from eagle_eye.demo.postgresql import DemoPostgresql, missing, programs
from eagle_eye.demo.site import DemoSite
from eagle_eye.demo.stack import SERVER_CONFIG, STARTED_WITHIN_S, Stack, StageFailed, free_port

SERVERS = ("server-a", "server-b")


class TwoServers(Stack):
    """The demo's processes with two servers; agents and launcher have both. ``api`` asks the one that leads."""

    def __init__(
        self,
        site: DemoSite,
        folder: Path,
        waiting: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        bin_ = programs()
        if bin_ is None:
            raise StageFailed(missing())
        self._postgresql = DemoPostgresql(bin_)
        try:
            config = f'{SERVER_CONFIG}\n[records]\nurl = "{self._postgresql.url}"\n'
            super().__init__(site, folder, waiting=waiting, config=config)
        except BaseException:
            self._postgresql.close()
            raise
        second = f"http://{site.head_address}:{free_port(site.head_address)}"
        self.servers = (self.url, second)
        self.leader = SERVERS[0]

    def start_server(self) -> None:
        """Start both servers, the second once the first one leads."""
        for name in SERVERS:
            self.start_one(name)
            self.wait("the first server leads", lambda: self.leadership(self.leader)["leads"] or None, STARTED_WITHIN_S)

    def start_one(self, name: str) -> None:
        """Start a server and wait until it answers."""
        self._start_server(name, self._url_of(name))

    def kill_leader(self) -> str:
        """Kill the server that leads, ask the other one from now on and return its name."""
        self.kill(self.leader)
        self.leader = next(name for name in SERVERS if name != self.leader)
        self.url = self._url_of(self.leader)
        self.api.base_url = httpx.URL(f"{self.url}/api/v1")
        return self.leader

    def leadership(self, name: str) -> dict[str, Any]:
        """Return what a server says of who leads; raises httpx.HTTPError."""
        found: dict[str, Any] = httpx.get(f"{self._url_of(name)}/leadz", timeout=1.0).json()
        return found

    def close(self) -> None:
        """End every process, the database last."""
        with contextlib.closing(self._postgresql):
            super().close()

    def _url_of(self, name: str) -> str:
        return self.servers[SERVERS.index(name)]
