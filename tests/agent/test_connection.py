from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.transport.uplink import ANSWER_BYTES_MAX, LINE_BYTES_MAX, LINES_MAX, BadAnswer, FrameConnection

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
BODY = b'{"accepted":1,"duplicates":0,"watermark":7}'


class Opened:
    """What ``connect`` returns, its other end in our hands: it has answered before it is asked."""

    def __init__(self, answer: bytes, *, end: bool = True) -> None:
        self.sock, self.server = socket.socketpair()
        self.sock.settimeout(0.2)
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.server.sendall(answer)
        if end:
            self.server.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
def opened() -> Iterator[list[Opened]]:
    made: list[Opened] = []
    yield made
    for each in made:
        each.server.close()
        each.close()


@pytest.fixture
def connection(opened: list[Opened]) -> Callable[..., FrameConnection]:
    def make(*answers: bytes, end: bool = False) -> FrameConnection:
        waiting = list(answers)

        def connect() -> Opened:
            opened.append(Opened(waiting.pop(0), end=end))
            return opened[-1]

        return FrameConnection(cast("Callable[[], object]", connect), "https://[::1]:8470/eye", "/eye/api/v1/frames")  # type: ignore[arg-type]

    return make


def test_a_request_is_one_piece_and_says_what_it_is(
    connection: Callable[..., FrameConnection], opened: list[Opened]
) -> None:
    connection(OK + b"content-length: 2\r\n\r\n{}").post(
        b"frames", "secret", "application/x-frames", {"Content-Encoding": "deflate"}
    )
    assert opened[0].server.recv(1 << 16) == (
        b"POST /eye/api/v1/frames HTTP/1.1\r\nHost: [::1]:8470\r\n"
        b"Accept: application/json\r\nAuthorization: Bearer secret\r\nContent-Type: application/x-frames\r\n"
        b"Content-Encoding: deflate\r\nContent-Length: 6\r\n\r\nframes"
    )


@pytest.mark.parametrize(
    ("rest", "kept"),
    [
        pytest.param(b"Content-Length: 43\r\n\r\n" + BODY, True, id="a length"),
        pytest.param(b"content-length: 43\r\nConnection: close\r\n\r\n" + BODY, False, id="the last answer"),
        pytest.param(b"transfer-encoding: chunked\r\n\r\n2b\r\n" + BODY + b"\r\n0\r\n\r\n", True, id="one chunk"),
        pytest.param(
            b"Transfer-Encoding: Chunked\r\n\r\n1;x=y\r\n{\r\n2a\r\n" + BODY[1:] + b"\r\n0\r\nx: y\r\n\r\n",
            True,
            id="chunks",
        ),
    ],
)
def test_an_answer_is_read_whole_and_the_connection_kept_if_it_can_be(
    connection: Callable[..., FrameConnection], opened: list[Opened], rest: bytes, kept: bool
) -> None:
    asked = connection(OK + rest, OK + rest)
    assert asked.post(b"", "", "text/plain").watermark == 7
    if kept:
        opened[0].server.sendall(OK + rest)
    assert asked.post(b"", "", "text/plain").watermark == 7
    assert len(opened) == (1 if kept else 2)


def test_an_answer_without_a_length_ends_with_the_connection(connection: Callable[..., FrameConnection]) -> None:
    assert connection(OK + b"\r\n" + BODY, end=True).post(b"", "", "text/plain").watermark == 7


def test_interim_answers_are_passed_over(connection: Callable[..., FrameConnection]) -> None:
    answer = b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 43\r\n\r\n" + BODY
    assert connection(answer).post(b"", "", "text/plain").watermark == 7


def test_a_connection_that_the_server_had_closed_is_opened_again(
    connection: Callable[..., FrameConnection], opened: list[Opened]
) -> None:
    answer = OK + b"content-length: 43\r\n\r\n" + BODY
    asked = connection(answer, answer)
    asked.post(b"", "", "text/plain")
    opened[0].server.close()
    assert asked.post(b"", "", "text/plain").watermark == 7


def test_a_new_connection_that_is_closed_without_an_answer_is_an_error(
    connection: Callable[..., FrameConnection],
) -> None:
    with pytest.raises(ConnectionResetError, match="without an answer"):
        connection(b"", end=True).post(b"", "", "text/plain")


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", id="another protocol"),
        pytest.param(b"HTTP/1.1 200 " + b"x" * LINE_BYTES_MAX, id="an endless line"),
        pytest.param(OK + b"x: y\r\n" * LINES_MAX, id="endless lines"),
        pytest.param(OK + b"transfer-encoding: chunked\r\n\r\nlong\r\n", id="a chunk of no length"),
    ],
)
def test_what_is_no_answer_is_an_error_that_says_so(connection: Callable[..., FrameConnection], answer: bytes) -> None:
    with pytest.raises(BadAnswer):
        connection(answer).post(b"", "", "text/plain")


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 99999999\r\n\r\n",
        pytest.param(b"content-length: %s\r\n\r\n" % (b"9" * 5000), id="huge"),
        b"\r\n",
    ],
)
def test_of_an_endless_answer_the_beginning_is_read(
    connection: Callable[..., FrameConnection], opened: list[Opened], head: bytes
) -> None:
    asked = connection(OK + head + b" " * (ANSWER_BYTES_MAX + 1000), OK + b"content-length: 43\r\n\r\n" + BODY)
    assert asked.post(b"", "", "text/plain").watermark is None
    assert asked.post(b"", "", "text/plain").watermark == 7
    assert len(opened) == 2


def test_an_answer_that_stops_in_the_midst_times_out(connection: Callable[..., FrameConnection]) -> None:
    with pytest.raises(TimeoutError):
        connection(OK + b"content-length: 43\r\n\r\n" + BODY[:20]).post(b"", "", "text/plain")


pieces = st.sampled_from(
    [OK, b"content-length: 43\r\n", b"transfer-encoding: chunked\r\n", b"\r\n", BODY, b"2b\r\n", b"-5\r\n"]
)


@given(answer=st.binary(max_size=200) | st.lists(pieces | st.binary(max_size=20), max_size=8).map(b"".join))
def test_any_answer_is_read_or_refused(answer: bytes) -> None:
    opened = Opened(answer)
    asked = FrameConnection(cast("Callable[[], object]", lambda: opened), "http://127.0.0.1:1", "/")  # type: ignore[arg-type]
    try:
        asked.post(b"", "", "text/plain")
    except (OSError, BadAnswer):
        pass
    finally:
        asked.close()
        opened.server.close()
        opened.close()
