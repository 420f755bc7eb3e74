"""The configuration that ``doctor`` examines: the running agent's, and nobody's by mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.agent.doctor import HostConfiguration, find_configuration
from eagle_eye.schema.configuration import ConfigurationError


class Host:
    """A /proc of a few processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        self.proc.mkdir()
        (self.proc / "uptime").write_text("1")

    def runs(self, pid: int, *words: str, environ: str = "HOME=/root") -> None:
        process = self.proc / str(pid)
        process.mkdir()
        (process / "cmdline").write_bytes("\0".join((*words, "")).encode())
        (process / "environ").write_bytes(environ.replace(" ", "\0").encode())
        (process / "cwd").symlink_to(self.folder)

    def find(self, **environ: str) -> HostConfiguration:
        return find_configuration(environ, proc=self.proc, system_config=self.folder / "system.toml")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize(
    "program",
    [
        ("/usr/bin/python3", "/usr/bin/eagle-eye"),
        ("eagle-eye",),
        ("python", "-m", "eagle_eye.cli.main"),
        ("python", "/opt/eagle_eye/cli/main.py"),
    ],
)
def test_the_running_agents_file_flags_and_environment_are_used(host: Host, program: tuple[str, ...]) -> None:
    (host.folder / "agent.toml").write_text('node = "from-file"\nserver = "http://file:1"\n')
    (host.folder / "token").write_text("secret")
    words = ("agent", "--config", "agent.toml", "--simulate", "--server", "http://flag:1", "--interval", "2")
    host.runs(41, *program, *words, environ=f"EAGLE_EYE_TOKEN_FILE={host.folder / 'token'} HOME=/root")
    found = host.find(EAGLE_EYE_NODE="of-the-caller")
    assert found.configuration is not None
    assert (found.configuration.node, found.configuration.server) == ("from-file", "http://flag:1")
    assert found.configuration.token_file == str(host.folder / "token")
    assert (found.finding.state, found.environ["HOME"]) == ("ok", "/root")
    assert "process 41 runs with" in found.finding.detail


def test_other_commands_and_programs_are_no_agents(host: Host) -> None:
    host.runs(41, "eagle-eye", "doctor")
    host.runs(42, "ssh-agent", "agent")
    host.runs(43, "vi", "agent")
    host.runs(44)
    found = host.find()
    assert found.finding.state == "note"
    assert "none runs here" in found.finding.detail


def test_of_several_agents_none_is_taken_for_the_one(host: Host) -> None:
    host.runs(41, "eagle-eye", "agent", "--server", "http://one:1")
    host.runs(42, "eagle-eye", "agent", "--server", "http://two:1")
    found = host.find(EAGLE_EYE_SERVER="http://mine:1")
    assert found.configuration is not None
    assert found.configuration.server == "http://mine:1"
    assert "several run here (processes 41, 42)" in found.finding.detail


def test_without_an_agent_the_packages_file_is_used(host: Host) -> None:
    (host.folder / "system.toml").write_text('server = "http://system:1"\n')
    found = host.find()
    assert found.configuration is not None
    assert found.configuration.server == "http://system:1"


def test_a_file_that_cannot_be_read_is_not_replaced_by_defaults(host: Host) -> None:
    host.runs(41, "eagle-eye", "agent", "--config", "/nowhere/agent.toml")
    found = host.find()
    assert found.configuration is None
    assert (found.finding.state, found.finding.remedy) == ("failed", "run this as the agent's user")


def test_a_wrong_key_is_reported_with_its_file(host: Host) -> None:
    (host.folder / "agent.toml").write_text("surprise = 1\n")
    host.runs(41, "eagle-eye", "agent", "--config", "agent.toml")
    with pytest.raises(ConfigurationError, match=r"process 41 runs with .*agent\.toml: .*surprise"):
        host.find()
