"""Which folders on storage are taken for checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.schema.checkpoint_files import METADATA, StepFolder, step_folders, step_of


@pytest.mark.parametrize(("name", "step"), [("step_0", 0), ("step_500", 500), ("step_" + "9" * 18, 10**18 - 1)])
def test_a_folder_named_by_a_step_is_of_that_step(name: str, step: int) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize(
    "name",
    [
        "step_",
        "step_5.attempt_1.partial",
        "step_5.set_aside_2",
        "step_-1",
        "step_5\n",
        "my_step_5",
        "step_" + "9" * 19,
        "step_\N{ARABIC-INDIC DIGIT FIVE}",
    ],
)
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert step_of(name) is None


def test_a_folder_without_its_metadata_is_not_complete(tmp_path: Path) -> None:
    (tmp_path / "step_1").mkdir()
    (tmp_path / "step_2").write_text("a file")
    assert {one.step: one.completed_s for one in step_folders(tmp_path)} == {1: None, 2: None}
    (tmp_path / "step_1" / METADATA).touch()
    at_s = (tmp_path / "step_1" / METADATA).stat().st_mtime
    assert StepFolder(1, tmp_path / "step_1", at_s) in step_folders(tmp_path)


def test_a_directory_that_cannot_be_read_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert step_folders(tmp_path / "nowhere") == []
    with pytest.raises(NotADirectoryError):
        step_folders(tmp_path / "file")
