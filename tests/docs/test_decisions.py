"""Each decision is a page with a number, a title, its context, what was decided and what follows; the list has all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

FOLDER = ROOT / "docs" / "decisions"
INDEX = FOLDER / "index.md"
DECISIONS = sorted(path for path in FOLDER.glob("*.md") if path != INDEX)
SECTIONS = ["Context", "Decision", "Consequences"]


def title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_its_context_decision_and_consequences(page: Path) -> None:
    parts = re.split(r"^## (.*)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert parts[1::2] == SECTIONS
    assert [name for name, text in zip(SECTIONS, parts[2::2], strict=True) if not text.strip()] == []


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_is_called_by_its_number_and_title(page: Path) -> None:
    words = re.sub(r"[-/_]", " ", title(page).lower())
    slug = "-".join(re.sub(r"[^a-z0-9 ]", "", words).split())
    assert re.fullmatch(rf"\d{{4}}-{slug}", page.stem)


def test_no_two_decisions_have_one_number() -> None:
    numbers = [page.name[:4] for page in DECISIONS]
    assert len(numbers) > 100
    assert len(numbers) == len(set(numbers))


def test_the_list_has_each_decision_in_its_order() -> None:
    listed = re.findall(r"^- (\d{4}) \[(.*)\]\((.*)\)$", INDEX.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert listed == [(page.name[:4], title(page), page.name) for page in DECISIONS]
