"""What was said between the orchestrator and a real API server: recorded once, played back ever after.

A recording holds requests and answers in their order. Played back, each request must be the recorded one, to the last
byte of its body: the code decides by answers and by a clock that only its own waiting moves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

from kubernetes import client as official

from eagle_eye.orchestrators.kubernetes.api import Api
from eagle_eye.orchestrators.kubernetes.orchestrator import KubernetesOrchestrator, Settings
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Cause, Exclusion, Restart
from tests.loopback import served

FOLDER = Path(__file__).parent / "recorded"


class Answer(NamedTuple):
    """One answer of an API server; ``body`` is JSON or a text."""

    status: int
    body: Any


class Clock:
    """Stands at ``now_s`` but for what is waited."""

    def __init__(self, now_s: float, sleep: Callable[[float], None] = lambda _: None) -> None:
        self.now_s = now_s
        self._sleep = sleep

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self._sleep(seconds)
        self.now_s += seconds


@contextmanager
def serving(answer: Callable[[str, str, Any], Answer]) -> Iterator[str]:
    """An HTTP server whose answers come from ``answer(method, path, body)``; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement

        def _serve(self) -> None:
            text = self.rfile.read(int(self.headers.get("content-length") or 0))
            status, body = answer(self.command, self.path, json.loads(text) if text else None)
            content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815 - as the standard library wants it

        def log_message(self, *_: Any) -> None:
            pass

    with served(Handler) as port:
        yield f"http://127.0.0.1:{port}"


def api_at(url: str, pause: Callable[[float], object] = lambda _: None) -> Api:
    configuration = official.Configuration(host=url)
    configuration.retries = False
    return Api(official.ApiClient(configuration), pause)


@contextmanager
def orchestrator_at(url: str, clock: Clock, **settings: Any) -> Iterator[KubernetesOrchestrator]:
    made = KubernetesOrchestrator(api_at(url, clock.pause), Settings(**settings), None, clock, clock.pause)
    try:
        yield made
    finally:
        made.close()


def perform(orchestrator: KubernetesOrchestrator, clock: Clock, steps: Sequence[Sequence[Any]]) -> list[Any]:
    """Do the steps; returns what was answered, or why it was refused. A step is a verb and its arguments, as JSON."""
    said: list[Any] = []
    start_s = clock.now_s
    for verb, *given in steps:
        cause = Cause("inc-1", "act-1", "gpu_lost", "XID 79 on GPU 3", "reboot", start_s, start_s + 20)
        try:
            if verb == "state":
                state = orchestrator.state(given[0])
                said.append(state and [state.attempt, sorted(state.nodes), state.running])
            elif verb == "exclude":
                said.append(orchestrator.exclude(Exclusion(given[0], 0, tuple(given[1]), True, cause)))
            elif verb == "restart":
                said.append(orchestrator.restart(given[0], Restart(0, None, cause, tuple(given[1]))))
            else:
                said.append(orchestrator.readmit(given[0]))
        except CannotCarryOutError as error:
            said.append(f"refused: {error}")
    return said


class Recording(NamedTuple):
    """``version`` of the server that it was made with, its clock's start, what was done and said, all exchanges."""

    version: str
    start_s: float
    settings: dict[str, Any]
    steps: list[list[Any]]
    said: list[Any]
    exchanges: list[dict[str, Any]]

    def save(self, name: str) -> None:
        FOLDER.mkdir(exist_ok=True)
        head = json.dumps({**self._asdict(), "exchanges": []}).removesuffix("[]}")
        exchanges = ",\n".join(json.dumps(_shortened(item)) for item in self.exchanges)
        (FOLDER / f"{name}.json").write_text(f"{head}[\n{exchanges}\n]}}\n", encoding="utf-8")

    @classmethod
    def load(cls, name: str) -> Recording:
        return cls(**json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def _shortened(exchange: dict[str, Any]) -> dict[str, Any]:
    """Leave out who has set which field of a pod: it is half of the text, and nobody reads it."""
    items = exchange["answer"].get("items") or []
    for item in items:
        item["metadata"].pop("managedFields", None)
    return exchange


class Playback:
    """Answers as recorded; ``wrong`` is the first request that was not."""

    def __init__(self, recording: Recording) -> None:
        self._left = list(recording.exchanges)
        self.wrong: Any = None

    def __call__(self, method: str, path: str, body: Any) -> Answer:
        expected = self._left[0] if self._left else {}
        asked = {"method": method, "path": path, "body": body}
        if asked != {key: expected.get(key) for key in asked}:
            self.wrong = self.wrong or (asked, expected)
            return Answer(400, {"message": "not as recorded"})
        self._left.pop(0)
        return Answer(expected["status"], expected["answer"])

    @property
    def left(self) -> int:
        return len(self._left)
