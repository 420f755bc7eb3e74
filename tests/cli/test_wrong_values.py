"""A few of the wrong values of every command; ``tests/attack/test_commands.py`` has all of them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.wrong_values import Case, Runner, cases, complaint


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    started = Runner(tmp_path_factory.mktemp("commands"))
    yield started
    started.close()


def some() -> list[Case]:
    """Return two cases of every command, the same every time: one that cannot be meant, one that could."""
    by_kind: dict[tuple[str, bool], Case] = {}
    for case in sorted(cases(), key=lambda case: zlib.crc32(repr(case.words).encode("utf-8", "replace"))):
        by_kind.setdefault((case.words[0], case.refused), case)
    return [*by_kind.values()]


@pytest.mark.slow
def test_wrong_values_end_commands_with_one_line_and_never_with_a_traceback(runner: Runner) -> None:
    chosen = some()
    assert len({case.words[0] for case in chosen}) >= 10
    reported = [(case, runner.run(case.words)) for case in chosen]
    assert [(said, case.words, outcome) for case, outcome in reported if (said := complaint(case, outcome))] == []


def test_a_file_without_end_is_refused_and_not_read(runner: Runner) -> None:
    for words in (["nodes", "--token-file=/dev/zero"], ["server", "--print-config", "--config=/dev/zero"]):
        outcome = runner.run(words)
        assert complaint(Case(words, False), outcome) == ""
        assert outcome.code in (1, 2)
        assert "/dev/zero" in outcome.err


def test_the_runner_sees_what_it_looks_for(runner: Runner, tmp_path: Path) -> None:
    outcome = runner.run(["simulate", "--list"])
    assert outcome.code == 0
    assert "exit code 0 for a value that cannot be meant" in complaint(Case(["simulate"], True), outcome)
    assert "more than one line" in complaint(Case(["nodes"], False), outcome._replace(code=1, err="a\nb\n"))
    assert "a traceback" in complaint(Case(["nodes"], False), outcome._replace(code=1, err="Traceback: x\n"))
