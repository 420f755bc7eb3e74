"""What is known of steps in memory from the files of stores."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from eagle_eye.schema.checkpoint_files import STEPS_FILE, MemoryStep, read_steps, store_folder, whole_in_memory


def copy(step: int, rank: int, plan: str = "2-a", captured_s: float = 0.0) -> MemoryStep:
    return MemoryStep("j", plan, rank, step, captured_s)


def test_a_step_is_whole_once_there_is_a_copy_of_each_rank_of_one_plan() -> None:
    copies = [copy(3, 0, captured_s=10.0), copy(3, 1, captured_s=12.0), copy(4, 0), copy(4, 1, "2-b"), copy(5, 1)]
    assert whole_in_memory(copies) == {3: 12.0}


def test_copies_that_two_attempts_captured_make_no_step() -> None:
    assert whole_in_memory([copy(3, 0), MemoryStep("j", "2-a", 1, 3, 0.0, attempt=2)]) == {}


def test_copies_on_several_nodes_count_once() -> None:
    assert whole_in_memory([copy(3, 0), copy(3, 0)]) == {}


def test_a_plan_that_says_no_number_of_ranks_is_never_whole() -> None:
    assert whole_in_memory([copy(3, 0, "x"), copy(3, 0, "-a")]) == {}


def test_only_the_jobs_own_copies_are_read(tmp_path: Path) -> None:
    mine, other = copy(3, 0), MemoryStep("k", "2-a", 0, 3, 0.0)
    (tmp_path / STEPS_FILE).write_bytes(msgspec.json.encode([mine, other]))
    assert read_steps(tmp_path, "j") == [mine]


@pytest.mark.parametrize("content", [None, b"", b"[{]", b'[{"job": 1}]'])
def test_a_file_that_is_absent_or_damaged_holds_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / STEPS_FILE).write_bytes(content)
    assert read_steps(tmp_path, "j") == []


def test_the_environment_says_where_a_store_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_EYE_CHECKPOINT_STORE", "/somewhere")
    assert store_folder("n1") == Path("/somewhere")
    monkeypatch.delenv("EAGLE_EYE_CHECKPOINT_STORE")
    assert store_folder("n1").name == "n1"
