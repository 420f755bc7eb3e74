"""NVRx's node health check: what ft_launcher's gRPC client gets over the agent's socket."""

from __future__ import annotations

import errno
import json
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from urllib.parse import unquote

import pytest

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.config import read
from eagle_eye.agent.node_check import Ran
from eagle_eye.schema.configuration import ConfigurationError

pytest.importorskip("h2", reason="h2 is not installed: pip install 'eagle-eye[nvrx]'")

from h2.connection import H2Connection
from h2.events import DataReceived, PingAckReceived, ResponseReceived, StreamEnded, TrailersReceived

from eagle_eye.agent.nvrx_health import LISTEN_EVERY_S, METHOD, HostHealth, NvrxHealth, health_of

WITHIN_S = 10.0


@contextmanager
def served(path: Path, check: Callable[[], HostHealth], drops: Drops | None = None) -> Iterator[Path]:
    health = NvrxHealth(path, lambda _in_the_way: check(), drops or Drops())
    health.start()
    try:
        yield path
    finally:
        health.stop()


def call(path: Path, method: bytes = METHOD) -> tuple[dict[str, str], bytes]:
    """Return the headers and trailers together, and the body, as a gRPC client would see them."""
    http = H2Connection()
    http.initiate_connection()
    http.send_headers(
        1, [(b":method", b"POST"), (b":scheme", b"http"), (b":path", method), (b":authority", b"localhost")]
    )
    http.send_data(1, b"\0\0\0\0\x0c\x0a\x0a--no-slurm", end_stream=True)
    reported: dict[str, str] = {}
    body = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(WITHIN_S)
        end.connect(str(path))
        end.sendall(http.data_to_send())
        while data := end.recv(65_536):
            for event in http.receive_data(data):
                if isinstance(event, ResponseReceived | TrailersReceived):
                    reported.update({bytes(k).decode(): bytes(v).decode() for k, v in event.headers})
                elif isinstance(event, DataReceived):
                    body += event.data
                elif isinstance(event, StreamEnded):
                    return reported, body
            end.sendall(http.data_to_send())
    raise AssertionError(f"the connection ended before the answer: {reported}")


def fields(body: bytes) -> dict[int, int | bytes]:
    """Return the fields of a protobuf message of one-byte keys, varints and strings."""
    compressed, length, message = body[0], int.from_bytes(body[1:5], "big"), body[5:]
    assert (compressed, length) == (0, len(message))
    found: dict[int, int | bytes] = {}
    while message:
        key, message = message[0], message[1:]
        value = shift = 0
        while True:
            byte, message = message[0], message[1:]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if key & 7 == 2:
            found[key >> 3], message = message[:value], message[value:]
        else:
            found[key >> 3] = value
    return found


def output(body: bytes) -> dict[str, object]:
    text = fields(body)[3]
    assert isinstance(text, bytes)
    document: dict[str, object] = json.loads(text)
    return document


def test_a_healthy_host_may_join(tmp_path: Path) -> None:
    with served(tmp_path / "s", lambda: HostHealth("healthy")) as path:
        reported, body = call(path)
    assert (reported[":status"], reported["grpc-status"]) == ("200", "0")
    assert fields(body)[1] == 1
    assert output(body) == {"fail_count": 0, "failed_checks": [], "verdict": "healthy"}


def test_a_sick_host_is_kept_out_with_its_reasons(tmp_path: Path) -> None:
    reasons = ("gpu 3: lost, it has left the bus; reboot", "x" * 300)
    with served(tmp_path / "s", lambda: HostHealth("sick", reasons)) as path:
        reported, body = call(path)
    assert reported["grpc-status"] == "0"
    assert 1 not in fields(body)
    assert fields(body)[2] == 3
    assert output(body) == {"fail_count": 2, "failed_checks": [*reasons], "verdict": "sick"}


def test_where_nobody_can_tell_the_check_is_unavailable_which_keeps_nobody_out(tmp_path: Path) -> None:
    with served(tmp_path / "s", lambda: HostHealth("cannot_tell", ("nvml: failed: naïve",))) as path:
        reported, body = call(path)
    assert (reported["grpc-status"], unquote(reported["grpc-message"])) == ("14", "cannot tell: nvml: failed: naïve")
    assert body == b""


def test_a_check_that_fails_by_itself_accuses_nobody(tmp_path: Path) -> None:
    def broken() -> HostHealth:
        raise OSError("no more processes")

    with served(tmp_path / "s", broken) as path:
        assert call(path)[0]["grpc-status"] == "14"


def test_another_method_is_unimplemented_and_counted(tmp_path: Path) -> None:
    drops = Drops()
    with served(tmp_path / "s", lambda: HostHealth("sick"), drops) as path:
        assert call(path, b"/grpc.health.v1.Health/Check")[0]["grpc-status"] == "12"
    assert drops.snapshot() == {"nvrx_health_unknown_method": 1}


def test_whoever_speaks_no_http2_is_cut_off_and_the_next_one_is_answered(tmp_path: Path) -> None:
    drops = Drops()
    with served(tmp_path / "s", lambda: HostHealth("healthy"), drops) as path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.settimeout(WITHIN_S)
            end.connect(str(path))
            end.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            while end.recv(65_536):
                pass
        assert call(path)[0]["grpc-status"] == "0"
    assert drops.snapshot() == {"nvrx_health_malformed": 1}


def test_requests_that_are_opened_and_reset_leave_nothing_behind(tmp_path: Path) -> None:
    health = NvrxHealth(tmp_path / "s", lambda _in_the_way: HostHealth("healthy"), Drops())
    health.start()
    http = H2Connection()
    http.initiate_connection()
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", METHOD), (b":authority", b"localhost")]
    for stream in range(1, 400, 2):
        http.send_headers(stream, head)
        http.send_data(stream, b"\0")
        http.reset_stream(stream)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.settimeout(WITHIN_S)
            end.connect(str(tmp_path / "s"))
            end.sendall(http.data_to_send())
            http.ping(b"all read")
            end.sendall(http.data_to_send())
            while not any(isinstance(event, PingAckReceived) for event in http.receive_data(end.recv(65_536))):
                pass
            (connection,) = health._connections.values()
            assert (connection.paths, connection.bytes_read) == ({}, {})
    finally:
        health.stop()


def send_for_ever(end: socket.socket, data: bytes) -> None:
    while True:
        end.sendall(data)


def test_whoever_asks_and_never_reads_is_cut_off(tmp_path: Path) -> None:
    drops = Drops()
    http = H2Connection()
    http.initiate_connection()
    for _ in range(1_000):
        http.ping(b"are you?")
    flood = http.data_to_send()
    with served(tmp_path / "s", lambda: HostHealth("healthy"), drops) as path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.settimeout(WITHIN_S)
            end.connect(str(path))
            end.sendall(flood)
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                send_for_ever(end, flood.partition(b"SM\r\n\r\n")[2])
        assert call(path)[0]["grpc-status"] == "0"
    assert drops.snapshot() == {"nvrx_health_slow": 1}


def test_without_descriptors_nobody_is_let_in_for_a_while_and_the_thread_rests(tmp_path: Path) -> None:
    class Exhausted:
        def accept(self) -> tuple[socket.socket, str]:
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self) -> int:
            return listener.fileno()

    now_s = [0.0]
    drops = Drops()
    health = NvrxHealth(tmp_path / "s", lambda _in_the_way: HostHealth("healthy"), drops, lambda: now_s[0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        health._listener = listener
        health._selector.register(listener, selectors.EVENT_READ)
        health._accept(cast("socket.socket", Exhausted()))
        assert not health._selector.get_map()
        now_s[0] = LISTEN_EVERY_S
        health._selector.register(health._woken, selectors.EVENT_READ)
        health._wake.send(b"x")
        health._serve()
        assert listener.fileno() in {key.fd for key in health._selector.get_map().values()}
        health._listener = None
        health._close_all()
    assert drops.snapshot() == {"nvrx_health_connections": 1}


def test_launchers_that_ask_together_get_one_verdict(tmp_path: Path) -> None:
    checks = []

    def check() -> HostHealth:
        checks.append(1)
        return HostHealth("healthy")

    with served(tmp_path / "s", check) as path:
        assert [call(path)[0]["grpc-status"] for _ in range(3)] == ["0"] * 3
    assert len(checks) == 1


def test_a_socket_left_by_a_killed_agent_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path, drops = tmp_path / "s", Drops()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
    with served(path, lambda: HostHealth("healthy")):
        with served(path, lambda: HostHealth("sick"), drops):
            assert drops.snapshot() == {"nvrx_health_no_socket": 1}
        assert call(path)[0]["grpc-status"] == "0"
    assert not path.exists()


@pytest.mark.parametrize(
    ("ran", "health"),
    [
        (Ran(0, b"healthy: nothing stands against this host (nvml)\n", ""), HostHealth("healthy")),
        (
            Ran(3, b"sick: gpu 0: lost\nsick: a link is down\n", ""),
            HostHealth("sick", ("gpu 0: lost", "a link is down")),
        ),
        (Ran(1, b"", "could not check: nvml"), HostHealth("cannot_tell", ("could not check: nvml",))),
        (Ran(2, b"", ""), HostHealth("cannot_tell", ("the check ended with 2",))),
        (Ran(-9, b"sick: gpu 0: lost\n", ""), HostHealth("cannot_tell", ("the check ended with -9",))),
        (Ran(None, b"sick: gpu 0: lost\n", "", "too late"), HostHealth("cannot_tell", ("too late",))),
    ],
)
def test_only_a_verdict_accuses(ran: Ran, health: HostHealth) -> None:
    assert health_of(ran) == health


def test_a_relative_path_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nvrx_health_socket: expected an absolute path"):
        read(None, {}, {"nvrx_health_socket": "nvhcd.sock"})


def test_grpcs_own_client_gets_the_same(tmp_path: Path) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed: make test-full")
    ask = METHOD.decode()
    with served(tmp_path / "a", lambda: HostHealth("sick", ("gpu 3",))) as path:
        with grpc.insecure_channel(f"unix://{path}") as channel:
            said = channel.unary_unary(ask)(b"\x0a\x0a--no-slurm", timeout=WITHIN_S)
        assert b'"fail_count": 1' in said
    with served(tmp_path / "b", lambda: HostHealth("cannot_tell", ("nvml",))) as path:
        with grpc.insecure_channel(f"unix://{path}") as channel, pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(ask)(b"", timeout=WITHIN_S)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
