from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.agent.config import AgentConfiguration, read, spool_folder
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
        ({"color": "red"}, "unknown key color"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(None, {}, flags)


def test_a_user_who_may_not_write_system_folders_has_one_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_eye.agent.config.SYSTEM_SPOOL", tmp_path / "absent" / "spool")
    assert spool_folder(AgentConfiguration(), {"HOME": "/home/a"}) == Path("/home/a/.local/state/eagle-eye/agent")
    assert spool_folder(AgentConfiguration(), {"XDG_STATE_HOME": "/s"}) == Path("/s/eagle-eye/agent")
    monkeypatch.setattr("eagle_eye.agent.config.SYSTEM_SPOOL", tmp_path / "spool")
    assert spool_folder(AgentConfiguration(), {}) == tmp_path / "spool"
    assert spool_folder(AgentConfiguration(spool_dir="/d"), {}) == Path("/d")
