"""Items of the plan, one after the other: harm, what follows, and the way back to a job that trains."""

from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import psutil

from benchmarks.recovery import harm as harming
from benchmarks.recovery.hand import Hand
from benchmarks.recovery.harm import ENDING, LASTING, Harm, harm
from benchmarks.recovery.outcome import OPEN_STATES, Outcome, Result, asked_of, scopes_of, steps_lost
from benchmarks.recovery.plan import Item
from benchmarks.recovery.site import MEMBERS, FireStack
from benchmarks.recovery.yard import Yard
from eagle_eye.demo.stack import StageFailed

STEPS_BEFORE = 5
TRAINS_WITHIN_S = 120.0
FULL_WITHIN_S = 5.0  # the job may also be harmed while it is short of a node
RECOVERED_WITHIN_S = 180.0
ASKED_WITHIN_S = 90.0
QUIET_S = 8.0  # so long nothing may follow an alarm that is void, or a node that came and went
LOOK_S = 0.1
NEWEST = 30  # records of the server's that one item can be about

# What an item may meet on its way; the run goes on with the next one.
TROUBLE = (StageFailed, httpx.HTTPError, OSError, subprocess.SubprocessError, psutil.Error)

ResultT = TypeVar("ResultT")


class Fire:
    """Plays items against a stack that runs. ``play`` never raises for what the job or Eagle Eye does."""

    def __init__(
        self, stack: FireStack, hand: Hand, yard: Yard, say: Callable[[str], None], every_s: float = 0.0
    ) -> None:
        """Items begin ``every_s`` apart, or as soon as the one before is through where that takes longer."""
        self._stack = stack
        self._hand = hand
        self._yard = yard
        self._say = say
        self._every_s = every_s
        self._next_s = time.monotonic()
        self._action_ids: set[str] = set()

    def play(self, item: Item) -> Outcome:
        """Return what became of the item; afterwards the job trains again, if need be because somebody helped."""
        began_s = time.time()
        try:
            outcome = self._play(item, began_s)
        except TROUBLE as error:
            outcome = self._outcome(item, [], "not_injected", began_s)
            outcome.note = f"{type(error).__name__}: {error}"[:300]
        if outcome.result in ("stuck", "job_ended"):
            self._help()
        with contextlib.suppress(*TROUBLE):
            for one in outcome.harms:
                self._mend_where_it_stayed(one.node)
        outcome.took_s = round(time.time() - began_s, 2)
        return outcome

    def until(self, look: Callable[[], ResultT | None], within_s: float) -> ResultT | None:
        """Return what ``look`` sees, None after ``within_s``; meanwhile repaired nodes come back."""
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s:
            self._yard.tick()
            with contextlib.suppress(httpx.HTTPError):
                seen = look()
                if seen is not None:
                    return seen
            if self._stack.ended("launcher") is not None:
                return None
            time.sleep(LOOK_S)
        return None

    def trains(self) -> bool:
        """Wait until the job's newest attempt has made some steps, at full strength if that comes soon."""
        if self.until(self._under_way, TRAINS_WITHIN_S) is None:
            return False
        self.until(lambda: len(self._members()) >= MEMBERS or None, FULL_WITHIN_S)
        return True

    def _play(self, item: Item, began_s: float) -> Outcome:
        if not self.trains():
            self._help()
            return self._outcome(item, [], "not_injected", began_s, "the job did not train")
        self.until(lambda: None, max(item.gap_s, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + self._every_s
        attempt, members = self._attempt(), self._members()
        first = members[int(item.picks[0] * len(members))]
        others = [node for node in members if node != first]
        second = others[int(item.picks[1] * len(others))]
        if item.shape == "flapping":
            return self._flapped(item, first, attempt, began_s)
        if "alarm" in item.shape:
            return self._alarmed(item, first, attempt, began_s)
        self._say(f"{item.shape}: {' and '.join(item.kinds)} on {first}")
        both = item.shape == "pair"
        harms = self._both(item, first, second) if both else [harm(self._stack, item.kinds[0], first)]
        if item.shape == "during_recovery":
            harms += self._again(item, attempt, first)
        elif item.shape in ("subscriber_killed", "server_killed"):
            self._killed(item, attempt)
        explained = len(harms) + (item.shape == "subscriber_killed")
        return self._followed(item, harms, attempt, explained, began_s)

    def _both(self, item: Item, first: str, second: str) -> list[Harm]:
        """Harm two nodes at once; what ends ranks comes last, for it ends the other node's too."""
        pairs = sorted(zip(item.kinds, (first, second), strict=True), key=lambda pair: pair[0] in ENDING)
        harms = [harm(self._stack, *pairs[0])]
        with contextlib.suppress(StageFailed):  # the first one has ended them already
            harms.append(harm(self._stack, *pairs[1]))
        return harms

    def _again(self, item: Item, attempt: int, first: str) -> list[Harm]:
        """Harm a node of the next attempt as soon as its ranks were spawned, before they have made a step."""

        def started() -> list[str] | None:
            lines = [
                line for line in self._stack.reported() if line["event"] == "running" and line["attempt"] > attempt
            ]
            return list(lines[-1]["nodes"]) if lines else None

        nodes = self.until(started, RECOVERED_WITHIN_S)
        if nodes is None:
            return []
        others = [node for node in nodes if node != first]
        victim = others[int(item.picks[1] * len(others))]
        self._say(f"during recovery: {item.kinds[1]} on {victim}")
        harming.spawned(self._stack, victim)
        return [harm(self._stack, item.kinds[1], victim)]

    def _killed(self, item: Item, attempt: int) -> None:
        """Launcher or server is killed once an action has been asked for, and comes back after a while."""
        asked = self.until(lambda: [a for a in self._actions() if a["attempt"] == attempt] or None, ASKED_WITHIN_S)
        who = "launcher" if item.shape == "subscriber_killed" else "server"
        self._say(f"{who} killed {'in the midst of it' if asked else 'though nothing was asked for'}")
        self._stack.kill(who, signal.SIGKILL)
        time.sleep(item.pause_s)
        (self._stack.start_launcher if who == "launcher" else self._stack.start_server)()

    def _followed(self, item: Item, harms: list[Harm], attempt: int, explained: int, began_s: float) -> Outcome:
        last_s = max(one.at_s for one in harms)
        lasting = [one for one in harms if one.kind in LASTING]

        def through() -> dict[str, Any] | None:
            newest = self._attempt()
            steps = [step for step in self._stack.steps() if step["attempt"] == newest and step["time_s"] > last_s]
            bad = {one.node for one in lasting if not self._yard.has_mended(one.node, one.at_s)}
            if newest == attempt or len(steps) < 2 or bad & set(self._members()):
                return None
            if any(not math.isfinite(step["loss"]) for step in steps) or self._in_flight():
                return None
            return steps[0]

        step = self.until(through, RECOVERED_WITHIN_S)
        ended = self._stack.ended("launcher") is not None
        result: Result = "recovered" if step is not None else "job_ended" if ended else "stuck"
        outcome = self._outcome(item, harms, result, began_s)
        if step is not None:
            outcome.first_step_s = round(step["time_s"] - harms[0].at_s, 3)
        outcome.restarts = self._attempt() - attempt
        outcome.scopes = scopes_of(self._stack.reported(), attempt, self._attempt())
        # Each incident explains one: a loss that is no number restarts, and its culprit is excluded once it is known.
        acted = {asked.incident for asked in outcome.asked if asked.restart and asked.state == "done"}
        outcome.restarts_explained = explained + max(0, len(acted) - len(harms))
        outcome.steps_lost = steps_lost(self._stack.steps(), attempt, self._attempt())
        return outcome

    def _flapped(self, item: Item, node: str, attempt: int, began_s: float) -> Outcome:
        self._say(f"flapping: {node} halts and goes on")
        harms = [harming.flap(self._stack, node)]
        self.until(lambda: None, QUIET_S)
        if self._attempt() == attempt:
            return self._outcome(item, harms, "undisturbed", began_s)
        return self._followed(item, harms, attempt, 1, began_s)  # its node is named, or the outcome says so

    def _alarmed(self, item: Item, node: str, attempt: int, began_s: float) -> Outcome:
        """Send void exclusions: no server has asked for them, and ``stale_alarm``'s would be void if one had."""
        action = f"hand-{item.number}-{attempt}"
        self._say(f"{item.shape}: an exclusion of {node} by hand")
        if item.shape == "stale_alarm":
            sent = [f"{action}-old", f"{action}-late"]
            self._hand.exclude(sent[0], node, attempt - 1)
            self._hand.exclude(sent[1], node, attempt, expired=True)
        else:
            sent = [action]
            self._hand.exclude(action, node, attempt)
        self.until(lambda: None, QUIET_S)
        made = {self._hand.outcome(one) for one in sent}
        outcome = self._outcome(item, [], "undisturbed" if self._attempt() == attempt else "disturbed", began_s)
        outcome.alarm = "carried_out" if "carried_out" in made else "/".join(sorted(made))
        return outcome

    def _outcome(self, item: Item, harms: list[Harm], result: Result, began_s: float, note: str = "") -> Outcome:
        asked = []
        with contextlib.suppress(httpx.HTTPError):
            actions = [action for action in self._actions() if action["id"] not in self._action_ids]
            incidents = {incident["id"]: incident for incident in self._stack.items("incidents", limit=NEWEST)}
            asked = [asked_of(action, incidents) for action in reversed(actions)]
            self._action_ids |= {one.id for one in asked}
        return Outcome(
            number=item.number, shape=item.shape, harms=harms, result=result, took_s=time.time() - began_s,
            asked=asked, note=note,
        )  # fmt: skip

    def _help(self) -> None:
        """Do what a person would; where that fails as well, the next item begins with it."""
        with contextlib.suppress(*TROUBLE):
            self._repair_all()

    def _repair_all(self) -> None:
        """Everything is repaired; where that is not enough, the job is started anew."""
        for node in self._stack.site.nodes:
            harming.repair(self._stack, node.name)
        for name in ("server", "launcher"):
            if self._stack.ended(name) is not None:
                (self._stack.start_server if name == "server" else self._stack.start_launcher)()
        at_s = time.time()
        if self.until(lambda: self._stepped_since(at_s), TRAINS_WITHIN_S) is None:
            if self._stack.ended("launcher") is None:
                self._stack.kill("launcher", signal.SIGTERM)
            self._stack.start_launcher()

    def _mend_where_it_stayed(self, node: str) -> None:
        """A node that was not taken out is well again, too; one that was is the yard's."""
        with contextlib.suppress(httpx.HTTPError):
            if node not in {one["node"] for one in self._stack.items("nodes", state="excluded")}:
                harming.repair(self._stack, node)

    def _under_way(self) -> bool | None:
        steps = self._stack.steps()
        newest = self._attempt()
        mine = [step for step in steps if step["attempt"] == newest]
        return (len(mine) >= STEPS_BEFORE and not self._in_flight()) or None

    def _stepped_since(self, at_s: float) -> bool | None:
        steps = self._stack.steps()
        return (bool(steps) and steps[-1]["time_s"] > at_s) or None

    def _attempt(self) -> int:
        """Return the newest attempt by the job's own launcher."""
        return max((line["attempt"] for line in self._stack.reported() if line["event"] == "running"), default=0)

    def _members(self) -> list[str]:
        """Return the nodes of the newest attempt."""
        lines = [line for line in self._stack.reported() if line["event"] == "running"]
        return sorted(lines[-1]["nodes"]) if lines else []

    def _actions(self) -> list[dict[str, Any]]:
        newest = self._stack.items("actions", limit=NEWEST)
        return [action for action in newest if action["job"] == self._stack.job]

    def _in_flight(self) -> bool:
        return any(action["state"] in OPEN_STATES for action in self._actions())
