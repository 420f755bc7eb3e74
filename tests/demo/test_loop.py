"""The whole loop on a real training job: real server, agents, launcher, ranks; a fault from outside."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[ml]")

from eagle_eye.demo.faults import inject
from eagle_eye.demo.site import LoopbackSite, Site
from eagle_eye.demo.stack import AGENT_INTERVAL_S, Stack
from eagle_eye.demo.story import CULPRIT, STARTED_WITHIN_S, VERDICT_WITHIN_S, play
from eagle_eye.demo.timeline import Timeline

pytestmark = pytest.mark.slow
DEMO_WITHIN_S = 300
CHEAP = {"batch": "16"}  # steps that leave the machine to others; a culprit that is not slow is found in them as well
SERVER_AWAY_S = 4.0  # much longer than any gap that a busy machine alone makes in an agent's rows


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[Callable[[Site], Stack]]:
    with contextlib.ExitStack() as cleanup:

        def make(site: Site) -> Stack:
            cleanup.enter_context(contextlib.closing(site))
            return cleanup.enter_context(contextlib.closing(Stack(site, tmp_path, CHEAP)))

        yield make


def test_the_demo_shows_a_hang_and_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle_eye.cli.main", "demo", "--fault", "hang", "--json"],
        capture_output=True,
        text=True,
        timeout=DEMO_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    stages = [line["stage"] for line in told if "stage" in line]
    wanted = ["start", "training", "fault", "verdict", "webhook", "excluded", "restarted", "training"]
    assert [stage for stage in stages if stage != "evidence"][: len(wanted)] == wanted
    assert told[-1]["success"]


def test_without_root_a_node_whose_processes_all_die_is_excluded(make_stack: Callable[[Site], Stack]) -> None:
    stack = make_stack(LoopbackSite())
    stack.start()
    play("unreachable", stack, Timeline(as_json=True), healthy_s=0.0)


def test_a_server_killed_in_the_middle_loses_nothing_and_repeats_nothing(make_stack: Callable[[Site], Stack]) -> None:
    stack = make_stack(LoopbackSite())
    stack.start()
    stack.wait("the job trains", lambda: len(stack.steps()) > 12 or None, STARTED_WITHIN_S)
    began_s, _ = inject("hang", stack, CULPRIT)
    stack.wait("an action is asked for", lambda: stack.items("actions") or None, VERDICT_WITHIN_S)
    stack.kill("server")
    time.sleep(SERVER_AWAY_S)  # time in which agents have only their spools
    stack.start_server()
    first_attempt = stack.steps()[0]["attempt"]
    stack.wait(
        "the job goes on",
        lambda: sum(s["attempt"] > first_attempt for s in stack.steps()) > 10 or None,
        STARTED_WITHIN_S,
    )
    (action,) = stack.wait(
        "the action was reported",
        lambda: [a for a in stack.items("actions") if a["state"] == "done"] or None,
        VERDICT_WITHIN_S,
    )
    assert action["exclude"] == [CULPRIT]
    assert {step["attempt"] for step in stack.steps()} == {first_attempt, first_attempt + 1}
    for node in stack.site.nodes:
        assert longest_gap_s(stack, node.name, began_s) < SERVER_AWAY_S - AGENT_INTERVAL_S


def longest_gap_s(stack: Stack, node: str, since_s: float) -> float:
    """Return the longest time in the server's history without a row of the node's own."""
    query: dict[str, str | float] = {
        "metric": "node_cpu_utilization_ratio",
        "node": node,
        "start": since_s,
        "end": time.time(),
        "step": AGENT_INTERVAL_S / 5,
    }
    response = stack.api.get("/query_range", params=query)
    response.raise_for_status()
    (series,) = response.json()["series"]
    times_s = [datetime.fromisoformat(point[0]).timestamp() for point in series["points"]]
    return max(later - earlier for earlier, later in itertools.pairwise(times_s))
