"""The job of pipelines trains alike in every layout: real ranks on gloo, four nodes with a store each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[ml]")

from eagle_eye.checkpoint import MemoryCheckpointer  # noqa: E402
from eagle_eye.demo import pipeline_train  # noqa: E402
from eagle_eye.demo.pipeline_train import LAYERS, WrongLayout, read_layout  # noqa: E402
from tests.agent import two_ranks  # noqa: E402
from tests.checkpoint.kept_training import until_whole  # noqa: E402
from tests.checkpoint.stores import running  # noqa: E402

NODES = ("a", "b", "c", "d")
SURVIVORS = ("a", "c", "d")
CHANGED_AFTER, STEPS_AFTER = 10, 50
GLOBAL_BATCH = 8
LAST = LAYERS - 1


def layout(*pipelines: tuple[int, Sequence[int]]) -> str:
    """Return a layout of pipelines, each with its micro-batches and the first layers of its stages, a rank each."""
    rank, reported = 0, []
    for micro_batches, firsts in pipelines:
        lasts = [first - 1 for first in firsts[1:]] + [LAST]
        stages = [
            {"first": first, "last": last, "ranks": [rank + number]}
            for number, (first, last) in enumerate(zip(firsts, lasts, strict=True))
        ]
        reported.append({"micro_batches": micro_batches, "stages": stages})
        rank += len(stages)
    return json.dumps(
        {"format": "eagle-eye-layout/1", "layers": LAYERS, "ranks": rank, "global_batch": GLOBAL_BATCH,
         "micro_batch": 2, "pipelines": reported}
    )  # fmt: skip


FOUR_NODES = layout((2, (0, 4)), (2, (0, 4)))
THREE_NODES = layout((1, (0,)), (3, (0, 3)))  # other stages, cut differently, and one with fewer micro-batches


class KilledAfter(MemoryCheckpointer):
    """Ends the rank for good once a step is whole."""

    step = 0

    def capture(self, step: int) -> None:
        super().capture(step)
        until_whole(self, step)  # so that the next one finds a slot, however busy the machine is
        if step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def rank_of(said: str, nodes: Sequence[str], folder: Path, name: str, killed_after: int) -> None:
    """Train as one rank of an attempt."""
    node = nodes[int(os.environ["RANK"])]
    os.environ.update(
        EAGLE_EYE_NODE=node, EAGLE_EYE_CHECKPOINT_STORE=str(folder / "memory" / node), EAGLE_EYE_JOB=name,
        EAGLE_EYE_LAYOUT=said, EAGLE_EYE_HOOK_SOCKET=str(folder / "nobody.sock"),
    )  # fmt: skip
    KilledAfter.step = killed_after
    sys.argv = [
        *("pipeline_train", "--steps", str(CHANGED_AFTER + STEPS_AFTER), "--step-seconds-min", "0"),
        *("--step-log", str(folder / f"{name}.jsonl"), "--checkpoint-dir", str(folder / name)),
        *("--checkpoint-every", "0", "--collective-seconds-max", "60"),
    ]
    with mock.patch.object(pipeline_train, "MemoryCheckpointer", KilledAfter):
        pipeline_train.main()


def attempt(said: str, nodes: Sequence[str], folder: str, name: str, killed_after: int = 0) -> None:
    """The attempt has ended as it should."""
    from tests.checkpoint.attempts import attempt as run

    code = -signal.SIGKILL if killed_after else 0
    ended = run(partial(rank_of, said, nodes, Path(folder), name, killed_after), len(nodes))
    assert ended == [code] * len(nodes), ended


def start(folder: Path, *words: object) -> None:
    """The same in a process of its own, which has no threads when it forks its ranks."""
    arguments = ", ".join(map(repr, words))
    done = two_ranks.job(f"from tests.demo.test_pipeline_train import attempt; attempt({arguments})")
    assert done.returncode == 0, done.stderr[-5000:]


class Courses(NamedTuple):
    """The step logs of both jobs."""

    undisturbed: list[dict[str, Any]]
    changed: list[dict[str, Any]]


@pytest.fixture(scope="module")
def courses(tmp_path_factory: pytest.TempPathFactory) -> Courses:
    """A job in one layout, and one that loses a node after some steps and goes on in another."""
    folder = tmp_path_factory.mktemp("courses")
    memory = Path(tempfile.mkdtemp(prefix="eagle-eye-test-", dir="/dev/shm"))
    (folder / "memory").symlink_to(memory)
    try:
        with running([memory / node for node in NODES]) as stores:
            start(folder, FOUR_NODES, NODES, str(folder), "undisturbed")
            start(folder, FOUR_NODES, NODES, str(folder), "changed", CHANGED_AFTER)
            stores[NODES.index("b")].stop()
            shutil.rmtree(memory / "b")
            start(folder, THREE_NODES, SURVIVORS, str(folder), "changed")
    finally:
        shutil.rmtree(memory)
    logs = [(folder / f"{name}.jsonl").read_text().splitlines() for name in Courses._fields]
    return Courses(*([json.loads(line) for line in lines] for lines in logs))


@pytest.mark.slow
def test_the_losses_after_a_change_of_layout_are_the_undisturbed_jobs(courses: Courses) -> None:
    after = [step["loss"] for step in courses.changed if step["ranks"] == len(SURVIVORS)]
    undisturbed = [step["loss"] for step in courses.undisturbed[CHANGED_AFTER:]]
    assert len(after) == STEPS_AFTER
    assert after == pytest.approx(undisturbed, rel=1e-3)
    assert undisturbed[-1] < 0.9 * courses.undisturbed[0]["loss"]  # there is something to compare
    print("largest difference:", max(abs(a / b - 1) for a, b in zip(after, undisturbed, strict=True)))


@pytest.mark.slow
def test_every_step_has_the_same_samples_in_every_layout(courses: Courses) -> None:
    def seen(steps: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
        return [(step["step"], step["samples"], step["tokens"]) for step in steps]

    assert seen(courses.changed) == seen(courses.undisturbed)
    assert {step["samples"] for step in courses.changed} == {GLOBAL_BATCH}


@pytest.mark.slow
def test_the_state_comes_from_the_memory_of_the_nodes_that_are_left(courses: Courses) -> None:
    first = courses.changed[CHANGED_AFTER]
    assert (first["step"], first["resumed_from"]) == (CHANGED_AFTER + 1, CHANGED_AFTER)
    assert first["source"]["where"] == "memory"
    assert set(first["source"]["nodes"]) <= {*SURVIVORS}


@pytest.mark.parametrize(
    ("said", "ranks", "reason"),
    [
        ("", 4, "is not set: start this job with eagle-eye launch --layouts"),
        (FOUR_NODES, 3, "is for 4 ranks; there are 3"),
        (FOUR_NODES.replace(f'"layers": {LAYERS}', '"layers": 24'), 4, f"a job of 24 layers; this one has {LAYERS}"),
        (FOUR_NODES.replace('"ranks": [3]', '"ranks": [3, 4]'), 4, "several ranks in a stage"),
    ],
    ids=["none", "other ranks", "another job", "tensor parallel"],
)
def test_a_layout_that_is_not_for_this_job_is_refused_in_a_line(said: str, ranks: int, reason: str) -> None:
    with pytest.raises(WrongLayout, match=reason):
        read_layout(said, ranks)
