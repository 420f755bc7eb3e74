"""The server's changes as they happen: server-sent events, read on after the connection was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, NamedTuple

from eagle_eye.client import http_client
from eagle_eye.client.errors import ClientError, LimitReached, Refused, Unreachable
from eagle_eye.client.http_client import HttpClient
from eagle_eye.schema.backoff import Backoff

PATH = "/api/v1/events"
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 15.0
RESET = "reset"
SILENCE_S = 40.0  # the server says something every 15 s; after this long the connection is dead
# What a server or a proxy says that is not to be asked just now.
LATER = (
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)


class ServerEvent(NamedTuple):
    """One change: ``kind`` is incident, action, job, node, delivery, subscription, silence or event.

    ``record`` is what it is now. ``id`` grows; ``Client.events(after=id)`` goes on behind it. Of the kind "reset" the
    changes that were missed are no longer kept: read the lists anew.
    """

    id: int
    kind: str
    record: dict[str, Any]


class EventStream:
    """Follows the changes of one server, from ``after`` or else from now on.

    A lost connection is made again for ``patience_s``, and then nothing was missed. The first one must succeed.
    ``after`` is always where to go on.
    """

    def __init__(
        self,
        client: HttpClient,
        after: int | None,
        patience_s: float,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.after = after
        self._client = client
        self._patience_s = patience_s
        self._now_s = now_s
        self._sleep = sleep
        self._backoff = Backoff(FIRST_WAIT_S, LONGEST_WAIT_S)
        self._connected = False
        self._lost_s: float | None = None

    def follow(self) -> Iterator[ServerEvent]:
        """Yield the changes. Raises Unreachable when nobody answers for ``patience_s``, Refused, UnreadableAnswer."""
        while True:
            problem: ClientError
            try:
                yield from self._one_connection()
                problem = Unreachable(f"{self._client.server} ended the stream of events")
            except Unreachable as error:
                problem = error
            except Refused as error:
                if error.status not in LATER:
                    raise
                problem = error
            if not self._connected:
                raise problem
            self._wait(problem)

    def _one_connection(self) -> Iterator[ServerEvent]:
        headers = {"Accept": "text/event-stream"}
        if self.after is not None:
            headers["Last-Event-ID"] = str(self.after)
        with self._client.stream(PATH, headers=headers, silence_s=SILENCE_S) as answer:
            self._connected = True
            self._lost_s = None
            for fields in messages(answer.readline):
                self._backoff.reset()
                if fields["id"].isdecimal():
                    self.after = int(fields["id"])
                if fields["event"]:
                    record = self._client.decoded(fields["data"].encode(), dict[str, Any])
                    yield ServerEvent(self.after or 0, fields["event"], record)

    def _wait(self, problem: ClientError) -> None:
        now_s = self._now_s()
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        wait_s = max(self._backoff.next_s(), (problem.retry_after_s or 0.0) if isinstance(problem, Refused) else 0.0)
        if now_s + wait_s - self._lost_s > self._patience_s:
            on = "" if self.after is None else f"; events(after={self.after}) goes on where this stopped"
            raise Unreachable(f"no events for {self._patience_s:g} s (patience_s): {problem}{on}") from problem
        self._sleep(wait_s)


def messages(readline: Callable[[int], bytes]) -> Iterator[dict[str, str]]:
    """Yield the fields id, event and data of each message, "" for one that it lacks. Raises LimitReached.

    Comments are left out, and so is a message that was cut off.
    """
    fields = dict.fromkeys(("id", "event", "data"), "")
    while line := readline(http_client.ANSWER_BYTES_MAX + 1):
        if len(line) > http_client.ANSWER_BYTES_MAX:
            raise LimitReached(f"an event has more than {http_client.ANSWER_BYTES_MAX >> 20} MiB")
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        if text:
            name, _, value = text.partition(":")
            if name in fields:
                fields[name] = value.removeprefix(" ")
        elif any(fields.values()):
            yield fields
            fields = dict.fromkeys(fields, "")
