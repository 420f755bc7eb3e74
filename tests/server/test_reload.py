from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery.attempts import WebhookSettings
from eagle_eye.server.delivery.webhook import Guard, system_resolver
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.clock import SystemClock
from eagle_eye.server.model.errors import StoreUnavailable, TargetRefused
from eagle_eye.server.reload import APPLIED, differences
from eagle_eye.server.security.settings import LimitSettings
from eagle_eye.server.telemetry.settings import LogSettings
from tests.server.builders import Running, running, settings

WITHIN_S = 10.0
PRIVATE = "http://127.0.0.1:9/"


def eventually(claim: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not claim():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class File:
    """A configuration file that an operator edits."""

    def __init__(self, folder: Path) -> None:
        self.error: Exception | None = None
        self.reads = 0
        self.flags: dict[str, object] = {}
        self._folder = folder

    def read(self) -> ServerConfig:
        self.reads += 1
        if self.error is not None:
            raise self.error
        return settings(self._folder, **self.flags)


def reload(server: Running, file: File) -> None:
    """Ask for a reload and wait until it is over: the reading of one more has begun."""
    for _ in range(2):
        reads = file.reads
        server.dispatcher.reload()
        eventually(lambda: file.reads > reads)  # noqa: B023 - it is called at once


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


def test_what_can_change_changes_and_the_rest_is_named(
    tmp_path: Path, file: File, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[str] = []
    monkeypatch.setattr("eagle_eye.server.telemetry.logs.set_level", levels.append)
    with running(tmp_path, reread=file.read) as server, caplog.at_level(logging.INFO, "eagle_eye.server.reload"):
        parts = server.dispatcher.services
        listen = parts.config.listen
        file.flags = {
            "listen": listen,
            "policy__mode": "approve",
            "webhooks__allow_private": True,
            "webhooks__timeout_s": 3.0,
            "limits__token_burst": 7,
            "log__level": "error",
            "streams_max": 3,
        }
        reload(server, file)
        assert [policy.mode for policy in server.watcher.policies] == ["approve"]
        assert levels == ["error"]
        audit = server.client.get("/api/v1/audit").json()["items"]
        assert [(entry["who"], entry["verb"]) for entry in audit] == [("configuration", "reload")]
        assert "policy.mode: 'observe' -> 'approve'" in audit[0]["detail"]
        assert "streams_max" not in audit[0]["detail"]
        assert server.metric("config_reload_success") == 1
    said = {record.getMessage(): record for record in caplog.records}
    waiting = said["some changes of the configuration need a restart"]
    assert vars(waiting)["keys"] == "streams_max, webhooks.timeout_s"


def test_private_targets_are_allowed_and_forbidden_again() -> None:
    guard = Guard(allow_private=False, resolve=system_resolver())
    guard.allow_private(True)
    asyncio.run(guard.check(PRIVATE))
    guard.allow_private(False)
    with pytest.raises(TargetRefused):
        asyncio.run(guard.check(PRIVATE))


def test_a_bad_file_changes_nothing_and_is_said(tmp_path: Path, file: File, caplog: pytest.LogCaptureFixture) -> None:
    with running(tmp_path, SystemClock(), reread=file.read) as server:
        taken_s = server.metric("config_reload_success_timestamp_seconds")
        assert time.time() - taken_s < 60.0
        file.error = ConfigurationError("policy.mode: expected one of 'observe'")
        reload(server, file)
        assert server.metric("config_reload_success") == 0
        assert server.metric("config_reload_success_timestamp_seconds") == taken_s
        assert server.watcher.policies == []
        assert any("policy.mode" in str(vars(record).get("error")) for record in caplog.records)
        file.error = None
        file.flags = {"listen": server.dispatcher.services.config.listen}
        reload(server, file)
        assert server.metric("config_reload_success") == 1
        assert server.metric("config_reload_success_timestamp_seconds") > taken_s


def test_a_policy_that_cannot_be_written_down_is_not_taken_over(
    tmp_path: Path, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, reread=file.read) as server:

        def full(_change: object) -> None:
            raise StoreUnavailable("the disk is full")

        monkeypatch.setattr(server.dispatcher.services.store, "commit", full)
        file.flags = {"listen": server.dispatcher.services.config.listen, "policy__mode": "act"}
        reload(server, file)
        assert server.watcher.policies == []
        assert server.metric("config_reload_success") == 0
        monkeypatch.undo()
        reload(server, file)
        assert [policy.mode for policy in server.watcher.policies] == ["act"]


def test_only_what_differs_is_a_difference() -> None:
    old = ServerConfig(policy=PolicySettings(mode="observe"), limits=LimitSettings(token_burst=5))
    new = ServerConfig(policy=PolicySettings(mode="act"), limits=LimitSettings(token_burst=5), streams_max=3)
    assert differences(old, new) == {"policy.mode": ("observe", "act"), "streams_max": (64, 3)}


def test_a_group_of_nodes_that_comes_or_goes_is_a_difference() -> None:
    without, group = ServerConfig(), PolicySettings(node_groups={"lent": ["a*"]})
    having = ServerConfig(policy=group)
    assert differences(without, having) == {"policy.node_groups.lent": (None, ["a*"])}
    assert differences(having, without) == {"policy.node_groups.lent": (["a*"], None)}


@pytest.mark.parametrize("part", APPLIED)
def test_what_is_taken_over_at_once_is_a_section_or_key_that_exists(part: str) -> None:
    section, _, key = part.partition(".")
    assert section in ServerConfig.__struct_fields__
    shapes = {"webhooks": WebhookSettings, "log": LogSettings}
    assert not key or key in shapes[section].__struct_fields__
