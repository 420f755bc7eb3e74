"""The torchft orchestrator against torchft itself: a real lighthouse and real replica groups on gloo."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torchft.processes import Group, Timing, ended, lighthouse
from eagle_eye.orchestrators.protocol import Exclusion, Restart
from eagle_eye.orchestrators.torchft.orchestrator import Lighthouse, TorchftJob, TorchftMemory, TorchftOrchestrator
from tests.loopback import free_port
from tests.orchestrators.contract import cause

TIMING = Timing(heartbeat_s=2.0)  # beside other tests a heartbeat may come late
HOW = "is not installed: python -m pip install --no-deps -r tests/full.lock (make test-full does it)"


def until(met: Callable[[], bool], within_s: float = 120.0) -> None:
    until_s = time.monotonic() + within_s
    while not met():
        assert time.monotonic() < until_s
        time.sleep(0.1)


@pytest.mark.slow
def test_a_replica_group_is_killed_the_other_trains_on_and_a_new_one_joins(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason=f"torchft {HOW}")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    groups = [Group(f"group_{number}", [f"127.0.1.{number + 1}", "127.0.1.9"], tmp_path, url) for number in range(2)]
    memory = TorchftMemory(tmp_path / "torchft.json", tmp_path / "excluded")
    orchestrator = TorchftOrchestrator(TorchftJob("llm", {}, on_within_s=30.0), Lighthouse(url), memory)
    beacon = lighthouse(port, tmp_path, TIMING)
    try:
        for group in groups:
            group.keep(set(), set())
        until(lambda: any(one.groups == 2 for one in groups[1].tries()))
        state = orchestrator.state("llm")
        assert state is not None
        assert (state.running, state.nodes) == (True, frozenset({"127.0.1.1", "127.0.1.2"}))

        said = orchestrator.exclude(Exclusion("llm", 0, ("127.0.1.2",), True, cause()))
        assert said.startswith("127.0.1.2 in the exclude file; killed group_1:")
        said = orchestrator.restart("llm", Restart(0, None, cause(), ("127.0.1.2",)))
        assert said.startswith("1 replica groups train on, step ")

        excluded = set((tmp_path / "excluded").read_text().split())
        until(lambda: groups[1].keep(excluded, set()), within_s=10.0)
        assert groups[1].host == "127.0.1.9"
        since_s = time.time()
        until(lambda: any(one.at_s > since_s and one.groups == 2 for one in groups[1].tries()))
        steps = [one.step for one in groups[0].tries() if one.committed]
        assert steps == sorted(set(steps))
    finally:
        for group in groups:
            group.end()
        ended(beacon)
        orchestrator.close()


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["torchft_alone", "eagle_eye"])
def test_a_short_storm_ends_groups_which_all_come_back(arm: str, tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason=f"torchft {HOW}")
    size = ("--groups", "2", "--calm", "3", "--seconds", "12", "--every", "3")
    found = measured(tmp_path / "storm.json", "--arms", arm, *size)["arms"][arm]
    assert found["failures"]["back"] == found["failures"]["count"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["slow", "nan", "corrupt"])
def test_a_sick_replica_is_named_by_what_hooks_tell_and_replaced(fault: str, tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason=f"torchft {HOW}")
    size = ("--part", "sick", "--faults", fault, "--arms", "eagle_eye", "--calm", "15", "--seconds", "1")
    found = measured(tmp_path / "sick.json", *size)["faults"][fault]["eagle_eye"]
    assert found["excluded"] == [found["host"]]
    assert found["replaced_after_s"] > found["named_after_s"]


def measured(out: Path, *words: str) -> dict[str, Any]:
    """Return what the benchmark found."""
    ports = (str(free_port()), str(free_port()))
    program = [sys.executable, "-m", "benchmarks.torchft", *words, "--heartbeat", str(TIMING.heartbeat_s)]
    program += ["--ports", *ports, "--out", str(out)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    found: dict[str, Any] = json.loads(out.read_text())
    return found
