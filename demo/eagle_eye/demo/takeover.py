"""The story of a server that is killed while a node hangs: the other one leads, and the loop still closes."""

from __future__ import annotations

import time
from typing import Any

from eagle_eye.demo.faults import inject
from eagle_eye.demo.stack import StageFailed
from eagle_eye.demo.story import CULPRIT, EXPECTED, follow, training
from eagle_eye.demo.timeline import DemoTimeline
from eagle_eye.demo.two_servers import TwoServers

FAULT = "hang"
LEADS_WITHIN_S = 30.0
(_EXPECTED,) = EXPECTED[FAULT]


def play_takeover(stack: TwoServers, timeline: DemoTimeline) -> str:
    """Play the story to its end and return its moral. Raises StageFailed naming the stage that failed."""
    first = stack.leader
    timeline.tell("leads", f"{first}, with epoch {stack.leadership(first)['epoch']}; the other server stands by")
    before = training(stack, timeline, 0)
    began_s, how = inject(FAULT, stack, CULPRIT)
    timeline.fault_s = began_s
    timeline.tell("fault", how, began_s, "yellow")
    second = stack.kill_leader()
    killed_s = time.time()
    timeline.tell("killed", f"{first}, which leads, is killed (SIGKILL) before it can judge", killed_s, "yellow")

    def leads() -> dict[str, Any] | None:
        said = stack.leadership(second)
        return said if said["leads"] else None

    said = stack.wait("the other server leads", leads, LEADS_WITHIN_S)
    led_s = time.time()
    timeline.measure("injection to the other server leads", led_s)
    text = f"{second} leads, {led_s - killed_s:.1f} s after {first} was killed, with epoch {said['epoch']}"
    timeline.tell("leads", text, led_s, "green")
    follow(stack, timeline, before["attempt"], _EXPECTED, before)
    _once(stack)
    stack.start_one(first)
    again = stack.leadership(first)
    if again["leads"] or again["epoch"] != said["epoch"]:
        raise StageFailed(f"the server that was killed stands by once it is started again: it says {again}")
    timeline.tell("standby", f"{first} is started again and stands by")
    return f"{first} was killed while {CULPRIT} hung; {second} named it, and the job goes on without it"


def _once(stack: TwoServers) -> None:
    """Raise StageFailed unless one action alone was asked for; agents see other jobs of this machine, too."""
    actions = stack.items("actions", job=stack.job)
    asked = [f"{action['kind']} in attempt {action['attempt']}" for action in actions]
    if len(asked) != 1:
        raise StageFailed(f"one action is asked for: there are {len(asked)}: {', '.join(asked)}")
