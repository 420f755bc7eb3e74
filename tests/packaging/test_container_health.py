from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from eagle_eye.agent.collector import Drops, Observed, TickFrame
from eagle_eye.agent.config import AgentConfiguration
from eagle_eye.agent.exposition import Exposition, MetricsServer
from tests.agent.fakes import FakeClock

FILE = Path(__file__).parents[2] / "packaging/container/health.py"
TICK_S = 1_000_000.0
NO_FILE = Path("/nonexistent/server.toml")


@pytest.fixture(scope="module")
def health() -> ModuleType:
    spec = importlib.util.spec_from_file_location("container_health", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Agent:
    """An agent's own page as the agent serves it, and its configuration in the container."""

    def __init__(self, folder: Path) -> None:
        self.exposition = Exposition("n1", "1", Drops(), monotonic_s=FakeClock().monotonic_s)
        self._server = MetricsServer("127.0.0.1:0", self.exposition.page, Drops())
        self._server.start()
        self.listen = f"127.0.0.1:{self._server.port}"
        self.file = folder / "agent.toml"
        self.file.write_text(f'metrics_listen = "{self.listen}"\n')

    def ticks(self, interval_s: float = 1.0) -> None:
        self.exposition.show(TickFrame(TICK_S, interval_s, Observed(), (), (), 1))

    def close(self) -> None:
        self._server.stop()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path)
    yield agent
    agent.close()


def answering(said: bytes, then: Callable[[], object] = lambda: None, encrypt: ssl.SSLContext | None = None) -> str:
    """Serve one client with fixed bytes and return the address; ``then`` comes before the connection is closed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError), listener, listener.accept()[0] as plain:  # it may have heard enough
            end = encrypt.wrap_socket(plain, server_side=True) if encrypt else plain
            end.recv(1 << 16)
            end.sendall(said)
            then()
            end.close()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_its_defaults_are_the_agents_own(health: ModuleType) -> None:
    assert (
        AgentConfiguration().metrics_listen,
        AgentConfiguration().interval_s,
    ) == (health.METRICS_LISTEN, health.INTERVAL_S)


def test_an_agent_with_a_fresh_frame_is_well(health: ModuleType, agent: Agent) -> None:
    agent.ticks()
    assert health.agent(agent.file, {}, TICK_S + 2.0) == "the agent's newest frame is 2.0 s old"


def test_an_agent_whose_loop_stands_still_is_not_well_though_its_page_is_served(
    health: ModuleType, agent: Agent
) -> None:
    agent.ticks()
    with pytest.raises(health.NotWell, match=r"newest frame is 61 s old, at an interval of 1 s"):
        health.agent(agent.file, {}, TICK_S + 61.0)


def test_rare_frames_are_no_standstill(health: ModuleType, agent: Agent) -> None:
    agent.ticks(60.0)
    with agent.file.open("a") as file:
        file.write("interval_s = 60\n")
    assert health.agent(agent.file, {}, TICK_S + 170.0)
    with pytest.raises(health.NotWell, match="interval of 10 s"):
        health.agent(agent.file, {"EAGLE_EYE_INTERVAL_S": "10"}, TICK_S + 170.0)


def test_an_agent_without_a_frame_is_not_well(health: ModuleType, agent: Agent) -> None:
    with pytest.raises(health.NotWell, match="no frame yet"):
        health.agent(agent.file, {}, TICK_S)


def test_the_environment_wins_over_the_file_and_no_file_is_needed(health: ModuleType, agent: Agent) -> None:
    agent.ticks()
    agent.file.write_text('metrics_listen = "127.0.0.1:1"\n')
    environ = {"EAGLE_EYE_METRICS_LISTEN": agent.listen}
    assert health.agent(agent.file, environ, TICK_S)
    assert health.agent(agent.file.parent / "absent.toml", environ, TICK_S)


def test_an_agent_without_a_page_cannot_be_judged(health: ModuleType, agent: Agent) -> None:
    with pytest.raises(health.NotWell, match="metrics_listen is empty"):
        health.agent(agent.file, {"EAGLE_EYE_METRICS_LISTEN": ""}, TICK_S)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "answered b'HTTP/1.1 503 Service Unavailable'"),
        (b"SSH-2.0-OpenSSH\r\n", "answered b'SSH-2.0-OpenSSH'"),
        (b"", "answered b''"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (9 << 20), "more than 8388608 bytes"),
    ],
)
def test_whoever_else_answers_is_no_healthy_server(health: ModuleType, said: bytes, reason: str) -> None:
    with pytest.raises(health.NotWell, match=reason):
        health.server(NO_FILE, {"EAGLE_EYE_LISTEN": answering(said)})


def test_a_server_that_accepts_and_says_nothing_is_given_up(
    health: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "ANSWER_S", 0.2)
    over = threading.Event()
    listen = answering(b"HTTP/1.1 200", lambda: over.wait(30.0))
    with pytest.raises(TimeoutError):
        health.server(NO_FILE, {"EAGLE_EYE_LISTEN": listen})
    over.set()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with a certificate that nobody vouches for, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: apt-get install openssl")
    file = tmp_path / "server.pem"
    words = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=eagle-eye"]
    command = ["openssl", "req", *words, "-keyout", str(file), "-out", f"{file}.crt"]
    subprocess.run(command, check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + Path(f"{file}.crt").read_bytes())
    return file


@pytest.mark.parametrize("demanded", [False, True])
def test_a_server_with_tls_is_asked_by_tls_and_lives_also_if_it_demands_a_certificate(
    health: ModuleType, certificate: Path, tmp_path: Path, demanded: bool
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    if demanded:
        context.load_verify_locations(certificate)
        context.verify_mode = ssl.CERT_REQUIRED
    text = f'[tls]\ncertificate_file = "{certificate}"\n'
    text += f'client_ca_file = "{certificate}"\nclient_certificates = "all"\n' if demanded else ""
    (tmp_path / "server.toml").write_text(text)
    listen = answering(b"HTTP/1.1 200 OK\r\n\r\n", encrypt=context)
    said = health.server(tmp_path / "server.toml", {"EAGLE_EYE_LISTEN": listen})
    assert said == ("the server answers the handshake" if demanded else "the server answers")


@pytest.mark.parametrize("words", [[], ["agents"], ["agent", "server"]])
def test_wrong_use_is_not_health(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-I", "-S", str(FILE), *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "expected agent or server\n")


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "nonsense", "127.0.0.1:x"])
def test_a_server_that_cannot_be_asked_is_one_line(listen: str) -> None:
    command = [sys.executable, "-I", "-S", str(FILE), "server"]
    done = subprocess.run(command, env={"EAGLE_EYE_LISTEN": listen}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (1, 1, "")
    assert done.stdout.startswith("not well: ")
