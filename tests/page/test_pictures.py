"""The documents' pictures of the page are taken by a command, and are those that the documents show."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.page import pictures

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_the_pictures_are_taken(tmp_path: Path) -> None:
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium: apt-get install chromium")
    taken = pictures.take(tmp_path)
    assert [file.name for file in taken] == ["page-fleet.png", "page-incident.png"]
    assert all(file.read_bytes().startswith(PNG) for file in taken)
    assert {file.name for file in taken} <= {file.name for file in pictures.ASSETS.iterdir()}
