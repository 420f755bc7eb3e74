"""Files of secrets: who else can read them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.schema.configuration import open_to_others


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize(("mode", "said"), [(0o644, True), (0o604, True), (0o640, False), (0o600, False)])
def test_a_file_that_every_user_can_read_is_named_with_its_remedy(folder: Path, mode: int, said: bool) -> None:
    file = folder / "token"
    file.write_text("secret")
    file.chmod(mode)
    line = open_to_others("token_file", file)
    assert (line.startswith("token_file: "), f"chmod o-r {file.resolve()}" in line) == (said, said)
    assert "secret" not in line


def test_a_link_is_judged_by_what_it_leads_to(folder: Path) -> None:
    file, link = folder / "token", folder / "link"
    file.write_text("secret")
    file.chmod(0o600)
    link.symlink_to(file)
    assert open_to_others("token_file", link) == ""


def test_a_folder_that_others_may_not_enter_protects_the_file(folder: Path) -> None:
    file = folder / "token"
    file.write_text("secret")
    file.chmod(0o644)
    folder.chmod(0o700)
    assert open_to_others("token_file", file) == ""


def test_of_what_cannot_be_looked_at_nothing_is_said(folder: Path) -> None:
    assert open_to_others("token_file", folder / "missing") == ""
