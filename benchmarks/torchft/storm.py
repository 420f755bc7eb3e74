"""A storm: groups are kept running, and now and then one is drawn by chance and ended."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.recovery.hand import send
from benchmarks.torchft.processes import Group, Reports
from eagle_eye.orchestrators.protocol import CannotCarryOutError
from eagle_eye.orchestrators.torchft.orchestrator import Lighthouse
from eagle_eye.schema.action import ACTION_REQUESTED, NODE_READMITTED, ActionRequest

SENT_WITHIN_S = 30.0
SECRET = "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0"
READMIT_AFTER_S = 40.0
TICK_S = 0.05
LOOK_S = 0.5
STARTED_WITHIN_S = 180.0
TRIES_BEFORE = 10  # of each group, until all are warm


@dataclass(frozen=True)
class Failure:
    """A group that was ended, and when (Unix time)."""

    at_s: float
    group: str


@dataclass
class Storm:
    """The groups, and how one of them is ended: ``end_group`` returns whether it was told to end.

    ``excluded``: the hosts that no group may be started on. ``tick`` is called again and again while groups run.
    """

    groups: list[Group]
    end_group: Callable[[Group], bool] = lambda _: False
    excluded: Callable[[], set[str]] = set
    tick: Callable[[], None] = lambda: None
    failures: list[Failure] = field(default_factory=list)
    starts: int = 0

    def start(self) -> None:
        """All groups train. Raises SystemExit where they do not in time."""

        def all_train() -> bool:
            return all(len(group.tries()) > TRIES_BEFORE and group.takes_part() for group in self.groups)

        if not self.run_until(all_train, STARTED_WITHIN_S):
            raise SystemExit(f"the groups did not all train within {STARTED_WITHIN_S:g} s")

    def run(self, until_s: float, source: random.Random | None = None, every_s: float = 0.0) -> None:
        """Keep the groups running until then (Unix time), with failures where ``source`` is given."""
        due_s = time.time() + source.uniform(0, 2 * every_s) if source else float("inf")
        while (now_s := time.time()) < until_s:
            self._keep()
            if source and now_s >= due_s:
                self._strike(source.choice(self.groups))
                due_s = now_s + source.uniform(0, 2 * every_s)
            self.tick()
            time.sleep(TICK_S)

    def run_until(self, met: Callable[[], bool], within_s: float) -> bool:
        """Keep the groups running until ``met`` says so; returns whether it did in time."""
        until_s = time.time() + within_s
        while not met():
            if time.time() > until_s:
                return False
            self.run(time.time() + LOOK_S)
        return True

    def _keep(self) -> None:
        excluded = self.excluded()
        for group in self.groups:
            taken = {other.host for other in self.groups if other is not group}
            self.starts += group.keep(excluded, taken)

    def _strike(self, group: Group) -> None:
        """Nothing where the group does not take part: it is down already, or was told to end and has not yet."""
        struck = any(one.group == group.name and one.at_s > group.started_s[-1] for one in self.failures)
        at_s = time.time()
        if not struck and group.takes_part() and self.end_group(group):
            self.failures.append(Failure(at_s, group.name))


class ByLighthouse:
    """torchft alone: the group is killed by its lighthouse, as its authors' storm does it, and nothing is excluded."""

    def __init__(self, url: str) -> None:
        self._lighthouse = Lighthouse(url)

    def end_group(self, group: Group) -> bool:
        """The group's replica was told to end; False where it is in no quorum."""
        with contextlib.suppress(CannotCarryOutError):
            for replica in self._lighthouse.status().replicas:
                if replica.group == group.name:
                    self._lighthouse.kill(replica.id)
                    return True
        return False

    def close(self) -> None:
        """Connections are closed."""
        self._lighthouse.close()


class ByAction:
    """Eagle Eye: a signed action excludes the group's host, which is readmitted after a while."""

    def __init__(self, target: str, reports: Reports, excluded: Path) -> None:
        """``target``: the subscriber's URL; ``excluded``: the file in which it keeps who is out."""
        self._target, self._reports, self._excluded = target, reports, excluded
        self.asked: dict[str, float] = {}  # by action: Unix time
        self._banned: list[tuple[float, str]] = []

    def excluded(self) -> set[str]:
        """Return the hosts that no group may be started on."""
        return read_excluded(self._excluded)

    def end_group(self, group: Group) -> bool:
        """It was asked for."""
        now_s = time.time()
        action_id = f"act-{len(self.asked) + 1}"
        action = ActionRequest(
            action_id=action_id, kind="exclude_node", job="storm", attempt=0, exclude=[group.host], restart=True,
            fault="gpu_lost", confidence=1.0, onset=_rfc3339(now_s), detected=_rfc3339(now_s),
            expires=_rfc3339(now_s + 60), incident_id=f"inc-{action_id}", repair="replace", summary="a storm",
            evidence=[], ranks=[], report_to=f"{self._reports.url}/api/v1/actions/{action_id}/reports",
        )  # fmt: skip
        self.asked[action_id] = now_s
        self._banned.append((now_s, group.host))
        send(self._target, SECRET, ACTION_REQUESTED, msgspec.to_builtins(action), action_id, SENT_WITHIN_S)
        return True

    def readmit(self) -> None:
        """Hosts that have been out for long enough are told to be in again."""
        for at_s, host in [one for one in self._banned if time.time() - one[0] > READMIT_AFTER_S]:
            self._banned.remove((at_s, host))
            send(self._target, SECRET, NODE_READMITTED, {"node": host}, f"back-{at_s}", SENT_WITHIN_S)

    def outcome(self) -> dict[str, Any]:
        """Return what became of the actions."""
        ends = self._reports.ends()
        said = {action: list(ends.get(action, (0.0, "no report", ""))[1:]) for action in self.asked}
        waits = sorted(ends[action][0] - at_s for action, at_s in self.asked.items() if action in ends)
        return {
            "asked": len(self.asked),
            "done": sum(state == "done" for state, _ in said.values()),
            "not_done": {action: words for action, words in said.items() if words[0] != "done"},
            "seconds_until_done": waits,
        }


def read_excluded(file: Path) -> set[str]:
    """Return the hosts in the subscriber's file."""
    return set(file.read_text(encoding="utf-8").split()) if file.exists() else set()


def _rfc3339(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, tz=timezone.utc).isoformat()
