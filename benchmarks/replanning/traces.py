"""Failures of nodes by chance, and what a simulated system makes of them. Pure.

The failure traces of Oobleck's paper (SOSP 2023, figure 9) take a node away every 6 h, 1 h or 10 min until half of them
are left, and bring none back. Here the gaps are drawn (exponential, with that mean), nodes come back after a repair,
and no node fails while only half of them are left.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Event(NamedTuple):
    """A node fails, or is back."""

    at_s: float
    node: int
    back: bool


class Pause(NamedTuple):
    """What follows an event for the training.

    The step under way is thrown away (``loses_step``), or ends after ``slower`` times what is left of it. Then nobody
    trains for ``pause_s``, and ``again_s`` go into steps that had been made before.
    """

    pause_s: float
    loses_step: bool = False
    slower: float = 1.0
    again_s: float = 0.0


class System(Protocol):
    """A simulated system: its nodes, and what it does when they change."""

    @property
    def step_s(self) -> float:
        """What a step takes with the nodes that are left; infinite where they cannot train."""
        ...

    def lose(self, node: int) -> Pause | None:
        """The node fails; None: training does not notice."""
        ...

    def gain(self, node: int) -> Pause | None:
        """The node is back; None: training does not notice."""
        ...


def draw(nodes: int, every_s: float, repair_s: float, until_s: float, chance: random.Random) -> list[Event]:
    """Return what happens to so many nodes until then, in order."""
    up, returns, found, now_s = set(range(nodes)), list[tuple[float, int]](), list[Event](), 0.0
    while (now_s := now_s + chance.expovariate(1 / every_s)) < until_s:
        while returns and returns[0][0] <= now_s:
            at_s, node = heapq.heappop(returns)
            up.add(node)
            found.append(Event(at_s, node, back=True))
        if len(up) <= (nodes + 1) // 2:
            continue
        node = chance.choice(sorted(up))
        up.remove(node)
        found.append(Event(now_s, node, back=False))
        heapq.heappush(returns, (now_s + repair_s, node))
    found += [Event(at_s, node, back=True) for at_s, node in sorted(returns) if at_s < until_s]
    return found


def nodes_up(nodes: int, events: Iterable[Event], until_s: float) -> float:
    """Return how many of the nodes were there on average."""
    up, since_s, total_s = nodes, 0.0, 0.0
    for event in events:
        total_s += up * (event.at_s - since_s)
        up, since_s = up + (1 if event.back else -1), event.at_s
    return (total_s + up * (until_s - since_s)) / until_s


def steps(system: System, events: Iterable[Event], until_s: float) -> int:
    """Return how many whole steps the system makes until then.

    An event during a pause begins the pause anew if it is a failure, and costs nothing more if a node is back.
    """
    made, goes_on_s = 0, 0.0
    for event in events:
        step_s, paused = system.step_s, event.at_s < goes_on_s
        pause = system.gain(event.node) if event.back else system.lose(event.node)
        if pause is None or (paused and event.back):
            continue
        end_s = event.at_s
        if not paused and math.isfinite(step_s):
            whole, under_way_s = divmod(event.at_s - goes_on_s, step_s)
            made += int(whole)
            if not pause.loses_step and under_way_s:
                made += 1
                end_s += pause.slower * (step_s - under_way_s)
        goes_on_s = end_s + pause.pause_s + pause.again_s
    step_s = system.step_s
    return made + (int((until_s - goes_on_s) / step_s) if math.isfinite(step_s) and until_s > goes_on_s else 0)
