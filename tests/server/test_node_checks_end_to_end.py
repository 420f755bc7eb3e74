"""A node's return from end to end: real server, real agent, the real check in a child, the operator's commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.agent.clock import SystemClock
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.evidence.requests import Upload, UploadTarget
from eagle_eye.agent.node_check import PATH, NodeCheckResponder
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.cli.main import main
from tests.agent.fakes import until
from tests.server.builders import FakeClock, Running, running
from tests.server.checked_nodes import Site, report
from tests.server.test_end_to_end import eventually


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    clock = FakeClock()
    with running(tmp_path, clock) as started:
        yield Site(started, clock)


def agent_of(server: Running, command: list[str], training: list[Any]) -> NodeCheckResponder:
    upload = Upload(UploadTarget(Servers([server.url]), lambda: ""), SystemClock(), path=PATH)
    return NodeCheckResponder(command, lambda: training, upload.send, Drops(), memory_bytes=lambda: None)


def real_check(folder: Path) -> list[str]:
    return [sys.executable, "-m", "eagle_eye.cli.main", "check", "--quick", "--folder", str(folder)]


def test_a_real_check_of_a_real_agent_brings_a_node_back(tmp_path: Path) -> None:
    with running(tmp_path / "server", SystemClock()) as server:
        site = Site(server, SystemClock())
        agent = agent_of(server, real_check(tmp_path), [])
        site.out(fault="storage_stall", reason="storage_stall: inc_1")
        site.hear()
        assert site.readmit().status_code == 202

        def over() -> bool:
            agent.answered(site.hear())
            return bool(site.shown()["phase"] != "checking")

        eventually(over)
        agent.close()
        (record,) = site.checks()
        assert (record["state"], site.shown()["phase"]) == ("healthy", "watched"), record
        (disk,) = record["outcomes"]
        assert (disk["name"], disk["state"]) == ("disk", "passed")
        assert {figure["name"] for figure in disk["values"]} >= {"sync_seconds"}


WRONG_TORCH = """
import torch
right = torch.matmul
def wrong(*operands, **more):
    found = right(*operands, **more)
    found[7, 9] += 2
    return found
torch.matmul = wrong
"""


@pytest.mark.slow
def test_an_idle_node_that_computes_wrong_numbers_is_drained(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_TORCH)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    command = [sys.executable, "-m", "eagle_eye.cli.main", "check", "--torch-python", str(python)]
    settings = {"weekly_budget_s": 60.0, "check_s": 10.0, "idle_s": 0.0}
    more: dict[str, Any] = {f"idle_checks__{key}": value for key, value in settings.items()}
    with running(tmp_path / "server", SystemClock(), judging=True, policy__mode="act", **more) as server:
        site = Site(server, SystemClock())
        agent = agent_of(server, command, [])
        site.hear()
        eventually(lambda: server.dispatcher.services.idle_checks.request_due_checks(()) == [site.node])

        def acted() -> bool:
            agent.answered(site.hear())
            return bool(server.client.get("/api/v1/actions").json()["items"])

        until(acted, 120.0)
        agent.close()
        (action,) = server.client.get("/api/v1/actions").json()["items"]
        asked = {name: action[name] for name in ("kind", "fault", "job", "exclude", "restart", "state")}
        assert asked == {
            "kind": "drain_node",
            "fault": "silent_data_corruption",
            "job": "",
            "exclude": [site.node],
            "restart": False,
            "state": "requested",
        }
        (check,) = site.checks()
        assert (check["purpose"], check["state"]) == ("idle", "sick")
        incident = f"/api/v1/incidents/{action['incident_id']}"
        assert "[7,9] expected" in server.client.get(incident).json()["summary"]
        assert server.client.get(f"{incident}/policy").json()["decision"]["kind"] == "drain_node"
        for path in (f"{incident}/dossier", "/api/v1/fleet", "/api/v1/ledger", f"/api/v1/nodes/{site.node}/history"):
            assert server.client.get(path).status_code == 200, path
        assert site.readmit().status_code == 200  # it is in service until a subscriber has drained it
        reported = server.client.post(f"/api/v1/actions/{action['id']}/reports", json={"state": "done"})
        assert reported.status_code == 200
        assert (site.shown()["state"], site.readmit().json()["reason"]) == ("draining", "by_hand")


def test_the_commands_ask_and_list_and_force(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    to = ["--server", site.server.url]
    site.out(fault="storage_stall", reason="storage_stall: inc_1")
    site.hear()
    assert main(["nodes", "readmit", site.node, "--no-wait", *to]) == 0
    assert "returns once chk_" in capsys.readouterr().out
    site.tell(site.checks()[0]["id"], report=report("disk", verdict="sick", reason="disk"))
    assert main(["nodes", "checks", site.node, *to]) == 0
    assert "sick" in capsys.readouterr().out
    assert main(["nodes", "readmit", site.node, "--force", "--reason", "new disk", *to]) == 0
    assert site.shown()["reason"] == "new disk; readmitted without a check: forced by local"


@pytest.mark.parametrize(("given", "seconds"), [((), 60.0), (("--seconds", "300"), 300.0)])
def test_the_command_asks_for_the_search_for_silent_corruption(
    site: Site, given: tuple[str, ...], seconds: float
) -> None:
    site.hear()
    assert main(["nodes", "check", site.node, "--sdc", *given, "--no-wait", "--server", site.server.url]) == 0
    assert site.checks()[0]["sdc_seconds"] == seconds


@pytest.mark.parametrize("given", [("--seconds", "60"), ("--sdc", "--seconds", "0"), ("--sdc", "--seconds", "601")])
def test_seconds_that_no_search_takes_are_refused(
    site: Site, capsys: pytest.CaptureFixture[str], given: tuple[str, ...]
) -> None:
    assert main(["nodes", "check", site.node, *given, "--server", site.server.url]) != 0
    assert "--seconds: expected" in capsys.readouterr().err


@pytest.fixture
def answering(site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the agent answer with a verdict while the command waits."""

    def arrange(verdict: str) -> None:
        def answered(_s: float) -> None:
            site.tell(site.checks()[0]["id"], report=report("disk", verdict=verdict, reason="so it is"))

        monkeypatch.setattr("eagle_eye.cli.nodes.time.sleep", answered)

    site.hear()
    return arrange


@pytest.mark.parametrize(("verdict", "code"), [("healthy", 0), ("cannot_tell", 1), ("sick", 3)])
def test_the_exit_code_of_a_check_is_its_verdict(
    site: Site, answering: Callable[[str], None], capsys: pytest.CaptureFixture[str], verdict: str, code: int
) -> None:
    answering(verdict)
    assert main(["nodes", "check", site.node, "--server", site.server.url]) == code
    assert "so it is" in capsys.readouterr().out


def test_a_return_that_its_check_refuses_is_an_error_that_says_why(
    site: Site, answering: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    site.out()
    answering("sick")
    assert main(["nodes", "readmit", site.node, "--server", site.server.url]) == 1
    assert f"{site.node} stays excluded: its check is sick: so it is" in capsys.readouterr().err
