"""The situations that are about processes, with the demo's: a real job, agents, server and launcher.

The demo's floors of detection are a few seconds, so that a minute is long here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.innocence.examine import Examined
from eagle_eye.demo.stack import NODES, Stack, StageFailed, open_site

JOB = {"batch": "16"}
TRAINS_WITHIN_S = 120.0
CALM_S = 15.0
BETWEEN_S = 3.0


def rolling_restart(stack: Stack) -> None:
    """All agents are restarted one after the other, by SIGTERM and SIGKILL in turn."""
    for number, node in enumerate(NODES):
        stack.kill(f"agent-{node}", signal.SIGTERM if number % 2 == 0 else signal.SIGKILL)
        time.sleep(BETWEEN_S)
        stack.start_agent(node)
        time.sleep(BETWEEN_S)


def server_killed(stack: Stack) -> None:
    """The server is killed and started again after twenty seconds."""
    stack.kill("server", signal.SIGKILL)
    time.sleep(20.0)
    stack.start_server()


def server_halted(stack: Stack) -> None:
    """For a minute no agent gets an answer, as without a management network: the server is halted."""
    os.kill(stack.pid("server"), signal.SIGSTOP)
    try:
        time.sleep(60.0)
    finally:
        os.kill(stack.pid("server"), signal.SIGCONT)


def tokens_expired(stack: Stack) -> None:
    """The tokens of all agents are revoked; half a minute later they have new ones."""
    data = ("--data", str(stack.folder / "server"))
    for token in json.loads(_eagle_eye("tokens", "list", *data, "--json")):
        if token["scope"] == "agent":
            _eagle_eye("tokens", "revoke", token["id"], *data)
    time.sleep(30.0)
    for node in NODES:
        made = json.loads(_eagle_eye("tokens", "create", "--scope", "agent", "--node", node, *data, "--json"))
        stack.token_file(node).write_text(made["token"], encoding="utf-8")


LIVE = (rolling_restart, server_killed, server_halted, tokens_expired)


def examine(play: Callable[[Stack], None]) -> Examined:
    """Return what came of the situation."""
    began_s = time.monotonic()
    about = (play.__doc__ or "").strip().partition("\n")[0]
    folder = Path(tempfile.mkdtemp(prefix="innocence-"))
    seen = _Seen()
    try:
        with contextlib.closing(open_site()) as site, contextlib.closing(Stack(site, folder, JOB)) as stack:
            seen = _examined(stack, play)
    except (StageFailed, httpx.HTTPError, subprocess.CalledProcessError) as failure:
        seen.problem = f"{failure}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Examined(
        name=play.__name__, about=about, where="real processes", problem=seen.problem, told=seen.told,
        actions=seen.actions, skipped="" if seen.problem else seen.doubt, took_s=round(time.monotonic() - began_s, 1),
    )  # fmt: skip


@dataclass
class _Seen:
    """What the server says afterwards; ``doubt`` is why that says nothing of the situation."""

    told: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    problem: str = ""
    doubt: str = ""


def _examined(stack: Stack, play: Callable[[Stack], None]) -> _Seen:
    stack.start()
    stack.wait("the job trains", lambda: len(stack.steps()) > 12 or None, TRAINS_WITHIN_S)
    play(stack)
    began_s = time.time()
    stack.wait(
        "the job goes on",
        lambda: (stack.steps()[-1]["time_s"] > began_s and time.time() > began_s + CALM_S) or None,
        TRAINS_WITHIN_S,
    )
    incidents, actions = stack.items("incidents"), stack.items("actions")
    # Agents tell nodes of one machine apart by name: another stack's ranks are on theirs as well, and are killed there.
    others = sorted({one["job"] for one in stack.items("jobs")} - {stack.job})
    asked = [
        f"{one['kind']} {','.join(one['exclude'])}: {one['summary']}" for one in actions if one["job"] == stack.job
    ]
    out = [one["node"] for one in stack.items("nodes") if one["state"] != "in_service"]
    attempts = {step["attempt"] for step in stack.steps()}
    problems = [
        *asked,
        *(f"{node} is out of service" for node in out if not others),
        *([f"the job was restarted: attempts {sorted(attempts)}"] if len(attempts) > 1 else []),
    ]
    return _Seen(
        told=sorted({f"{one['fault']} {one['node'] or ''}".strip() for one in incidents if one["job"] == stack.job}),
        actions=asked,
        problem="; ".join(problems),
        doubt=f"cannot tell: {', '.join(others)} ran on this machine as well; nothing else may" if others else "",
    )


def _eagle_eye(*words: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("EAGLE_EYE_")}
    done = subprocess.run(
        [sys.executable, "-m", "eagle_eye.cli.main", *words], check=True, capture_output=True, text=True, env=clean
    )
    return done.stdout
