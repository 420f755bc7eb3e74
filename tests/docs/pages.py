"""The documents as their reader sees them: fenced blocks and inline code, with page and line.

CommonMark's own rules find both (markdown-it-py): a fence in a list, a fence within a fence, code over two lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = tuple(
    sorted(
        str(path.relative_to(ROOT))
        for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/**/*.md", "packaging/**/*.md")
        for path in ROOT.glob(pattern)
        if "node_modules" not in path.parts
    )
)


class Block(NamedTuple):
    """A fenced block: ``line`` is that of its first line of text, ``mark`` the HTML comment right above it.

    ``heading`` is what it stands under, ``before`` the paragraph that leads to it, "" where none does.
    """

    page: str
    line: int
    language: str
    mark: str
    text: str
    heading: str = ""
    before: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


class Span(NamedTuple):
    """Code within a sentence; ``line`` is that of its paragraph."""

    page: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def tokens(page: str) -> tuple[Token, ...]:
    """Return the page as CommonMark reads it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return tuple(MarkdownIt("commonmark").enable("table").parse(text))


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """Return a page's fenced blocks in their order."""
    found: list[Block] = []
    mark = heading = before = ""
    opened = ""
    for token in tokens(page):
        if token.type == "inline":
            heading, before = (token.content, "") if opened == "heading_open" else (heading, token.content)
        opened = token.type
        if token.type == "html_block":
            mark = token.content.strip().removeprefix("<!--").removesuffix("-->").strip()
        elif token.type == "fence":
            first_line = (token.map or [0])[0] + 2
            language = token.info.split(" ")[0].strip()
            found.append(Block(page, first_line, language, mark, token.content, heading, before))
            mark = ""
        elif token.type not in ("list_item_open", "bullet_list_open", "ordered_list_open"):
            mark = ""
    return tuple(found)


@cache
def spans(page: str) -> tuple[Span, ...]:
    """Return a page's inline code in its order."""
    return tuple(_spans(page))


def _spans(page: str) -> Iterator[Span]:
    line = 0
    for token in tokens(page):
        line = token.map[0] + 1 if token.map else line
        for child in token.children or ():
            if child.type == "code_inline":
                yield Span(page, line, " ".join(child.content.split()))


def all_blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in these languages, or all blocks."""
    return [block for page in PAGES for block in blocks(page) if not languages or block.language in languages]
