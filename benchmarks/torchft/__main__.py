"""The failure storm of torchft's authors, each failure an action of Eagle Eye's: steps committed all the same.

    python -m benchmarks.torchft --seconds 300 --calm 60 --out benchmarks/results/torchft.json

Needs torchft (tests/full.lock). A real lighthouse, replica groups on gloo, the real subscriber; on average every
``--every`` seconds (evenly from 0 to twice that, by ``--seed``) a signed action excludes the node of a group drawn by
chance. Whoever ends is started again on a node that is not excluded; nodes are readmitted after a while. Before the
storm the same groups train undisturbed. Exit code 1: an action was not carried out, or more was killed than asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
from standardwebhooks import Webhook

from benchmarks.torchft.processes import Group, Reports, ended, lighthouse, subscriber
from eagle_eye.schema.action import ACTION_REQUESTED, NODE_READMITTED, ActionRequest

SECRET = "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0"
READMIT_AFTER_S = 40.0
LAST_WORD_S = 90.0
TICK_S = 0.1


@dataclass
class Storm:
    """What is asked for, and when; ``clock`` is the wall's, since logs and reports are by it."""

    groups: list[Group]
    folder: Path
    target: str
    reports: Reports
    started: int = 0
    asked: dict[str, tuple[float, str]] = field(default_factory=dict)  # by action: when, which group
    banned: list[tuple[float, str]] = field(default_factory=list)

    def run(self, until_s: float, source: random.Random | None, every_s: float) -> None:
        """Keep the groups running until then, with failures where ``source`` is given."""
        due_s = time.time() + source.uniform(0, 2 * every_s) if source else float("inf")
        while (now_s := time.time()) < until_s:
            self._keep()
            if source and now_s >= due_s:
                self._strike(source)
                due_s = now_s + source.uniform(0, 2 * every_s)
            for at_s, host in [one for one in self.banned if now_s - one[0] > READMIT_AFTER_S]:
                self.banned.remove((at_s, host))
                self._send(NODE_READMITTED, {"node": host}, f"back-{at_s}")
            time.sleep(TICK_S)

    def _keep(self) -> None:
        file = self.folder / "state" / "excluded"
        excluded = set(file.read_text().split()) if file.exists() else set()
        for group in self.groups:
            taken = {other.host for other in self.groups if other is not group}
            self.started += group.keep(excluded, taken)

    def _strike(self, source: random.Random) -> None:
        """One action; none where the group drawn does not take part: there is nothing to be found about it."""
        group = source.choice(self.groups)
        steps = group.steps()
        if not steps or steps[-1][0] < max(group.started_s, time.time() - 2.0):
            return
        now_s = time.time()
        action_id = f"act-{len(self.asked) + 1}"
        action = ActionRequest(
            action_id=action_id, kind="exclude_node", job="storm", attempt=0, exclude=[group.host], restart=True,
            fault="gpu_lost", confidence=1.0, onset=_rfc3339(now_s), detected=_rfc3339(now_s),
            expires=_rfc3339(now_s + 60), incident_id=f"inc-{action_id}", repair="replace", summary="a storm",
            evidence=[], ranks=[], report_to=f"{self.reports.url}/api/v1/actions/{action_id}/reports",
        )  # fmt: skip
        self.asked[action_id] = (now_s, group.name)
        self.banned.append((now_s, group.host))
        self._send(ACTION_REQUESTED, msgspec.to_builtins(action), action_id)

    def _send(self, kind: str, data: Any, event_id: str) -> None:
        now = datetime.now(timezone.utc)
        event = {"specversion": "1.0", "id": event_id, "type": kind, "source": "/storm", "time": now.isoformat()}
        body = json.dumps({**event, "data": data})
        headers = {
            "content-type": "application/cloudevents+json",
            "webhook-id": event_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": Webhook(SECRET).sign(event_id, now, body),
        }
        httpx.post(self.target, content=body, headers=headers, timeout=30.0, trust_env=False).raise_for_status()


def main() -> int:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torchft", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between failures on average (15)")
    parser.add_argument("--seconds", type=float, default=300.0, help="of storm (300)")
    parser.add_argument("--calm", type=float, default=60.0, help="seconds before it (60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ports", type=int, default=21400, help="the first of two (21400)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torchft-") as folder:
        found = measure(Path(folder), args)
    text = msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
    if args.out:
        args.out.write_bytes(text)
    sys.stdout.buffer.write(text)
    return 0 if found["actions"]["done"] == found["actions"]["asked"] and not found["killed_beyond_the_actions"] else 1


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the storm left of the training."""
    (folder / "secret").write_text(SECRET)
    url = f"http://127.0.0.1:{args.ports}"
    target = f"http://127.0.0.1:{args.ports + 1}/"
    hosts = [f"127.0.1.{number}" for number in range(1, args.groups * 4)]
    reports = Reports()
    groups = [Group(f"group_{number}", hosts, folder, url) for number in range(args.groups)]
    storm = Storm(groups, folder, target, reports)
    beacon = lighthouse(args.ports, folder)
    hands = None
    try:
        _await(lambda: _answers(f"{url}/status"), 60.0, "the lighthouse")
        hands = subscriber(args.ports + 1, reports.url, url, folder)
        _await(lambda: _answers(f"{target}healthz"), 60.0, "the subscriber")
        storm.run(time.time() + 1.0, None, 0.0)
        _await(lambda: all(len(group.steps()) > 10 for group in groups), 180.0, "all groups' first steps")
        calm_s = time.time()
        storm.run(calm_s + args.calm, None, 0.0)
        storm_s = time.time()
        storm.run(storm_s + args.seconds, random.Random(args.seed), args.every)
        end_s = time.time()
        last_s = time.time() + LAST_WORD_S
        while time.time() < last_s and len(_ends(reports)) < len(storm.asked):
            storm.run(time.time() + 1.0, None, 0.0)
    finally:
        for group in groups:
            group.end()
        for process in (hands, beacon):
            if process is not None:
                ended(process)
        reports.close()
    return _figures(storm, args, (calm_s, storm_s, end_s))


def _figures(storm: Storm, args: argparse.Namespace, times: tuple[float, float, float]) -> dict[str, Any]:
    calm_s, storm_s, end_s = times
    tries = [one for group in storm.groups for one in group.steps()]
    ends = _ends(storm.reports)
    waits = sorted(ends[action][0] - at_s for action, (at_s, _) in storm.asked.items() if action in ends)
    calm, wild = _arm(tries, calm_s, storm_s), _arm(tries, storm_s, end_s)
    failed = {action: list(ends.get(action, ("", "no report", ""))[1:]) for action in storm.asked}
    return {
        "groups": args.groups,
        "every_s": args.every,
        "seed": args.seed,
        "calm": calm,
        "storm": wild,
        "steps_per_second_of_calm_ratio": round(wild["steps_per_second"] / calm["steps_per_second"], 3),
        "work_of_calm_ratio": round(wild["group_steps_per_second"] / calm["group_steps_per_second"], 3),
        "actions": {
            "asked": len(storm.asked),
            "done": sum(state == "done" for _, state, _ in ends.values()),
            "not_done": {action: said for action, said in failed.items() if said[0] != "done"},
            "seconds_until_done": {
                "p50": round(statistics.median(waits), 2) if waits else None,
                "max": round(waits[-1], 2) if waits else None,
            },
        },
        "killed_beyond_the_actions": storm.started - args.groups - len(storm.asked),
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "load_average": os.getloadavg()},
    }


def _arm(tries: list[tuple[float, int, int, bool]], from_s: float, until_s: float) -> dict[str, Any]:
    """Return what was committed in a span: steps of the job, and steps times the groups that took part."""
    committed = sorted((at, step) for at, step, _, done in tries if done and from_s <= at < until_s)
    first_at: dict[int, float] = {}
    for at, step in committed:
        first_at.setdefault(step, at)
    moments = [from_s, *sorted(first_at.values()), until_s]
    seconds = until_s - from_s
    return {
        "seconds": round(seconds, 1),
        "steps_committed": len(first_at),
        "steps_per_second": round(len(first_at) / seconds, 3),
        "group_steps_per_second": round(len(committed) / seconds, 3),
        "longest_without_a_step_s": round(max(later - earlier for earlier, later in pairwise(moments)), 2),
        "tries_not_committed": sum(not done for at, _, _, done in tries if from_s <= at < until_s),
    }


def _ends(reports: Reports) -> dict[str, tuple[float, str, str]]:
    return {
        action: (at, state, detail)
        for at, action, state, detail in list(reports.heard)
        if state in ("done", "failed", "refused")
    }


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _await(met: Any, within_s: float, what: str) -> None:
    until_s = time.monotonic() + within_s
    while not met():
        if time.monotonic() > until_s:
            raise SystemExit(f"{what} did not come within {within_s:g} s")
        time.sleep(0.2)


def _rfc3339(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, tz=timezone.utc).isoformat()


if __name__ == "__main__":
    sys.exit(main())
