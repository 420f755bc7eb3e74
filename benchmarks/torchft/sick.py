"""Replicas that are sick and go on, which torchft cannot see: slow, or wrong in their gradients."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.torchft.figures import first_step_s, level, loss_back_s, ratio
from benchmarks.torchft.processes import Group, Timing, running_lighthouse, standby
from benchmarks.torchft.storm import LOOK_S, Storm, read_excluded
from eagle_eye.demo.stack import STARTED_WITHIN_S, LoopbackSite, Stack

FAULTS = ("slow", "nan", "corrupt")
GROUPS_MIN = 4  # with fewer nobody can tell which one is off
SICK = 1  # the number of the group whose host gets sick
SPARES = 2  # hosts
TAIL_S = 10.0  # before the fault and at the end, by which a run is judged
OVER_WITHIN_S = 180.0
# The orchestrator's words where torchft has nothing to heal from.
FROM_CHECKPOINT = "restart the job from the last good one"
ENDS = frozenset({"done", "failed", "refused", "rejected", "expired", "withdrawn"})


@dataclass(frozen=True)
class Plan:
    """So many groups train for ``calm_s``, then for ``seconds`` since a host got sick, or until it is dealt with."""

    groups: int
    calm_s: float
    seconds: float
    timing: Timing
    lighthouse_port: int
    subscriber_port: int


class EagleEye(Stack):
    """The demo's server, and an agent for each host; the job is torchft's, and the real subscriber acts on it."""

    def run(self, lighthouse: str, port: int, more: Sequence[str] = ()) -> None:
        """Server, agents and subscriber run, and the server delivers to the subscriber. ``more``: its other words."""
        self.start_server()
        for node in self.site.nodes:
            self.start_agent(node.name)
        words = (
            *("orchestrate", "torchft", "--job", self.job, "--lighthouse", lighthouse, "--server", self.url),
            *("--token-file", str(self.token_file("launcher")), "--listen", f"127.0.0.1:{port}"),
            *("--state-dir", str(self.folder / "state"), "--poll", "1", "--report-state"),
            *more,
        )
        self._start("subscriber", (), words, {})
        self.wait("the subscriber subscribes", lambda: self.items("subscriptions") or None, STARTED_WITHIN_S)

    def excluded(self) -> set[str]:
        """Return the hosts that no group may be started on."""
        return read_excluded(self.exclude_file)

    @property
    def exclude_file(self) -> Path:
        """Return the subscriber's file of these."""
        return self.folder / "state" / "excluded"

    def hook(self, rank: int, ranks: int) -> Callable[[str], Mapping[str, str]]:
        """Return what the hook of a group's rank reads from its environment, by host."""
        fixed = {"EAGLE_EYE_JOB": self.job, "EAGLE_EYE_ATTEMPT": "0", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
        return lambda host: {
            **fixed,
            "EAGLE_EYE_NODE": host,
            "EAGLE_EYE_HOOK_SOCKET": self._socket("{node}", host),
        }


class Operator:
    """Follows Eagle Eye's actions, and restarts the job from a checkpoint where a report asks for that."""

    def __init__(self, newest: Callable[[], list[dict[str, Any]]], groups: Sequence[Group], checkpoints: Path) -> None:
        """``newest`` returns the actions, the newest first; may raise httpx.TransportError."""
        self._newest, self._groups, self._checkpoints = newest, groups, checkpoints
        self._look_s = 0.0  # monotonic, of the next look
        self.actions: list[dict[str, Any]] = []  # oldest first
        self.restarted_s: float | None = None  # Unix time

    def look(self) -> None:
        """What is asked for is known, and done where it is an operator's part."""
        if time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + LOOK_S
        with contextlib.suppress(httpx.TransportError):  # the next look may succeed
            self.actions = self._newest()[::-1]
        for action in self.actions:
            onset_s = _unix_s(action["onset"])
            asked = action["state"] == "failed" and FROM_CHECKPOINT in action["reports"][-1]["detail"]
            if asked and (self.restarted_s is None or onset_s > self.restarted_s):
                self._restart(onset_s)

    def is_over(self) -> bool:
        """Whether something was asked for, all of it has ended, and all groups train."""
        ended = bool(self.actions) and all(action["state"] in ENDS for action in self.actions)
        return ended and all(group.takes_part() for group in self._groups)

    def _restart(self, onset_s: float) -> None:
        """All groups are gone, and start from the newest checkpoint that is older than the fault."""
        written_s = {file: file.stat().st_mtime for file in self._checkpoints.glob("*.pt")}
        good = [file for file in written_s if written_s[file] < onset_s]
        if not good:
            raise SystemExit(f"none of {len(written_s)} checkpoints is older than the fault")
        for group in self._groups:
            group.end()
        for group in self._groups:
            group.resume_from = max(good, key=written_s.__getitem__)
        self.restarted_s = time.time()


def measured(fault: str, arm: str, plan: Plan) -> dict[str, Any]:
    """Return what the fault left of the training in an arm, "torchft_alone" or "eagle_eye", and what was said of it."""
    hosts = [f"127.0.1.{number}" for number in range(1, plan.groups + SPARES + 1)]
    with tempfile.TemporaryDirectory(prefix="torchft-") as name, ExitStack() as cleanup:
        folder = Path(name)
        (folder / "checkpoints").mkdir()
        url = cleanup.enter_context(running_lighthouse(plan.lighthouse_port, folder, plan.timing))
        eye = EagleEye(LoopbackSite(hosts), folder / "eagle-eye") if arm == "eagle_eye" else None
        if eye is not None:
            cleanup.callback(eye.close)
            eye.run(url, plan.subscriber_port)
        hook = _no_hook if eye is None else eye.hook
        groups = [
            Group(f"group_{rank}", hosts, folder, url, standby(), hook(rank, plan.groups))
            for rank in range(plan.groups)
        ]
        for group in groups:
            cleanup.callback(group.end)
        storm, operator = Storm(groups), None
        if eye is not None:
            operator = Operator(partial(eye.items, "actions"), groups, folder / "checkpoints")
            storm = Storm(groups, excluded=eye.excluded, tick=operator.look)
        storm.start()
        calm_s = time.time()
        storm.run(calm_s + plan.calm_s)
        host, sick_s = groups[SICK].host, time.time()
        (folder / f"{host}.fault").write_text(fault, encoding="ascii")
        if operator is not None:
            storm.run_until(operator.is_over, OVER_WITHIN_S)
        storm.run(max(sick_s + plan.seconds, time.time() + TAIL_S))
        found = {"host": host, **_course(groups, (calm_s, sick_s, time.time()))}
        if eye is None or operator is None:
            return found
        return {**found, "excluded": sorted(eye.excluded()), **_said(operator, host, sick_s)}


def is_right(arm: str, found: Mapping[str, Any]) -> bool:
    """Whether Eagle Eye, where it is there, had the sick host replaced and no other, and the loss is as it was."""
    if arm != "eagle_eye":
        return True
    times = (found["named_after_s"], found["replaced_after_s"], found["loss_back_after_s"])
    return found["excluded"] == [found["host"]] and None not in times


def _course(groups: Sequence[Group], times: tuple[float, float, float]) -> dict[str, Any]:
    """Return how the training went on, by the groups' logs."""
    calm_s, sick_s, end_s = times
    sick = groups[SICK]
    tries = [one for group in groups for one in group.tries()]
    before = level(tries, max(sick_s - TAIL_S, calm_s), sick_s)
    after = level(tries, end_s - TAIL_S, end_s)
    left_s = next((at_s for at_s in sick.started_s if at_s > sick_s), end_s)  # later processes are on other hosts
    usual = before["loss"]
    return {
        "before": before,
        "at_the_end": after,
        "samples_of_before_ratio": ratio(after, before, "samples"),
        "steps_with_the_sick_host": sum(one.committed and sick_s <= one.at_s < left_s for one in sick.tries()),
        "replaced_after_s": _since(sick_s, first_step_s(sick_s, sick.tries(), sick.started_s)),
        "loss_back_after_s": _since(sick_s, loss_back_s(tries, sick_s, usual) if isinstance(usual, float) else None),
    }


def _said(operator: Operator, host: str, sick_s: float) -> dict[str, Any]:
    """Return what Eagle Eye asked for because of the fault, and what was reported last."""
    named = next((action for action in operator.actions if action["exclude"] == [host]), None)
    return {
        "named_after_s": _since(sick_s, _unix_s(named["detected"]) if named else None),
        "asked_after_s": _since(sick_s, _unix_s(named["created"]) if named else None),
        "restarted_from_a_checkpoint_after_s": _since(sick_s, operator.restarted_s),
        "actions": [
            {
                "fault": action["fault"],
                "asked": action["kind"],
                "nodes": action["exclude"],
                "summary": action["summary"],
                "state": action["state"],
                "said": action["reports"][-1]["detail"] if action["reports"] else "",
            }
            for action in operator.actions
        ],
    }


def _no_hook(_rank: int, _ranks: int) -> Callable[[str], Mapping[str, str]]:
    return lambda _: {}


def _since(from_s: float, at_s: float | None) -> float | None:
    return None if at_s is None else round(at_s - from_s, 1)


def _unix_s(rfc3339: str) -> float:
    return datetime.fromisoformat(rfc3339).timestamp()
