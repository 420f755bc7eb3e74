"""Every page is in the site's navigation, and every link of a page leads somewhere: on GitHub, and in the site."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.pages import ROOT

PAGES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
NOTEBOOKS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.ipynb"))
PROJECT = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md"]
LISTED = {page for page in PAGES if re.match(r"docs/decisions/\d", page)}  # by docs/decisions/index.md
# By make docs: of the app's own schema, and of a notebook.
GENERATED = {"reference/api-reference.md", *(path[5:].replace(".ipynb", ".md") for path in NOTEBOOKS)}


@cache
def tokens(page: str) -> tuple[Token, ...]:
    text = (ROOT / page).read_text(encoding="utf-8")
    if page in NOTEBOOKS:
        written = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(lines) for lines in written)
    return tuple(MarkdownIt("commonmark").enable("table").parse(text))


def links(page: str) -> Iterator[str]:
    """Yield what a page links to, and the pictures that it shows."""
    for token in tokens(page):
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                yield str(child.attrs["href" if child.type == "link_open" else "src"])


@cache
def anchors(page: str) -> frozenset[str]:
    """Return the anchors that GitHub and the site make of a page's headings."""
    found = set()
    for heading, inline in zip(tokens(page), tokens(page)[1:], strict=False):
        if heading.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            found.add(re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-"))
    return frozenset(found)


def navigated(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from navigated(inner)


def test_the_navigation_has_every_page_once_and_no_other() -> None:
    named = list(navigated(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert len(named) == len(set(named))
    own = {f"docs/{path}" for path in named if not path.startswith("project/") and path not in GENERATED}
    assert own == set(PAGES) - LISTED
    brought = {path.removeprefix("project/") for path in named if path.startswith("project/")}
    folders = {path for path in brought if not (ROOT / path).is_file()}  # a folder's README is called as the folder
    assert {path for path in folders if not (ROOT / path.removesuffix(".md") / "README.md").is_file()} == set()


@pytest.mark.parametrize("page", PAGES + PROJECT + NOTEBOOKS)
def test_links_lead_to_files_and_headings_that_exist(page: str) -> None:
    wrong = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        there = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        if not (ROOT / there).exists() or there.startswith(".."):
            wrong.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(there):
            wrong.append(f"{link}: no such heading in {there}")
    assert not wrong


@pytest.mark.parametrize("page", sorted({*PAGES, *NOTEBOOKS} - LISTED))
def test_a_page_begins_with_its_title_and_says_what_it_is_for(page: str) -> None:
    first = [token for token in tokens(page) if token.level == 0][:3]
    assert (first[0].type, first[0].tag) == ("heading_open", "h1")
    assert [token.tag for token in tokens(page) if token.type == "heading_open"].count("h1") == 1
    assert first[2].type == "paragraph_open", f"{page} says in no sentence below its title what it is for"
