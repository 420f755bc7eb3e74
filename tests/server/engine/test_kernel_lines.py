"""Lines of the kernel's log from the agent that reads them to what policy asks for, while the job ends or stands still.

What must name its node does, what must not never excludes one, and no line excludes anybody while the job goes on.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.collectors.kernel_log import KernelLogCollector, KernelLogHost
from eagle_eye.detectors.types import Blind, WindowEvent
from eagle_eye.schema.driver_facts import FACTS, judged
from eagle_eye.schema.events import Event
from eagle_eye.server.engine.detector_schedule import build_detectors
from eagle_eye.server.engine.incidents import fuse
from eagle_eye.server.engine.policy import Decision, decide
from eagle_eye.server.engine.settings import DetectionSettings
from tests.detectors.windows import NOW_S, Story
from tests.server.engine.situations import incident, situation

UP_S = 50_000.0
ACT_RATIO = 0.98
ECHO = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
DETECTORS = build_detectors(DetectionSettings(crash_settle_s=1, hang_floor_s=10))
Lines = tuple[str, ...]


def wordings(name: str) -> list[Lines]:
    """Return the wordings of a file of tests/data/kernel_lines, each as the lines that were logged together."""
    found: list[Lines] = []
    for line in (Path(__file__).parents[2] / f"data/kernel_lines/{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    + "):
            found[-1] = (*found[-1], line[6:])
        elif line and not line.startswith("# "):
            found.append((line,))
    return found


ACT, SPARE = wordings("act"), wordings("spare")


def named(lines: Lines) -> str:
    """Return the beginning of a wording, as a test's name."""
    return lines[0][:60]


def read(lines: Lines, tmp_path: Path) -> list[Event]:
    """Return the events that the agent makes of lines logged at one moment, in the order of their telling."""
    records = [f"4,{i},{int(UP_S * 1e6)},-;{line}\n".encode() for i, line in enumerate(lines)]
    up_s = UP_S

    def take(descriptor: int, most: int) -> bytes:
        if not records:
            raise BlockingIOError(errno.EAGAIN, "nothing")
        return records.pop(0)

    agent = KernelLogCollector(
        Drops(),
        places_s=0.0,
        host=KernelLogHost(
            proc=tmp_path,
            sys=tmp_path,
            panic_folders=(),
            monotonic_s=lambda: up_s,
            opener=lambda path: os.open("/dev/null", os.O_RDONLY),
            read=take,
        ),
    )
    events = agent.collect(NOW_S).events
    up_s += 5.0  # what comes in several lines is over
    events += agent.collect(NOW_S + 5.0).events
    agent.close()
    return events


def logged(events: list[Event], before_s: float, rows: int = 0) -> Story:
    story = Story(gpus=2).complete()
    if rows:
        story.standstill(rows).waiting(rows)
    for event in events:
        if event.kind == "link_down":
            carried(story, str(event.attributes["link"]), before_s)
        story.events.append(WindowEvent(NOW_S - before_s, "n1", event.device, event.kind, event.attributes))
    return story


def carried(story: Story, link: str, before_s: float) -> None:
    """The port of n1 that is called so has carried what the job sends until it went down."""
    port = next(at for at, known in enumerate(story.links) if known.node == "n1")
    story.links = (*story.links[:port], replace(story.links[port], link=link), *story.links[port + 1 :])
    story.link["link_up"][story.times_s > NOW_S - before_s, port] = 0.0


def crashed(events: list[Event], line_s: float = 6.0, died_s: float = 3.0) -> Story:
    """All ranks ended ``died_s`` ago, each of a lost peer; the lines were logged ``line_s`` ago."""
    story = logged(events, line_s)
    for series in story.series:
        story.happened("training_error", series.node, died_s, series.device, text=ECHO, rank=series.rank)
        story.happened("process_exit", series.node, died_s, series.device, exit_code=1, rank=series.rank)
    return story


def decided(story: Story) -> list[Decision]:
    window = story.window()
    verdicts = []
    for detector in DETECTORS:
        try:
            verdicts += detector.detect(window)
        except Blind:
            continue
    found: list[Decision] = []
    for family, finding in fuse(verdicts).findings.items():
        reported = finding.verdict
        fields: dict[str, Any] = {
            name: getattr(reported, name) for name in ("fault", "node", "device", "confidence", "fact")
        }
        fields |= {
            "nodes": list(reported.nodes),
            "kinds": sorted(reported.kinds),
            "asks": reported.asks or "",
            "family": family,
        }
        fields |= {"slowdown_ratio": reported.slowdown_ratio, "application": reported.application}
        found.append(decide(incident(**fields), situation()))
    return found


def excluded(story: Story) -> set[str]:
    return {node for one in decided(story) if one.kind == "exclude_node" for node in one.exclude}


def of_the_host(events: list[Event]) -> list[Event]:
    """Return what is said of the host and not of its GPUs."""
    hosts = {fact.name for fact in FACTS if fact.kind in ("part", "symptom")}
    return [event for event in events if event.attributes.get("what") in hosts]


def test_there_are_enough_wordings_and_each_is_there_once() -> None:
    assert len({*ACT, *SPARE}) == len(ACT) + len(SPARE) >= 240


def test_of_what_must_act_while_the_job_crashes_nearly_all_does(tmp_path: Path) -> None:
    missed = [lines for lines in ACT if excluded(crashed(read(lines, tmp_path))) != {"n1"}]
    print(f"must act: {len(ACT) - len(missed)} of {len(ACT)}")
    assert len(missed) <= (1 - ACT_RATIO) * len(ACT), missed


@pytest.mark.parametrize("lines", SPARE, ids=named)
def test_what_must_not_act_excludes_nobody(lines: Lines, tmp_path: Path) -> None:
    events = read(lines, tmp_path)
    assert excluded(crashed(events)) == set()
    assert excluded(logged(events, 30.0, rows=30)) <= excluded(logged([], 30.0, rows=30))


@pytest.mark.parametrize("lines", ACT, ids=named)
def test_what_the_host_says_after_the_ranks_have_ended_did_not_end_them(lines: Lines, tmp_path: Path) -> None:
    events = of_the_host(read(lines, tmp_path))
    assert excluded(crashed(events, line_s=6.0, died_s=40.0)) == set()


@pytest.mark.parametrize("lines", ACT, ids=named)
def test_while_the_job_goes_on_what_the_host_says_is_reported(lines: Lines, tmp_path: Path) -> None:
    events = of_the_host(read(lines, tmp_path))
    found = decided(logged(events, 30.0))
    repairs = any(told.repair != "none" for event in events if (told := judged(event.kind, event.attributes)))
    assert [one.kind for one in found] == ([] if not events else ["drain_node"] if repairs else ["notify"])
