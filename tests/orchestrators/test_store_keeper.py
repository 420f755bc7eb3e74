"""The store that a runner keeps on its node, for a job that keeps checkpoints in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from eagle_eye.checkpoint.store_client import end_store
from eagle_eye.orchestrators.launch import runner
from eagle_eye.orchestrators.launch.runner import LOOK_EVERY_S, StoreKeeper, serves
from eagle_eye.schema.checkpoint_files import STEPS_FILE, STORE_IDLE_S, MemoryStep
from tests.orchestrators.test_launch import launched

WITHIN_S = 60.0


def eventually(what: Callable[[], object]) -> None:
    until_s = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "n1"
    end_store(tmp_path / "n1")
    end_store(tmp_path / "n2")


def test_a_store_is_started_where_none_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StoreKeeper().keep(folder, "n1")
    eventually(lambda: serves(folder))
    monkeypatch.setattr(runner, "spawn_store", lambda *_: pytest.fail("another one is started"))
    StoreKeeper().keep(folder, "n1")


def test_it_is_looked_for_before_it_would_end_and_no_more_often_than_need_be(tmp_path: Path) -> None:
    now_s = 1000.0
    keeper = StoreKeeper(lambda: now_s)
    (tmp_path / "file").write_text("in the way")
    looked = []
    for _ in range(int(STORE_IDLE_S)):
        due_s, now_s = keeper._due_s, now_s + 1.0
        keeper.keep(tmp_path / "file" / "n1", "n1")
        looked.append(keeper._due_s != due_s)
    assert sum(looked) == STORE_IDLE_S / LOOK_EVERY_S == 3


def test_a_folder_that_cannot_be_made_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    StoreKeeper().keep(tmp_path / "file" / "n1", "n1")
    assert "no store for checkpoints in memory is started" in capfd.readouterr().err


@pytest.mark.slow
def test_a_spare_has_one_as_soon_as_the_job_is_seen_to_keep_steps_in_memory(folder: Path) -> None:
    words = ("--nnodes", "1", "--without-server", "--env", f"EAGLE_EYE_CHECKPOINT_STORE={folder.parent}/{{node}}")
    with launched(folder.parent, "n1,n2", *words, steps=10_000) as launcher:
        launcher.reaches(1, 2)
        assert not (folder.parent / "n2").exists()
        folder.mkdir()
        (folder / STEPS_FILE).write_bytes(msgspec.json.encode([MemoryStep("j", "1-plan", 0, 1, 1.0)]))
        eventually(lambda: serves(folder.parent / "n2"))
        launcher.process.kill()
        launcher.ends()
    assert serves(folder.parent / "n2")
