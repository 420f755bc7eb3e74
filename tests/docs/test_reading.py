"""How the documents are read: what would let a wrong command pass is refused here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.commands import Line, eagle_eye_calls, is_synopsis, lines, simple_commands, spelled_out
from tests.docs.content import check_json, check_python, check_toml
from tests.docs.pages import Block
from tests.docs.parsing import WrongCommandLine, check_eagle_eye, check_program
from tests.docs.site import Site


def block(text: str, language: str = "sh") -> Block:
    return Block("docs/page.md", 10, language, "", text)


def test_a_continued_line_is_one_and_a_comment_is_none() -> None:
    found = lines(block("# first\na \\\n  --b  # why\n\nc '#' d\n"))
    assert [(line.line, " ".join(line.text.split())) for line in found] == [(11, "a --b"), (14, "c '#' d")]


def test_calls_are_found_behind_wrappers_pipes_and_substitutions() -> None:
    text = "x=$(timeout 4 eagle-eye agent --once 2>&1) && sudo -u me eagle-eye nodes | podman exec s eagle-eye jobs"
    assert sorted(eagle_eye_calls(text)) == [["agent", "--once"], ["jobs"], ["nodes"]]
    assert list(eagle_eye_calls("useradd eagle-eye")) == []


def test_redirections_are_no_words() -> None:
    assert list(simple_commands("a b > c 2>/dev/null")) == [["a", "b"]]


def test_a_synopsis_is_spelled_out_in_each_way_and_in_its_shortest() -> None:
    text = "eagle-eye goodput [--by job|node] [--since TIME]"
    assert is_synopsis(text)
    assert spelled_out(text) == [f"eagle-eye goodput --by {by} --since TIME" for by in ("job", "node")]
    assert set(spelled_out(text, whole=False)) == {"eagle-eye goodput"}


@pytest.mark.parametrize(
    "words",
    ["nods", "nodes exclud n1", "nodes --stat open", "tokens create --scope root", "nodes show GARAGE", "agent --onc"],
)
def test_a_command_that_the_parser_refuses_is_refused(words: str) -> None:
    with pytest.raises(WrongCommandLine):
        check_eagle_eye(words.split())


def test_only_within_a_sentence_may_arguments_be_missing() -> None:
    check_eagle_eye(["nodes", "exclude"], whole=False)
    with pytest.raises(WrongCommandLine, match="required"):
        check_eagle_eye(["nodes", "exclude"])


def test_programs_of_ours_are_asked_and_those_that_are_none_refused() -> None:
    check_program("benchmarks.flood", ["--seconds", "8"])
    for program, arguments in (("benchmarks.flood", ["--sconds", "8"]), ("benchmarks.flod", []), ("release/no.py", [])):
        with pytest.raises(WrongCommandLine):
            check_program(program, arguments)


@pytest.mark.parametrize("text", ["rm -r /etc/eagle-eye", "true && frobnicate", "echo $(reboot)", "cp x /usr/bin/x"])
def test_what_no_test_runs_or_what_would_leave_the_site_is_not_typed(text: str, tmp_path: Path) -> None:
    values = dict.fromkeys(("NODE", "INCIDENT", "ACTION", "TOKEN", "TIME"), "x")
    site = Site(tmp_path, "http://127.0.0.1:1", values, newest=lambda _kind: "none")
    assert site.refusal(Line(block(text), 10, text))
    assert not site.refusal(Line(block(text), 10, "cp x /etc/eagle-eye/x"))


def test_wrong_configuration_json_and_python_are_refused(tmp_path: Path) -> None:
    assert "unknown key" in check_toml(block('[policy]\nmod = "act"\n'), tmp_path)
    assert check_toml(block('[policy]\nmode = "act"\n'), tmp_path) == ""
    assert check_json(block('{"kind": "node_check", "gemm_s": 1.0}'))
    assert check_json(block('{"nobody": "reads this"}'))
    assert list(check_python(block("training = attach(mode=1)"))) == ["attach takes no mode"]
    assert list(check_python(block("from eagle_eye.agent.hook import atach")))
