"""Sends spooled frames to the server until it acknowledges them: live frames at once, old ones in between.

Touches: up to three HTTP connections, two threads. The protocol: ``docs/reference/wire.md``.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import random
import re
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from urllib.parse import urlsplit

from eagle_eye.agent.clock import Clock, ClockBase
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.servers import SYSTEMS, NodeToken, Servers, Trust, connect, path_on
from eagle_eye.agent.transport.spool import STREAM_FRAMES_MAX, Spool, SpoolBatch
from eagle_eye.schema.backoff import Backoff
from eagle_eye.schema.frame import CONTENT_TYPE as WHOLE_CONTENT_TYPE
from eagle_eye.schema.frame import (
    KEPT_HEADER,
    WIRE_VERSION,
    BadFrame,
    encode_frame,
    encode_request,
    read_frame,
    unknown_keys,
    version_of,
)
from eagle_eye.schema.problem import LEADER_HEADER
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS_CONTENT_TYPE
from eagle_eye.schema.rows import (
    TEMPLATES_PER_REQUEST_MAX,
    RowTemplate,
    decode_template,
    encode_row,
    encode_rows_request,
    encode_template,
    split_row,
    template_id,
    template_of,
    unknown_template_keys,
    whole_frame,
)

# Builds request bodies from spooled frames: rows, and the templates that the server does not know.
#
# The loop encodes each sample once, as a row with its template; this only concatenates the parts. Frames are re-
# encoded only to re-date them after the clock was set, and to send them whole to a server that does not read rows.
OLD_SERVER_S = 600.0  # how long whole frames are sent to a server that does not read rows
DEFLATE_BYTES_MIN = 16_384  # worth compressing: many frames at once, after an outage
DEFLATE_LEVEL = 1

_NO_ROWS_STATUS = 415
_NO_TEMPLATE = (409, "outline")


class Written(NamedTuple):
    """A request's body; ``encoding`` is its Content-Encoding, "" for none."""

    body: bytes
    content_type: str
    encoding: str = ""


class RequestWriter:
    """Writes one lane's requests, and tracks from the answers what the server knows.

    ``base`` re-dates frames by the clock at sending; None: they are sent unchanged.
    """

    def __init__(self, monotonic_s: Callable[[], float], base: ClockBase | None = None) -> None:
        self._monotonic_s = monotonic_s
        self._base = base
        self._whole_until_s = float("-inf")
        self._raw = b""  # the newest template...
        self._template: RowTemplate | None = None  # ...None: only an agent of another version can read it
        self._is_ours = False  # whether it has only fields known to this agent
        self._id = b""
        self._known: set[bytes] = set()  # those that the server has acknowledged
        self._sent: list[bytes] = []  # the templates that the last request's rows need

    def write(self, kept: Sequence[bytes], now_s: float) -> Written:
        """Return a request with all of ``kept``, which is from one stream."""
        base_s = None if self._base is None else self._base.read()
        if self._monotonic_s() < self._whole_until_s:
            return Written(encode_request([self._whole(raw, base_s) for raw in kept], now_s), WHOLE_CONTENT_TYPE)
        templates: dict[bytes, bytes] = {}
        items: list[bytes] = []
        for raw in kept:
            parts = split_row(raw)
            if parts is None:
                items.append(self._whole(raw, base_s))
                continue
            row = self._row(*parts, base_s)
            if self._id in templates or len(templates) < TEMPLATES_PER_REQUEST_MAX or self._template is None:
                templates[self._id] = self._raw
                items.append(row)
            else:
                items.append(encode_frame(whole_frame(self._template, row)))
        self._sent = list(templates)
        unknown = [raw for id_, raw in templates.items() if id_ not in self._known]
        body = encode_rows_request(unknown, items, now_s)
        if len(body) < DEFLATE_BYTES_MIN:
            return Written(body, ROWS_CONTENT_TYPE)
        return Written(zlib.compress(body, DEFLATE_LEVEL), ROWS_CONTENT_TYPE, "deflate")

    def answered(self, status: int, reason: str) -> bool:
        """Process the answer; return whether the same frames must be sent again at once, rewritten."""
        if status == 200:
            self._known = set(self._sent)
        elif (status, reason) == _NO_TEMPLATE and self._known:
            self._known.clear()
            return True
        elif status == _NO_ROWS_STATUS and self._monotonic_s() >= self._whole_until_s:
            self._whole_until_s = self._monotonic_s() + OLD_SERVER_S
            return True
        return False

    def _row(self, raw: bytes, row: bytes, base_s: float | None) -> bytes:
        """Return a row as it is sent; its template becomes the newest."""
        self._meet(raw)
        template = self._template
        if self._base is None or template is None or not self._is_ours or template.clock_base_s == base_s:
            return row
        frame = self._base.dated(whole_frame(template, row))
        template = template_of(frame)
        self._meet(encode_template(template))
        return encode_row(frame, template, self._id)

    def _meet(self, raw: bytes) -> None:
        if raw == self._raw:
            return
        self._raw, self._id = raw, template_id(raw)
        try:
            self._template, unknown = decode_template(raw)
        except BadFrame:
            self._template, unknown = None, ()
        self._is_ours = not unknown and not unknown_template_keys(raw)

    def _whole(self, raw: bytes, base_s: float | None) -> bytes:
        """Return a spooled frame as a whole frame."""
        parts = split_row(raw)
        if parts is not None:
            row = self._row(*parts, base_s)
            return row if self._template is None else encode_frame(whole_frame(self._template, row))
        if self._base is None:
            return raw
        try:
            frame, unknown = read_frame(raw)
        except BadFrame:
            return raw  # from another version, left in the spool; the server will reject it
        if frame.base_s == base_s or unknown or unknown_keys(raw):
            return raw  # left by a newer agent: its server may know fields that this one would drop
        return encode_frame(self._base.dated(frame))


# One connection that carries frames: a request's body in, the server's answer out.
#
# The standard library's client would work but costs too much: an agent spends most of its time here. It supports all
# HTTP/1.1 response framings: a length, chunks, or everything until the connection closes.
ANSWER_BYTES_MAX = 1 << 16
LINE_BYTES_MAX = 1 << 13  # per line of the response head, and of a chunk's
LINES_MAX = 128
LENGTH_DIGITS_MAX = 18  # of a length: Python rejects numbers with several thousand

_STATUS = re.compile(rb"HTTP/1\.\d ([1-9]\d\d)[ \r\n]")


class BadAnswer(ValueError):
    """The answer is not HTTP, or exceeds the limits."""


class ServerAnswer(NamedTuple):
    """The server's answer; ``reason`` is the problem's stable word, ``retry_after_s`` None when absent.

    ``fields`` is the whole JSON object, empty where the body is not one. ``leader`` is the URL of the server that
    leads, where one that stands by says it.
    """

    status: int
    watermark: int | None
    reason: str
    detail: str
    retry_after_s: float | None
    fields: Mapping[str, object]
    leader: str


class FrameConnection:
    """Keeps one connection open as long as the server does."""

    def __init__(self, connect: Callable[[], http.client.HTTPConnection], server: str, path: str) -> None:
        """``connect`` returns an open connection to ``server``, a URL; ``path`` is where frames are posted."""
        self._connect = connect
        self._head = (
            f"POST {path} HTTP/1.1\r\nHost: {urlsplit(server).netloc.rpartition('@')[2]}\r\n"
            "Accept: application/json\r\n"
        )
        self._http: http.client.HTTPConnection | None = None
        self._reader: BufferedReader | None = None

    def post(
        self, body: bytes, token: str, content_type: str, more: Mapping[str, str] = MappingProxyType({})
    ) -> ServerAnswer:
        """Return the server's answer; ``token`` empty: none; ``more`` are further headers. Raises OSError, BadAnswer.

        After an error the connection is closed; the next request opens another.
        """
        others = "".join([f"{name}: {value}\r\n" for name, value in more.items()])
        authorization = f"Authorization: Bearer {token}\r\n" if token else ""
        kind = f"Content-Type: {content_type}\r\n"
        head = f"{self._head}{authorization}{kind}{others}Content-Length: {len(body)}\r\n\r\n".encode("ascii")
        request = head + body
        while True:
            reused = self._http is not None
            try:
                if self._http is None or self._reader is None:
                    self._http = self._connect()
                    self._reader = self._http.sock.makefile("rb")
                self._http.sock.sendall(request)
                status, headers = _read_head(self._reader)
                content, whole = _read_body(self._reader, headers)
                break
            except (ConnectionResetError, BrokenPipeError):
                self.close()
                if not reused:
                    raise
                # The server closed it while it was idle: once more on a new one. A frame may be sent twice.
            except BaseException:
                self.close()
                raise
        if not whole or headers.get("connection", "").lower() == "close":
            self.close()
        return _answer(status, headers.get("retry-after"), headers.get(LEADER_HEADER.lower(), ""), content)

    def close(self) -> None:
        """Close; the next request opens another."""
        connection, self._http = self._http, None
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        if connection is not None:
            connection.close()


def _read_head(reader: BufferedReader) -> tuple[int, dict[str, str]]:
    """Return status and headers, names in lower case. Raises OSError, BadAnswer."""
    while True:
        line = _line(reader)
        if not line:
            raise ConnectionResetError("the server closed the connection without an answer")
        match = _STATUS.match(line)
        if match is None:
            raise BadAnswer(f"the answer begins with {line[:40]!r}, which is no HTTP/1.1")
        headers: dict[str, str] = {}
        for _ in range(LINES_MAX):
            line = _line(reader)
            if line in (b"\r\n", b"\n"):
                break
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        else:
            raise BadAnswer(f"the answer's head has more than {LINES_MAX} lines")
        status = int(match[1])
        if status >= 200:  # earlier ones are interim responses
            return status, headers


def _read_body(reader: BufferedReader, headers: Mapping[str, str]) -> tuple[bytes, bool]:
    """Return the body, as far as read, and whether the connection can be reused."""
    if headers.get("transfer-encoding", "identity").lower() != "identity":
        return _read_chunks(reader)
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdecimal() and len(length) <= LENGTH_DIGITS_MAX):
        return reader.read(ANSWER_BYTES_MAX), False
    content = reader.read(min(int(length), ANSWER_BYTES_MAX))
    return content, len(content) == int(length)


def _read_chunks(reader: BufferedReader) -> tuple[bytes, bool]:
    content = b""
    while len(content) <= ANSWER_BYTES_MAX:
        line = _line(reader).partition(b";")[0].strip()
        try:
            length = int(line, 16)
        except ValueError:
            raise BadAnswer(f"a chunk of the answer has the length {line[:40]!r}") from None
        if length == 0:
            for _ in range(LINES_MAX):
                if _line(reader) in (b"\r\n", b"\n", b""):
                    return content, True
            break
        content += reader.read(min(max(length, 0), ANSWER_BYTES_MAX))
        if length < 0 or _line(reader) not in (b"\r\n", b"\n"):
            break
    return content[:ANSWER_BYTES_MAX], False


def _line(reader: BufferedReader) -> bytes:
    """Return a line with its end; empty at EOF. Raises OSError, BadAnswer."""
    line = reader.readline(LINE_BYTES_MAX)
    if len(line) == LINE_BYTES_MAX:
        raise BadAnswer(f"a line of the answer has more than {LINE_BYTES_MAX} bytes")
    return line


def _answer(status: int, retry_after: str | None, leader: str, content: bytes) -> ServerAnswer:
    fields: dict[str, object] = {}
    with contextlib.suppress(ValueError, RecursionError):  # not JSON: the status alone says enough
        parsed = json.loads(content)
        if isinstance(parsed, dict):
            fields = parsed
    watermark = fields.get("watermark")
    reason, detail = fields.get("reason"), fields.get("detail")
    return ServerAnswer(
        status,
        watermark if type(watermark) is int else None,
        _word(reason) if isinstance(reason, str) else "",
        detail[:300] if isinstance(detail, str) else "",
        float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdecimal() else None,
        fields,
        leader,
    )


def _word(text: str) -> str:
    """Return the reason as one word that may become part of a counter's name."""
    return "".join(char if char.isalnum() or char == "_" else "_" for char in text[:40])


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

# What a server lacks of earlier acknowledged frames can wait, too. It says at what pace it wants them.
RESEND_EVERY_S_MAX = 300.0
_JOURNAL = re.compile(r"[0-9A-Za-z_]{1,64}", re.ASCII)

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


@dataclass(frozen=True)
class LaneFrames:
    """The part of the spool that a lane sends.

    ``take(frames_max, bytes_max)`` returns what is next. ``acknowledge(stream, sequence, journal, sent)``: ``journal``
    is the server's, None for what is unwanted. ``left`` counts the frames to send, those of the request among them;
    None: the server is not told.
    """

    take: Callable[[int, int], SpoolBatch | None]
    acknowledge: Callable[[str, int, str | None, Sequence[tuple[int, bytes]]], None]
    left: Callable[[], int] | None = None


@dataclass(frozen=True)
class LaneSurroundings:
    """What all lanes of an uplink share. ``base`` re-dates frames by the clock at sending; None: sent unchanged."""

    destination: Destination
    token: NodeToken
    drops: Drops
    clock: Clock
    jitter: Callable[[], float]
    base: ClockBase | None = None


class Lane:
    """Sends one part of the spool in order and at least once, over its own connection.

    The lane that ``chooses`` goes on to another server where one takes no frames; the other lane follows it.
    """

    def __init__(
        self,
        frames: LaneFrames,
        pace: Pace,
        surroundings: LaneSurroundings,
        answered: Callable[[Mapping[str, object]], None] = lambda _fields: None,
        *,
        chooses: bool = False,
    ) -> None:
        """``answered`` gets the server's answers to frames that it took."""
        self._left = frames.left
        self._take = frames.take
        self._acknowledge = frames.acknowledge
        self._destination = surroundings.destination
        self._servers = surroundings.destination.servers
        self._chooses = chooses
        self._token = surroundings.token
        self._pace = pace
        self._drops = surroundings.drops
        self._clock = surroundings.clock
        self._jitter = surroundings.jitter
        self._answered = answered
        self._base = surroundings.base
        self._face(self._servers.current)
        self._backoff = Backoff(pace.backoff_s_min, pace.backoff_s_max, self._jitter)
        self._frames_max = STREAM_FRAMES_MAX
        self._said = ""
        self._said_unknown: set[str] = set()
        self._said_drop_s = self._clock.monotonic_s() - SAY_EVERY_S
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
        more = {} if self._left is None else {KEPT_HEADER: str(max(self._left() - len(batch.frames), 0))}
        if written.encoding:
            more["Content-Encoding"] = written.encoding
        try:
            answer = self._connection.post(written.body, self._token.text(), written.content_type, more)
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
            self._acknowledge(batch.stream, acknowledged, journal_of(answer.fields), batch.frames)
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
                self._acknowledge(batch.stream, first, None, ())
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

    The live lane sends the newest frames as soon as they arrive; the backlog is sent oldest first, at a bounded pace
    and only while the live lane is healthy, so that an hour of old frames delays no new one. After the backlog goes
    ``again`` what another server acknowledged in the last minutes and this one's journal lacks, newest first, as often
    as this server asks for it.
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
            self._spread_s = seconds_of(fields, "spread_seconds", SPREAD_S_MAX)
            self._resend_every_s = seconds_of(fields, "resend_seconds", RESEND_EVERY_S_MAX)
            self._journal = journal_of(fields)
            answered(fields)

        def lacking(frames_max: int, bytes_max: int) -> SpoolBatch | None:
            self._asked = self._journal
            return spool.lacking(self._asked, frames_max, bytes_max) if self._asked else None

        def resent(stream: str, sequence: int, journal: str | None, _sent: Sequence[tuple[int, bytes]]) -> None:
            spool.resent(stream, sequence, self._asked if journal is None else journal)

        again = LaneFrames(lacking, resent, lambda: spool.lacking_count(self._asked))
        surroundings = LaneSurroundings(destination, token, drops, clock, jitter, base)
        self.live = Lane(LaneFrames(spool.newest, spool.acknowledge), live, surroundings, heard, chooses=True)
        self.backlog = Lane(LaneFrames(spool.backlog, spool.acknowledge), backlog, surroundings)
        self.again = Lane(again, backlog, surroundings)
        self._jitter = jitter
        self._journal = self._asked = ""  # the journal of the server that takes live frames; of the last request
        self._resend_every_s = 0.0
        self._resend_at_s: float | None = None  # when the next request goes; None: there is nothing to send again
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
        for lanes, thread in zip(((self.live,), (self.backlog, self.again)), self._threads, strict=True):
            if not thread.is_alive():  # otherwise it waits for an answer: the process's exit closes the connection
                for lane in lanes:
                    lane.close()

    def _run_live(self) -> None:
        while True:
            self._news.clear()
            wait_s = self._send(self.live)
            if self.live.is_well and (self._spool.has_backlog() or self._has_lacking()):
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
            if wait_s is None and self.live.is_well:
                wait_s = self.resend_once()
            if wait_s is None:
                self._behind.clear()  # until the live lane sees that there is more, and is healthy
                self.backlog.close()
                self.again.close()
            elif wait_s > 0.0:
                self._clock.wait(self._stopping, wait_s)

    def _has_lacking(self) -> bool:
        return bool(self._journal) and self._spool.lacking_count(self._journal) > 0

    def resend_once(self) -> float | None:
        """Send again one batch that the server lacks, when its turn comes; return when to call next, None: all is sent.

        A whole fleet begins at the same moment: the first request goes at random within the time between two.
        """
        if not self._has_lacking():
            self._resend_at_s = None
            return None
        now_s = self._clock.monotonic_s()
        if self._resend_at_s is None:
            self._resend_at_s = now_s + self._resend_every_s * self._jitter()
        if now_s < self._resend_at_s:
            return min(self._resend_at_s - now_s, BACKLOG_EVERY_S)  # the backlog comes first, whenever there is one
        wait_s = self._send(self.again)
        if wait_s is None:  # the disk does not return it now
            return self.again.backoff_s()
        if wait_s > 0.0:
            wait_s = max(wait_s, self._resend_every_s * (0.5 + self._jitter()))
        self._resend_at_s = now_s + wait_s
        return 0.0

    def _send(self, lane: Lane) -> float | None:
        try:
            return lane.send_once()
        except Exception:  # noqa: BLE001 - the threads that speak for the node must not end
            _log.exception("sending failed because of a bug in the agent; trying again")
            return lane.backoff_s()


def seconds_of(fields: Mapping[str, object], key: str, most_s: float) -> float:
    """Return a time that the server asks for in its answer; 0.0 if unspecified."""
    asked = fields.get(key)
    return min(max(float(asked), 0.0), most_s) if isinstance(asked, (int, float)) else 0.0


def journal_of(fields: Mapping[str, object]) -> str:
    """Return the name of the journal in which the server has what it acknowledges; "" if it names none."""
    journal = fields.get("journal")
    return journal if isinstance(journal, str) and _JOURNAL.fullmatch(journal) else ""
