"""What the documents show holds: commands parse, paths and targets exist, configuration and code are what they say."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands import eagle_eye_calls, is_synopsis, lines, simple_commands, spelled_out
from tests.docs.content import check_json, check_python, check_toml, check_yaml
from tests.docs.elsewhere import KNOWN, Elsewhere, elsewhere
from tests.docs.pages import PAGES, ROOT, all_blocks, blocks, spans
from tests.docs.parsing import WrongCommandLine, check_eagle_eye, check_program

LANGUAGES = {
    *("sh", "text", "python", "toml", "json", "yaml", "ini", "csv", "http", "promql", "sql"),
    *("hex", "hex-rows"),  # tests/agent/test_wire_doc.py decodes them
}
ROOMS = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
_PATH = re.compile(rf"(?:{ROOMS})/[\w./-]*\w\.(?:py|md|toml|json|yaml|yml|service|sh|lock|txt|Dockerfile)")


def shown(page: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (place, command line, whole) of a page: typed ones, those in configuration, those within sentences."""
    for block in blocks(page):
        if block.language == "sh":
            for line in lines(block):
                for text in line.text.splitlines() if line.text.startswith("#!") else [line.text]:
                    yield line.place, text, True
        elif block.language == "ini":
            for found in re.finditer(r"^Exec\w+=(.*)$", block.text, re.MULTILINE):
                yield block.place, found[1], True
    for span in spans(page):
        if re.match(r"(eagle-eye [a-z]|make [a-z]|python -m )", span.text):
            yield span.place, span.text, False


def _in_its_room(path: str) -> Path:
    """Return where ``agent/loop.py`` is, as the documents call it for short."""
    room, _, rest = path.partition("/")
    return ROOT / room / "eagle_eye" / room / rest


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    unknown = [
        f"{block.place}: {block.language or 'no language'}" for block in blocks(page) if block.language not in LANGUAGES
    ]
    assert unknown == [], f"sh is typed, text is output or a drawing; known are {sorted(LANGUAGES)}"


@pytest.mark.parametrize("page", PAGES)
def test_every_eagle_eye_command_is_read_by_its_parser(page: str) -> None:
    wrong = []
    for place, text, whole in shown(page):
        for spelling in spelled_out(text) if is_synopsis(text) or not whole else [text]:
            for arguments in eagle_eye_calls(spelling):
                try:
                    check_eagle_eye(arguments, whole=whole)
                except WrongCommandLine as error:
                    wrong.append(f"{place}: {spelling}: {error}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_every_program_of_ours_takes_the_arguments_shown(page: str) -> None:
    wrong = []
    for place, text, whole in shown(page):
        for words in simple_commands(text):
            if re.fullmatch(r"(\S*/)?python3?", words[0]) and re.match(r"-m .|\w+/\S+\.py\b", " ".join(words[1:3])):
                program, *arguments = words[2:] if words[1] == "-m" else words[1:]
                try:
                    check_program(program, arguments, whole=whole)
                except WrongCommandLine as error:
                    wrong.append(f"{place}: {text}: {error}")
    assert wrong == []


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [(place, words) for page in PAGES for place, text, _ in shown(page) for words in simple_commands(text)]
    named = {(place, words[1]) for place, words in commands if words[0] == "make" and words[1:]}
    assert named
    assert {(place, target) for place, target in named if target not in targets} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_exists(page: str) -> None:
    folder = (ROOT / page).parent
    missing = [
        f"{span.place}: {found}"
        for span in spans(page)
        for found in _PATH.findall(span.text)
        if found == span.text
        and not any(place.exists() for place in (ROOT / found, folder / found, _in_its_room(found)))
    ]
    assert missing == []


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.language == "toml" for block in blocks(page))])
def test_configuration_is_read_by_its_loader(page: str, tmp_path: Path) -> None:
    wrong = [
        f"{block.place}: {why}"
        for block in blocks(page)
        if block.language == "toml" and (why := check_toml(block, tmp_path))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.language == "json" for block in blocks(page))])
def test_json_is_what_the_code_reads_or_writes(page: str) -> None:
    assert [
        f"{block.place}: {why}" for block in blocks(page) if block.language == "json" and (why := check_json(block))
    ] == []


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.language == "yaml" for block in blocks(page))])
def test_yaml_is_accepted_by_what_it_is_for(page: str, tmp_path: Path) -> None:
    assert [
        f"{block.place}: {why}"
        for block in blocks(page)
        if block.language == "yaml" and (why := check_yaml(block, tmp_path))
    ] == []


@pytest.mark.parametrize("page", [page for page in PAGES if any(block.language == "python" for block in blocks(page))])
def test_python_compiles_and_calls_what_exists_as_it_is_called(page: str) -> None:
    assert [
        f"{block.place}: {why}" for block in blocks(page) if block.language == "python" for why in check_python(block)
    ] == []


def test_every_shell_block_parses() -> None:
    typed = [block for block in all_blocks("sh") if not any(is_synopsis(line.text) for line in lines(block))]
    assert typed
    for block in typed:
        done = subprocess.run(["sh", "-n"], input=block.text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block.place}: {done.stderr}"


def test_a_block_that_another_test_runs_names_one_that_reads_its_page() -> None:
    run_elsewhere = [block for block in all_blocks() if block.mark.startswith("run by ")]
    assert run_elsewhere
    for block in run_elsewhere:
        test = ROOT / block.mark.removeprefix("run by ")
        assert test.is_file(), f"{block.place}: {test} does not exist"
        assert Path(block.page).name in test.read_text(encoding="utf-8"), (
            f"{block.place}: {test} does not read the page"
        )


@pytest.mark.parametrize("each", KNOWN, ids=lambda each: str(each.command))
def test_what_is_run_elsewhere_is_still_shown_and_its_test_has_its_word(each: Elsewhere) -> None:
    shown_still = [line for block in all_blocks("sh") for line in lines(block) if elsewhere(line) is each]
    assert shown_still, "no page shows such a command any more"
    assert bool(each.why) != bool(each.test and each.word)
    assert not each.test or each.word in (ROOT / each.test).read_text(encoding="utf-8")
