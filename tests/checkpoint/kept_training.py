"""What the tests of training frameworks share: a node's memory, and a course of training that can be compared."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.stores import Node, until


class Killed(RuntimeError):
    """The training was ended in the middle of nowhere."""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node whose memory outlives the training."""
    memory = Path(tempfile.mkdtemp(prefix="eagle-eye-test-", dir="/dev/shm"))
    node = Node(memory / "a", "a").start()
    for name, value in environment_of(node).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("EAGLE_EYE_RESUME_FROM", raising=False)
    try:
        yield node
    finally:
        node.stop()
        shutil.rmtree(memory)


def environment_of(node: Node) -> Mapping[str, str]:
    return {"EAGLE_EYE_CHECKPOINT_STORE": str(node.folder), "EAGLE_EYE_NODE": node.name}


def until_whole(checkpointer: Any, step: int) -> None:
    """The step is whole: what is killed now goes on from it. And there is a slot for the next one."""
    until(
        lambda: (checkpointer.whole_step or 0) == step and checkpointer._granted is not None,
        f"step {step} is whole, of {checkpointer.counts}",
    )


def abandon(checkpointer: Any) -> None:
    """What a killed process does to its store, in a process that goes on."""
    checkpointer._client.close(ended=False)


class Course:
    """What training was like, step by step, on file at once: by rank, and by attempt."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, **what: Any) -> None:
        os.write(self._handle, json.dumps(what).encode() + b"\n")


def course(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
