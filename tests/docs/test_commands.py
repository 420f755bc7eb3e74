"""Every command of the documents is typed here, page by page, or stands in elsewhere.py with the test that runs it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.docs.commands import Line, is_synopsis, lines, spelled_out
from tests.docs.elsewhere import elsewhere, slow
from tests.docs.pages import PAGES, Block, blocks
from tests.docs.site import Site, default_ports_taken, opened

pytestmark = pytest.mark.slow  # hundreds of commands

ALL = os.environ.get("EAGLE_EYE_TEST_DOCS") == "1"
# Exit codes beside 0 that the documents give a meaning: a host without GPUs, a clock that nobody keeps.
ANSWERS = {
    r"eagle-eye check\b(?!.*--list)": {0, 1, 3},
    r"eagle-eye doctor\b": {0, 1},
    r"eagle-eye agent --once": {0, 1, 3},
}


def typed_here(page: str) -> list[Line]:
    """Return a page's commands that are run here, synopses in their shortest spellings; scripts are none."""
    found = []
    for block in blocks(page):
        if block.language == "sh" and not block.text.startswith("#!"):  # those: test_scripts.py
            for line in lines(block):
                spellings = spelled_out(line.text, whole=False) if is_synopsis(line.text) else [line.text]
                found += [line._replace(text=text) for text in spellings]
    return [line for line in found if elsewhere(line) is None]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with default_ports_taken(), opened(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.mark.parametrize("page", [page for page in PAGES if any(not slow(line) for line in typed_here(page))])
def test_commands_do_what_the_page_says(page: str, site: Site) -> None:
    exported: list[str] = []
    wrong = []
    said: dict[Block, str] = {}
    for line in typed_here(page):
        if slow(line) and not ALL:
            continue
        if line.text.startswith("export "):
            exported.append(site.typed(line.text))
        if why := site.refusal(line):
            wrong.append(f"{line.place}: {line.text}\n  {why}")
            continue
        done = site.run(line, exported)
        said[line.block] = said.get(line.block, "") + done.said
        allowed = next((codes for begins, codes in ANSWERS.items() if re.match(begins, line.text)), {0})
        if done.code not in allowed:
            wrong.append(f"{line.place}: {line.text}\n  exit code {done.code}: {done.complained or done.said}".rstrip())
    for block, output in pairwise(blocks(page)):
        if output.mark == "output" and block in said:
            missing = [words for words in labels(output.text) if words not in said[block]]
            wrong += [f"{output.place}: {missing} is not in what was said: {said[block]}"] if missing else []
    assert not wrong, "\n" + "\n".join(wrong)


def labels(output: str) -> list[str]:
    """Return how the lines of an output begin, up to what differs from site to site: numbers, names, columns."""
    found = (
        re.match(r"[A-Za-z][a-z]*(?: [a-z]+)*(?=:| {2,}| [\w-]*\d|$)", line.strip()) for line in output.splitlines()
    )
    return [begins[0] for begins in found if begins]
