"""What the launcher hears of steps in its nodes' memory: by whoever asks, and as an attempt's first step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import messages, runners
from eagle_eye.orchestrators.launch.coordinator import ProgressReporter
from eagle_eye.orchestrators.launch.runners import LaunchedJob, Runners
from eagle_eye.schema.checkpoint_files import MemoryStep

WITHIN_S = 10.0


def copy(rank: int, step: int, attempt: int = 1) -> MemoryStep:
    return MemoryStep("j", "2-plan", rank, step, 1_000.0, attempt)


class Node:
    """A node's runner that has a copy of rank 0 on n1, of rank 1 elsewhere; n1 answers from the second time on."""

    def __init__(self, node: str, *more: Any) -> None:
        self.node = node
        self.heard: Callable[[str, messages.FromRunner], None] = more[3]
        self.asked = threading.Semaphore(0)
        self.first = True

    def start(self, _: messages.Configure) -> None:
        pass

    def hold(self, _: str) -> None:
        self.asked.release()
        if self.node != "n1" or not self.first:
            self.heard(self.node, messages.Held([copy(0 if self.node == "n1" else 1, 40)]))
        self.first = False


def test_who_asks_while_another_waits_takes_no_answer_from_him(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: dict[str, Node] = {}
    monkeypatch.setattr(runners, "NodeRunner", lambda node, *more: nodes.setdefault(node, Node(node, *more)))
    job = LaunchedJob("j", ("n1", "n2"), 1, (), (), "python", {}, "", 0, None, tmp_path)
    asked = Runners(job, "", lambda _: None, lambda: True, frozenset)
    for node in job.nodes:
        asked.open(node)
    found: list[MemoryStep] = []
    first = threading.Thread(target=lambda: found.extend(asked.steps_in_memory(job.nodes, WITHIN_S)))
    first.start()
    nodes["n2"].asked.acquire(timeout=WITHIN_S)
    assert asked.steps_in_memory(["n1"], WITHIN_S) == [copy(0, 40)]
    first.join(WITHIN_S)
    assert sorted(one.rank for one in found) == [0, 1]


def test_a_step_that_the_attempt_has_captured_on_each_rank_is_its_first_one() -> None:
    reported: list[on.LaunchEvent] = []
    held = [copy(0, 40), copy(1, 40), copy(0, 41)]  # the rank that died had not captured step 41
    watcher = ProgressReporter(None, lambda: None, reported.append, in_memory=lambda: held)
    watcher.watch(2, 40, (), list(held))
    watcher.report_progress()
    held += [copy(1, 41, attempt=2)]
    watcher.report_progress()
    assert reported == []
    held += [copy(0, 41, attempt=2)]
    watcher.report_progress()
    watcher.report_progress()
    assert reported == [on.StepSeen(2, 41, 41)]
