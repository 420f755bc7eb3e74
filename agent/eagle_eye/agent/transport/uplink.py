"""Sends spooled frames to the server and drops acknowledged ones: live frames at once, old ones in between.

Touches: two HTTP connections, two threads. The protocol: ``docs/reference/wire.md``.
"""

from __future__ import annotations

import logging
import random
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eagle_eye.agent.loop.clock import Clock
from eagle_eye.agent.loop.clock_base import ClockBase
from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.transport.connection import BadAnswer, FrameConnection, ServerAnswer
from eagle_eye.agent.transport.node_token import NodeToken
from eagle_eye.agent.transport.request_writer import RequestWriter
from eagle_eye.agent.transport.server_connection import SYSTEMS, Trust, connect, path_on
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import STREAM_FRAMES_MAX, Spool, SpoolBatch
from eagle_eye.schema.backoff import Backoff
from eagle_eye.schema.frame import WIRE_VERSION, version_of

PATH = "/api/v1/frames"
BYTES_PER_REQUEST = 4 << 20
BACKOFF_S_MIN = 0.1
RETRY_AFTER_S_MAX = 300.0
VERSION_RETRY_S = 60.0  # while the server does not read our wire version: until it is upgraded
UNKNOWN_SAID_MAX = 256  # distinct names logged as unknown to the server
SAY_EVERY_S = 60.0  # a server that rejects every frame is logged once for all of them
IDLE_S = 60.0
SPREAD_S_MAX = 10.0  # whatever a server asks for
_AWAY = (502, 504)  # a proxy that does not reach its server

# Old frames can wait: a recovered server first has to take the live frames of a whole fleet.
BACKLOG_BACKOFF_S_MIN = 1.0
BACKLOG_BACKOFF_S_MAX = 300.0
BACKLOG_EVERY_S = 1.0  # one stream per request and second: an hour of frames in a minute, about half a MB/s
BACKLOG_REST = 3.0  # multiples of the last request's duration: the slower the server, the longer the pause

_log = logging.getLogger("eagle_eye.agent")


@dataclass(frozen=True)
class Destination:
    """Where frames go. ``token_file`` None: no token. Times in seconds."""

    servers: Servers
    token_file: Path | None = None
    trust: Trust = SYSTEMS
    connect_s: float = 2.0
    answer_s: float = 5.0
    backoff_s_max: float = 5.0


@dataclass(frozen=True)
class Pace:
    """How long a lane waits between requests, in seconds.

    After a failure ``backoff_s_min``, doubling to the maximum. After a success about ``every_s``, and ``rest`` times as
    long as the request took.
    """

    backoff_s_min: float
    backoff_s_max: float
    every_s: float = 0.0
    rest: float = 0.0


class Lane:
    """Sends one part of the spool in order and at least once, over its own connection.

    The lane that ``chooses`` goes on to another server where one takes no frames; the other lane follows it.
    """

    def __init__(
        self,
        take: Callable[[int, int], SpoolBatch | None],
        acknowledge: Callable[[str, int], None],
        destination: Destination,
        token: NodeToken,
        pace: Pace,
        drops: Drops,
        clock: Clock,
        jitter: Callable[[], float],
        answered: Callable[[Mapping[str, object]], None] = lambda _fields: None,
        base: ClockBase | None = None,
        *,
        chooses: bool = False,
    ) -> None:
        self._take = take
        self._acknowledge = acknowledge
        self._destination = destination
        self._servers = destination.servers
        self._chooses = chooses
        self._token = token
        self._pace = pace
        self._drops = drops
        self._clock = clock
        self._jitter = jitter
        self._answered = answered
        self._base = base
        self._face(self._servers.current)
        self._backoff = Backoff(pace.backoff_s_min, pace.backoff_s_max, jitter)
        self._frames_max = STREAM_FRAMES_MAX
        self._said = ""
        self._said_unknown: set[str] = set()
        self._said_drop_s = clock.monotonic_s() - SAY_EVERY_S
        self.delivered = 0
        self.is_well: bool | None = None  # whether the server took the last request; None: nothing was sent

    def send_once(self) -> float | None:
        """Send one batch; return how many seconds to wait before the next, None when there was nothing to send."""
        batch = self._take(self._frames_max, BYTES_PER_REQUEST)
        if batch is None:
            self._frames_max = STREAM_FRAMES_MAX
            return None
        if self._server != self._servers.current:
            self._connection.close()
            self._face(self._servers.current)
        begin_s = self._clock.monotonic_s()
        written = self._writer.write([frame for _, frame in batch.frames], self._clock.now_s())
        try:
            answer = self._connection.post(written.body, self._token.text(), written.content_type, written.encoding)
        except (OSError, BadAnswer) as error:
            said = self._refused(f"cannot be reached: {type(error).__name__}: {error}")
            if not said:
                return 0.0
            self._say(said)
            return self.backoff_s()
        if self._writer.answered(answer.status, answer.reason):
            return 0.0
        wait_s = self._judge(answer, batch)
        return wait_s or self._rest_s(self._clock.monotonic_s() - begin_s)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def backoff_s(self) -> float:
        """Return the wait after a failure: doubling, bounded, with jitter between half and whole to spread a fleet."""
        self.is_well = False
        return self._backoff.next_s()

    def _face(self, server: str) -> None:
        """Send to this server from now on; what another one knew or could not read counts no more."""
        place = self._destination
        self._server = server
        self._connection = FrameConnection(
            partial(connect, server, place.trust, place.connect_s, place.answer_s), server, path_on(server, PATH)
        )
        self._writer = RequestWriter(self._clock.monotonic_s, self._base)

    def _refused(self, why: str, leader: str = "") -> str:
        """Return "" if another server is to be tried at once, else what to log before backing off."""
        self.is_well = False
        if self._server != self._servers.current:
            return ""
        return self._servers.refused(why, leader) if self._chooses else f"server {self._server} {why}"

    def _rest_s(self, took_s: float) -> float:
        return max(self._pace.every_s * (0.5 + self._jitter()), self._pace.rest * took_s)

    def _judge(self, answer: ServerAnswer, batch: SpoolBatch) -> float:
        first, last = batch.frames[0][0], batch.frames[-1][0]
        if answer.status == 200 and answer.watermark is not None and answer.watermark >= first:
            if self._chooses and self._servers.took(answer.leader):
                self._said = ""  # the change of the server is logged, and says it
            self._say("")
            self.is_well = True
            self._backoff.reset()
            self._frames_max = STREAM_FRAMES_MAX
            acknowledged = min(answer.watermark, last)  # a server cannot have frames that were not sent
            self.delivered += sum(1 for sequence, _ in batch.frames if sequence <= acknowledged)
            self._acknowledge(batch.stream, acknowledged)
            self._note_unknown(answer.fields.get("unknown"))
            self._answered(answer.fields)
            return 0.0
        detail = answer.detail or ("it acknowledged nothing" if answer.status == 200 else "")
        answered = f"answered {answer.status} {answer.reason}: {detail}".rstrip(": ")
        said = f"server {answered}"
        if answer.reason == "version" and version_of(batch.frames[0][1]) == WIRE_VERSION:
            self._say(said)
            self.is_well = False
            return VERSION_RETRY_S * (0.5 + 0.5 * self._jitter())
        if answer.status in (400, 413, 422):
            if len(batch.frames) > 1:
                self._frames_max = 1  # find the frame that the server rejects
            else:
                self._drops.count(f"rejected_{answer.reason or answer.status}")
                self._say_dropped(first, said)
                self._acknowledge(batch.stream, first)
            return 0.0
        if answer.status in _AWAY or answer.reason == "standby":
            said = self._refused(answered, answer.leader)
            if not said:
                return 0.0
        self._say(said)
        if answer.status in (401, 403) and self._token.refused():
            return 0.0
        backoff_s = self.backoff_s()
        if answer.retry_after_s is not None and answer.status in (429, 503):
            # A whole fleet gets the same answer: spread over half as long again.
            asked_s = min(answer.retry_after_s, RETRY_AFTER_S_MAX) * (1.0 + 0.5 * self._jitter())
            return max(asked_s, backoff_s)
        return backoff_s

    def _note_unknown(self, names: object) -> None:
        """Count the names in accepted frames that an older server ignored, and log each once."""
        if not isinstance(names, list):
            return
        self._drops.count("unknown_to_server", len(names))
        for name in names:
            if isinstance(name, str) and name not in self._said_unknown and len(self._said_unknown) < UNKNOWN_SAID_MAX:
                self._said_unknown.add(name)
                _log.warning("server %s is older than this agent and leaves out: %r", self._server, name[:300])

    def _say_dropped(self, sequence: int, said: str) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._said_drop_s >= SAY_EVERY_S:
            self._said_drop_s = now_s
            _log.warning("frame %d is dropped, others for %g s are only counted: %s", sequence, SAY_EVERY_S, said)

    def _say(self, text: str) -> None:
        """Log a change of state once; empty: all is well."""
        if text != self._said:
            self._said = text
            if text:
                _log.warning("%s", text)
            else:
                _log.info("server %s takes frames", self._server)


class Uplink:
    """Delivers at least once; never gives up, and backs off from a server in trouble.

    Two lanes: the live one sends the newest frames as soon as they arrive; the backlog is sent oldest first, at a
    bounded pace and only while the live lane is healthy, so that an hour of old frames delays no new one.
    """

    def __init__(
        self,
        destination: Destination,
        spool: Spool,
        drops: Drops,
        clock: Clock,
        jitter: Callable[[], float] = random.random,
        token: NodeToken | None = None,
        answered: Callable[[Mapping[str, object]], None] = lambda _fields: None,
        base: ClockBase | None = None,
    ) -> None:
        """``token`` None: the content of the destination's file. ``answered`` gets the server's answers to live frames.

        Frames are re-dated by ``base``; None: sent unchanged.
        """
        self._spool = spool
        self._clock = clock
        token = token or NodeToken(
            destination.servers, "", destination.token_file, None, destination.trust, 0.0, clock.monotonic_s
        )
        live = Pace(BACKOFF_S_MIN, destination.backoff_s_max)
        backlog = Pace(BACKLOG_BACKOFF_S_MIN, BACKLOG_BACKOFF_S_MAX, BACKLOG_EVERY_S, BACKLOG_REST)

        def heard(fields: Mapping[str, object]) -> None:
            self._spread_s = spread_of(fields)
            answered(fields)

        common = (spool.acknowledge, destination, token)
        self.live = Lane(spool.newest, *common, live, drops, clock, jitter, heard, base, chooses=True)
        self.backlog = Lane(spool.backlog, *common, backlog, drops, clock, jitter, base=base)
        self._news = threading.Event()
        spool.listen(self._news.set)
        self._hurry = threading.Event()  # set while something urgent waits
        self._turn = zlib.crc32(spool.node.encode()) / (1 << 32)  # this node's place among all on the same tick
        self._spread_s = 0.0  # over how long the server wants agents to spread their requests
        self._behind = threading.Event()  # set while there is backlog and the live lane is healthy
        self._stopping = threading.Event()
        self._stop_s: float | None = None
        self._threads = (
            threading.Thread(target=self._run_live, name="uplink", daemon=True),
            threading.Thread(target=self._run_backlog, name="uplink-backlog", daemon=True),
        )

    @property
    def delivered(self) -> int:
        """How many frames the server has acknowledged."""
        return self.live.delivered + self.backlog.delivered

    @property
    def is_well(self) -> bool | None:
        """Whether the server takes live frames; None before the first attempt."""
        return self.live.is_well

    def start(self) -> None:
        """Start sending."""
        for thread in self._threads:
            thread.start()

    def notify(self, urgent: bool = False) -> None:
        """Signal new frames in the spool; urgent ones do not wait for this node's turn."""
        if self._spool.has_new():  # otherwise it was delivered before this call
            if urgent:
                self._hurry.set()
            self._news.set()

    def stop(self, flush_s: float) -> None:
        """Send the newest frames for at most ``flush_s`` and stop; the rest stays in the spool.

        The backlog is not flushed: the agent's goodbye must be last.
        """
        self._stop_s = self._clock.monotonic_s() + flush_s
        for event in (self._stopping, self._behind, self._hurry, self._news):
            event.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=max(0.0, self._stop_s - self._clock.monotonic_s()) + 0.1)
        for lane, thread in zip((self.live, self.backlog), self._threads, strict=True):
            if not thread.is_alive():  # otherwise it waits for an answer: the process's exit closes the connection
                lane.close()

    def _run_live(self) -> None:
        while True:
            self._news.clear()
            wait_s = self._send(self.live)
            if self.live.is_well and self._spool.has_backlog():
                self._behind.set()
            if self._stop_s is not None and (
                wait_s is None or self._clock.monotonic_s() + (wait_s or 0.0) >= self._stop_s
            ):
                return
            if wait_s is None:
                if self._clock.wait(self._news, IDLE_S) and self._spread_s > 0.0:
                    self._clock.wait(self._hurry, self._turn * self._spread_s)
                self._hurry.clear()
            elif wait_s > 0.0:
                self._clock.wait(self._stopping, wait_s)

    def _run_backlog(self) -> None:
        while not self._stopping.is_set():
            if not self._clock.wait(self._behind, IDLE_S) or self._stopping.is_set():
                continue
            wait_s = self._send(self.backlog) if self.live.is_well else None
            if wait_s is None:
                self._behind.clear()  # until the live lane sees that there is more, and is healthy
                self.backlog.close()
            elif wait_s > 0.0:
                self._clock.wait(self._stopping, wait_s)

    def _send(self, lane: Lane) -> float | None:
        try:
            return lane.send_once()
        except Exception:  # noqa: BLE001 - the threads that speak for the node must not end
            _log.exception("sending failed in a way that is a mistake of ours; trying again")
            return lane.backoff_s()


def spread_of(fields: Mapping[str, object]) -> float:
    """Return over how many seconds the server wants agents to spread their requests; 0.0 if unspecified."""
    asked = fields.get("spread_seconds")
    return min(max(float(asked), 0.0), SPREAD_S_MAX) if isinstance(asked, (int, float)) else 0.0
