"""What the orchestrators' tests share: actions, signed deliveries, a server that records what it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import msgspec
from standardwebhooks import Webhook

from eagle_eye.schema.action import ACTION_REQUESTED, ActionRequest

SECRET = "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0"


def rfc3339(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, tz=timezone.utc).isoformat().replace("+00:00", "Z")


def action(now_s: float, **changes: Any) -> ActionRequest:
    """An exclusion of n2 from job j, asked for now, good for a minute."""
    values: dict[str, Any] = {
        "action_id": "act-1",
        "kind": "exclude_node",
        "job": "j",
        "attempt": 1,
        "exclude": ["n2"],
        "restart": True,
        "fault": "hang",
        "confidence": 0.99,
        "onset": rfc3339(now_s - 10),
        "detected": rfc3339(now_s - 1),
        "expires": rfc3339(now_s + 60),
        "incident_id": "inc-1",
        "repair": "reboot",
        "summary": "n2 hangs",
        "evidence": [],
        "ranks": [],
        "report_to": "http://127.0.0.1:1/api/v1/actions/act-1/reports",
    }
    return ActionRequest(**{**values, **changes})


def event_body(data: Any, kind: str = ACTION_REQUESTED, event_id: str = "evt-1", **attributes: str) -> bytes:
    plain = msgspec.to_builtins(data)
    event = {"specversion": "1.0", "id": event_id, "type": kind, "source": "/eagle-eye", **attributes, "data": plain}
    return json.dumps(event).encode()


def signed_headers(body: bytes, now_s: float, event_id: str = "evt-1", secret: str = SECRET) -> dict[str, str]:
    signature = Webhook(secret).sign(
        event_id, datetime.fromtimestamp(int(now_s), tz=timezone.utc), body.decode(errors="replace")
    )
    return {
        "content-type": "application/cloudevents+json",
        "webhook-id": event_id,
        "webhook-timestamp": str(int(now_s)),
        "webhook-signature": signature,
    }


def deliver(url: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=10.0) as client:
        return client.post(url, content=body, headers=headers)


class StubServer:
    """A server that records every request; ``answer`` decides (status, body) for (method, path)."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.tokens: list[str | None] = []
        self.answer: Callable[[str, str], tuple[int, Any]] = self.agreeable
        self.arrived = threading.Condition()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                text = self.rfile.read(length)
                body = json.loads(text) if text else None
                status, answer = stub.answer(self.command, self.path)
                content = b"" if answer is None else json.dumps(answer).encode()
                with stub.arrived:  # before the answer, upon which the client goes on
                    stub.requests.append((self.command, self.path, body))
                    stub.tokens.append(self.headers.get("authorization"))
                    stub.arrived.notify_all()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - as the standard library wants it

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @staticmethod
    def agreeable(method: str, path: str) -> tuple[int, Any]:
        if method == "POST" and path == "/api/v1/subscriptions":
            return 201, {"id": "sub-1", "secret": SECRET}
        if method == "GET" and path.startswith("/api/v1/jobs/"):
            return 404, {"detail": "no such job"}
        return (204, None) if method == "DELETE" else (200, {})

    def reported(self, method: str, path: str) -> list[Any]:
        """The bodies of the requests so far, without claims."""
        return [body for body in self._bodies(method, path) if not _claims(body)]

    def claimed(self, path: str) -> list[Any]:
        """The claims so far."""
        return [body for body in self._bodies("POST", path) if _claims(body)]

    def _bodies(self, method: str, path: str) -> list[Any]:
        with self.arrived:
            return [body for verb, where, body in self.requests if (verb, where) == (method, path)]

    def wait(self, method: str, path: str, count: int, within_s: float = 10.0) -> list[Any]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.reported(method, path)) >= count, within_s), self.requests
        return self.reported(method, path)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _claims(body: Any) -> bool:
    return isinstance(body, dict) and bool(body.get("claim"))


@contextmanager
def stub_server() -> Iterator[StubServer]:
    server = StubServer()
    try:
        yield server
    finally:
        server.close()
