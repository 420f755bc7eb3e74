"""The failure storm of torchft's authors, with Eagle Eye and with torchft alone: what is committed all the same."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.torchft.figures import costs, first_step_s, ratio, span, spread
from benchmarks.torchft.processes import (
    Group,
    Reports,
    Starts,
    Timing,
    await_answer,
    cold,
    ended,
    running_lighthouse,
    standby,
    subscriber,
)
from benchmarks.torchft.storm import SECRET, ByAction, ByLighthouse, Storm

LAST_WORD_S = 180.0  # for groups to come back, and for reports


@dataclass(frozen=True)
class Plan:
    """So many groups train undisturbed for ``calm_s``, then for ``seconds`` with a failure every ``every_s`` or so."""

    groups: int
    calm_s: float
    seconds: float
    every_s: float
    seed: int
    timing: Timing
    lighthouse_port: int
    subscriber_port: int


def measured(arm: str, plan: Plan) -> dict[str, Any]:
    """Return what the storm left of the training in an arm: "torchft_alone" or "eagle_eye"."""
    with tempfile.TemporaryDirectory(prefix="torchft-") as name, ExitStack() as cleanup:
        folder = Path(name)
        url = cleanup.enter_context(running_lighthouse(plan.lighthouse_port, folder, plan.timing))
        actions = None
        if arm == "eagle_eye":
            actions = cleanup.enter_context(_subscriber(plan.subscriber_port, folder, url))
            storm = Storm(_groups(plan, folder, url, standby()), actions.end_group, actions.excluded, actions.readmit)
        else:
            killer = ByLighthouse(url)
            cleanup.callback(killer.close)
            storm = Storm(_groups(plan, folder, url, cold()), killer.end_group)
        for group in storm.groups:
            cleanup.callback(group.end)
        storm.start()
        calm_s = time.time()
        storm.run(calm_s + plan.calm_s)
        storm_s = time.time()
        storm.run(storm_s + plan.seconds, random.Random(plan.seed), plan.every_s)
        end_s = time.time()
        storm.run_until(lambda: _is_settled(storm, actions), LAST_WORD_S)
        figures = _figures(storm, (calm_s, storm_s, end_s))
        if actions is not None:
            outcome = actions.outcome()
            figures["actions"] = {**outcome, "seconds_until_done": spread(outcome["seconds_until_done"])}
    return figures


def is_right(arm: dict[str, Any]) -> bool:
    """Whether each action was carried out, and nothing was killed beyond the failures."""
    actions = arm.get("actions", {"asked": 0, "done": 0})
    return bool(actions["done"] == actions["asked"] and arm["killed_beyond_the_failures"] == 0)


def _figures(storm: Storm, times: Sequence[float]) -> dict[str, Any]:
    calm_s, storm_s, end_s = times
    tries = {group.name: group.tries() for group in storm.groups}
    everybody = [one for some in tries.values() for one in some]
    calm, wild = span(everybody, calm_s, storm_s), span(everybody, storm_s, end_s)
    kills = sum(group.kills() for group in storm.groups)
    return {
        "calm": calm,
        "storm": wild,
        "steps_of_calm_ratio": ratio(wild, calm, "steps"),
        "samples_of_calm_ratio": ratio(wild, calm, "samples"),
        "failures": costs(storm.failures, tries, storm.groups, time.time()),
        "killed_beyond_the_failures": kills - len(storm.failures),
        "ended_by_themselves": storm.starts - len(storm.groups) - kills,
    }


def _is_settled(storm: Storm, actions: ByAction | None) -> bool:
    """Whether the groups that were ended are back, and actions over."""
    groups = {group.name: group for group in storm.groups}
    back = all(
        first_step_s(failure.at_s, groups[failure.group].tries(), groups[failure.group].started_s) is not None
        for failure in storm.failures
    )
    return back and (actions is None or len(actions.outcome()["seconds_until_done"]) == len(actions.asked))


def _groups(plan: Plan, folder: Path, url: str, starts: Starts) -> list[Group]:
    hosts = [f"127.0.1.{number}" for number in range(1, plan.groups * 4)]
    return [Group(f"group_{number}", hosts, folder, url, starts) for number in range(plan.groups)]


@contextmanager
def _subscriber(port: int, folder: Path, lighthouse: str) -> Iterator[ByAction]:
    """The real subscriber runs, with a secret of ours; yields how groups are ended by it."""
    (folder / "secret").write_text(SECRET)
    target = f"http://127.0.0.1:{port}/"
    reports = Reports()
    process = subscriber(port, reports.url, lighthouse, folder)
    try:
        await_answer(f"{target}healthz")
        yield ByAction(target, reports, folder / "state" / "excluded")
    finally:
        ended(process)
        reports.close()
