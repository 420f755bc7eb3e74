from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.hook import attach
from tests.agent.fakes import until
from tests.agent.test_uplink import Server

AGENT = """
import argparse, sys
from eagle_eye.agent.command import configure, run
parser = argparse.ArgumentParser()
configure(parser)
sys.exit(run(parser.parse_args()))
"""

COLLECTORS = {
    *("host", "mounts", "clock_offset", "temperature", "fabric", "kernel_log", "nvml", "processes"),
    *("tensorboard", "training_log", "nccl_inspector", "nccl_ras", "flight_recorder", "memory_checkpoint", "training"),
}


def agent(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    common = ["--hook-socket", str(folder / "hook.sock"), "--spool", str(folder / "spool"), "--node", "n1"]
    return subprocess.Popen(
        [sys.executable, "-c", AGENT, *common, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@contextlib.contextmanager
def running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = agent(folder, *arguments)
    try:
        until(lambda: (folder / "hook.sock").exists() or process.poll() is not None, 30.0)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_once_and_print_show_one_frame_of_this_node(tmp_path: Path) -> None:
    out, err = agent(tmp_path, "--once", "--print", "--interval", "0.2").communicate(timeout=30)
    (line,) = out.splitlines()
    frame = json.loads(line)
    assert frame["node"] == "n1"
    assert 0.0 < frame["rows"]["node"]["-1"]["node_memory_used_ratio"] < 1.0
    assert "node_cpu_utilization_ratio" in frame["rows"]["node"]["-1"]
    assert frame["collectors"].keys() == COLLECTORS
    assert "agent_start" in [event["kind"] for event in frame["events"]]  # the kernel of this host may tell more
    assert not (tmp_path / "spool").exists()
    assert "Traceback" not in err


def test_a_rank_reaches_the_server_and_its_end_too(tmp_path: Path, server: Server) -> None:
    with running(tmp_path, "--server", server.url, "--interval", "0.2") as process:
        training = attach(socket=tmp_path / "hook.sock", step=41)
        training.step(loss=1.5)
        until(lambda: any("train_loss" in b.metrics for f in server.frames for b in f.blocks))
        training.detach()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    events = [event for frame in server.frames for event in frame.events]
    assert [e.kind for e in events if e.kind.startswith("agent")] == ["agent_start", "agent_stop"]
    assert [e.attributes["name"] for e in events if e.kind == "phase"] == ["start", "train"]
    assert [f.sequence for f in server.frames] == list(range(1, len(server.frames) + 1))
    assert {rank.pid for f in server.frames for rank in f.ranks} == {os.getpid()}
    assert not (tmp_path / "hook.sock").exists()


def test_the_agent_greets_once_the_server_has_taken_a_frame(tmp_path: Path, server: Server) -> None:
    with running(tmp_path, "--server", server.url, "--interval", "0.2") as process:
        until(lambda: len(server.frames) > 3, 30.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    assert said.count(f"connected to {server.url} as n1: ") == 1
    assert "collector host: ok" not in said


def test_frames_of_an_outage_arrive_after_a_restart(tmp_path: Path, server: Server) -> None:
    with running(tmp_path, "--server", "http://127.0.0.1:1", "--interval", "0.2") as process:
        until(lambda: any((tmp_path / "spool").glob("*.frames")), 30.0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert "wait in the spool for the next start" in process.stderr.read()
    process = agent(tmp_path, "--server", server.url, "--interval", "0.2", "--once")
    process.communicate(timeout=30)
    assert process.returncode == 0
    reported = [e.kind for f in server.frames for e in f.events if e.kind.startswith("agent_")]
    assert reported == ["agent_start", "agent_stop", "agent_start"]
    assert len({f.stream for f in server.frames}) == 2  # each start begins one


def test_an_agent_with_two_servers_sends_to_the_one_that_is_there_and_counts_the_change(
    tmp_path: Path, server: Server
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    config = tmp_path / "agent.toml"
    config.write_text(f'servers = ["http://127.0.0.1:1", "{server.url}"]\nmetrics_listen = "{listen}"\n')
    with running(tmp_path, "--config", str(config), "--interval", "0.2"):
        until(lambda: len(server.frames) > 1, 30.0)
        with urllib.request.urlopen(f"http://{listen}/metrics", timeout=10.0) as page:
            lines = page.read().decode().splitlines()
    assert 'eagle_eye_agent_server_changes_total{node="n1"} 1' in [line.removesuffix(".0") for line in lines]


def test_once_without_a_server_fails(tmp_path: Path) -> None:
    process = agent(tmp_path, "--server", "http://127.0.0.1:1", "--interval", "0.2", "--once")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "cannot be reached" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--server", "nonsense"), "server: expected http://host:port"),
        (("--config", "/nowhere.toml"), "configuration file /nowhere.toml cannot be read"),
        (("--interval", "0"), "interval_s: expected 0.1 to 3600"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    process = agent(tmp_path, *arguments)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_spool_in_use_is_one_line_and_exit_code_2(tmp_path: Path, server: Server) -> None:
    with running(tmp_path, "--server", server.url):
        until((tmp_path / "spool" / "lock").exists)
        other = agent(tmp_path, "--server", server.url)
        _, err = other.communicate(timeout=30)
    assert other.returncode == 2
    assert "in use by another agent" in err
    assert len(err.splitlines()) == 1


def test_the_agent_imports_nothing_heavy() -> None:
    program = "import sys, eagle_eye.agent.command, eagle_eye.agent.loop; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "numpy", "pandas", "fastapi", "pyarrow", "httpx", "pydantic"} & set(out.split())


def test_a_token_that_every_user_can_read_is_said_once_at_the_start(tmp_path: Path, server: Server) -> None:
    with tempfile.TemporaryDirectory() as name:  # unlike tmp_path, entered by every user
        Path(name).chmod(0o755)
        token = Path(name) / "token"
        token.write_text("t")
        for mode, times in ((0o644, 1), (0o600, 0)):
            token.chmod(mode)
            process = agent(tmp_path, "--server", server.url, "--token-file", str(token), "--once")
            _, err = process.communicate(timeout=60)
            assert err.count("every user of this machine can read") == times
