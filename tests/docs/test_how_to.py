"""Each how-to page begins with what its reader has, and ends with how its reader sees that it worked."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from markdown_it.token import Token

from tests.docs.pages import PAGES, tokens

LAST = "How you see that it worked"
# Pages of the folder that are looked up instead of followed, each with the reason.
LOOKED_UP = {"docs/how-to/runbooks.md": "an entry for each alert, which ends once its cause is gone"}
FOLLOWED = [page for page in PAGES if page.startswith("docs/how-to/") and page not in LOOKED_UP]


def sections(page: str) -> list[tuple[str, list[Token]]]:
    """Return (heading, what stands below it) of a page's parts; the first is what stands before all headings."""
    found: list[tuple[str, list[Token]]] = [("", [])]
    for token, following in pairwise([*tokens(page), Token("end", "", 0)]):
        if token.type == "heading_open" and token.tag == "h2":
            found.append((following.content, []))
        found[-1][1].append(token)
    return found


@pytest.mark.parametrize("page", FOLLOWED)
def test_a_page_begins_with_what_its_reader_has(page: str) -> None:
    (_, opening), *_ = sections(page)
    paragraphs = [following.content for token, following in pairwise(opening) if token.type == "paragraph_open"]
    assert any(re.search(r"\b[Yy]ou (have|need)\b", text) for text in paragraphs), "say what must be there to follow it"


@pytest.mark.parametrize("page", FOLLOWED)
def test_a_page_ends_with_how_its_reader_sees_that_it_worked(page: str) -> None:
    heading, below = sections(page)[-1]
    assert heading == LAST
    shown = [token for token in below if token.type == "fence"]
    shown += [child for token in below for child in token.children or () if child.type == "code_inline"]
    assert shown, "name a command, or a place on the page, and what it shows"


@pytest.mark.parametrize("page", LOOKED_UP)
def test_only_pages_that_end_otherwise_are_left_out(page: str) -> None:
    assert page in PAGES
    assert sections(page)[-1][0] != LAST
