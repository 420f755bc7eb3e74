"""Checks the node's clock offset, using the agent's own collector."""

from __future__ import annotations

import time

from eagle_eye.agent.collectors.clock_offset import ClockOffsetCollector
from eagle_eye.agent.loop.collector import CollectFailed, Unsupported
from eagle_eye.checks import devices
from eagle_eye.checks.check import Check, CheckOptions, Result, could_not_check, passed, sick

NAME = "offset_seconds"


def run(asked: CheckOptions) -> Result:
    """Return whether the clock is right; an undisciplined clock cannot be judged."""
    return judge(ClockOffsetCollector(), asked)


def judge(collector: ClockOffsetCollector, asked: CheckOptions) -> Result:
    """Judge the collector's answer."""
    try:
        offset_s = collector.collect(time.time()).node["node_clock_offset_seconds"]
    except (CollectFailed, Unsupported) as error:
        return could_not_check(str(error))
    reason, figure = devices.measured(NAME, abs(offset_s), "", asked.site.thresholds[f"clock.{NAME}"])
    if reason:
        return sick(f"the clock is {offset_s:+.3f} s off: {reason}", figure)
    return passed(f"the clock is {offset_s:+.6f} s off", figure)


CHECK = Check(
    name="clock",
    needs="a program that keeps the clock (chrony, ntpd, systemd-timesyncd)",
    measures="the clock's offset from true time",
    limit_s=3.0,
    quick_limit_s=3.0,
    absent=lambda _asked: "",
    run=run,
)
