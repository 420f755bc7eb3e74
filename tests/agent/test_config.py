from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.agent.config import AgentConfiguration, read, server_urls, spool_folder
from eagle_eye.schema.configuration import ConfigurationError


def test_flags_override_the_environment_and_that_the_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('server = "http://file:1"\nnode = "file"\njob = "file"\ninterval_s = 5\n')
    environ = {"EAGLE_EYE_NODE": "environment", "EAGLE_EYE_JOB": "environment", "EAGLE_EYE_RANK_SOMETHING": "x"}
    made = read(file, environ, {"job": "flag", "node": None})
    assert (made.server, made.node, made.job, made.interval_s) == ("http://file:1", "environment", "flag", 5.0)


def test_the_node_is_the_host_unless_named() -> None:
    assert read(None, {}, {}).node


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"server": "ftp://x"}, "server: expected http://host:port"),
        ({"server": "http://"}, "server: expected"),
        ({"server": "http://x:99999"}, "server: expected"),
        ({"server": "http://u:p@x"}, "server: a URL with a password"),
        ({"node": "a\nb"}, "node: expected 1 to 253 printable characters"),
        ({"interval_s": 0.0}, "interval_s: expected 0.1 to 3600"),
        ({"interval_s": float("nan")}, "interval_s: expected 0.1 to 3600"),
        ({"spool_bytes_max": 5}, "spool_bytes_max: expected"),
        ({"token_file": "/nowhere/at/all"}, "token_file: /nowhere/at/all cannot be read"),
        ({"hook_socket": "/" + "x" * 200}, "hook_socket: expected a path of at most 107 bytes"),
        ({"server": "http://[::1"}, "server: expected"),
        (
            {"servers": ["http://a", "ftp://b"]},
            r"servers\[1\]: expected http://host:port or https://host:port, got 'ftp",
        ),
        ({"servers": ["http://u:secret@a"]}, r"servers\[0\]: a URL with a password"),
        (
            {"servers": ["http://a", "HTTP://A:80/"]},
            r"servers\[1\]: expected each server once, got 'HTTP://A:80/' again",
        ),
        ({"servers": [f"http://a:{port}" for port in range(1, 10)]}, "servers: expected at most 8, got 9"),
        ({"servers": ["http://a"], "server": "http://b"}, "server: expected either server .* or servers, got both"),
        ({"color": "red"}, "unknown key color"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(None, {}, flags)


def test_one_server_or_a_list_of_them_and_without_either_this_host_s(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('servers = ["https://a:8470", "https://b:8470"]\n')
    assert server_urls(read(file, {}, {})) == ["https://a:8470", "https://b:8470"]
    assert server_urls(read(None, {"EAGLE_EYE_SERVERS": '["http://a", "http://b"]'}, {})) == ["http://a", "http://b"]
    assert server_urls(read(None, {"EAGLE_EYE_SERVER": "http://c"}, {})) == ["http://c"]
    assert server_urls(read(None, {}, {})) == ["http://127.0.0.1:8470"]


@pytest.mark.parametrize(("environ", "flags"), [({"EAGLE_EYE_SERVER": "http://c"}, {}), ({}, {"server": "http://c"})])
def test_a_server_beside_a_file_s_list_is_refused_wherever_it_is_named(
    tmp_path: Path, environ: dict[str, str], flags: dict[str, str]
) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('servers = ["https://a:8470"]\n')
    with pytest.raises(ConfigurationError, match="got both; leave one out"):
        read(file, environ, flags)


def test_a_user_who_may_not_write_system_folders_has_one_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_eye.agent.config.SYSTEM_SPOOL", tmp_path / "absent" / "spool")
    assert spool_folder(AgentConfiguration(), {"HOME": "/home/a"}) == Path("/home/a/.local/state/eagle-eye/agent")
    assert spool_folder(AgentConfiguration(), {"XDG_STATE_HOME": "/s"}) == Path("/s/eagle-eye/agent")
    monkeypatch.setattr("eagle_eye.agent.config.SYSTEM_SPOOL", tmp_path / "spool")
    assert spool_folder(AgentConfiguration(), {}) == tmp_path / "spool"
    assert spool_folder(AgentConfiguration(spool_dir="/d"), {}) == Path("/d")
