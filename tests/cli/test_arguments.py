"""Wrong words on a command line: one line that says what was expected, exit code 2, and never an empty answer."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.cli import main as cli
from eagle_eye.cli.main import main


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing listens where the commands would ask."""
    monkeypatch.setenv("EAGLE_EYE_SERVER", "http://127.0.0.1:1")


FILTERS = [
    ("jobs", "--state", "runing", "running"),
    ("incidents", "--state", "bogus", ""),
    ("incidents", "--state", "suspectd", "suspected"),
    ("incidents", "--fault", "thermal_throtle", "thermal_throttle"),
    ("actions", "--state", "requestd", "requested"),
    ("actions", "--kind", "exclude", "exclude_node"),
    ("deliveries", "--state", "faild", "failed"),
    ("deliveries", "--type", "eagle_eye.incident.open", "eagle_eye.incident.opened"),
    ("nodes", "--state", "exclude", "excluded"),
    ("silences", "--state", "activ", "active"),
    ("ledger", "--fault", "hangs", "hang"),
    ("ledger", "--standing", "rigth", "right"),
    ("goodput", "--by", "nodes", "node"),
]


@pytest.mark.parametrize(("command", "flag", "value", "meant"), FILTERS)
def test_a_filters_slip_names_the_values_and_the_one_that_may_be_meant(
    command: str, flag: str, value: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, flag, value]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"{flag}: {value!r} is unknown; expected one of " in err
    assert (f"; did you mean {meant}?" in err) if meant else "did you mean" not in err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["incidens"], "incidents"),
        (["incidents", "aknowledge", "x"], "acknowledge"),
        (["incidents", "--stae", "open"], "--state"),
        (["incidents", "list", "--stae=open"], "--state"),
        (["record", "out", "--job", "j", "--sinc3", "-2h", "--since", "-1h"], "--since"),
        (["subscriptions", "add", "http://x", "--type", "eagle_eye.pong"], "eagle_eye.ping"),
        (["actions", "report", "act_1", "don"], "done"),
        (["tokens", "create", "--scope", "reed"], "read"),
    ],
)
def test_unknown_words_are_named_with_what_may_be_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"did you mean {meant}?" in err


@pytest.mark.parametrize("limit", ["0", "-5", "1e3", "", "9" * 5_000, "nan"])
def test_a_limit_is_a_whole_number_of_at_least_one(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["incidents", f"--limit={limit}"]) == 2
    err = capsys.readouterr().err
    assert "expected a whole number from 1 to 1000000" in err
    assert len(err) < 400


def timed(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from timed(inner)
        elif set(action.option_strings) & {"--since", "--until"}:
            yield parser.prog, action


def test_every_command_with_times_takes_them_written_alike() -> None:
    found: list[tuple[str, argparse.Action]] = []
    for command in cli.COMMANDS:
        try:
            parser = cli.parser_of(command, cli.load(command))
        except ModuleNotFoundError:
            continue
        found += timed(parser)
    assert {prog for prog, _ in found} >= {
        f"eagle-eye {name}" for name in ("audit", "goodput", "ledger", "record", "import", "subscriptions redeliver")
    }
    for prog, action in found:
        said = str(action.help)
        assert "-2h, 7d, now or Unix seconds" in said or said.endswith("written likewise"), prog


SPANS = [
    ["audit"],
    ["goodput"],
    ["ledger"],
    ["record", "OUT", "--job", "j"],
    ["import", "OUT", "--job", "j", "--prometheus", "http://127.0.0.1:1"],
    ["subscriptions", "redeliver", "sub_1"],
]


@pytest.mark.parametrize("words", SPANS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("since", "why"),
    [
        ("yesterday", "expected RFC 3339 with a zone (2026-01-31T12:00:00Z), an age (-2h, 7d, 90s), now, or Unix"),
        ("2026-01-31T12:00:00", "it has no zone"),
        ("1767225600000", "looks like Unix milliseconds: write seconds, 1767225600"),
        ("", "expected RFC 3339"),
        ("nan", "expected RFC 3339"),
        ("2099-01-01T00:00:00Z", "expected a time before now"),
    ],
)
def test_a_wrong_time_is_refused_alike_by_every_command(
    words: list[str], since: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--since", since]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--since: " in err
    assert why in err


@pytest.mark.parametrize("words", SPANS, ids=lambda words: words[0])
@pytest.mark.parametrize("since", ["-2h", "2h", "7d", "90s", "2026-01-31T12:00:00Z", "1767225600", "1767225600.5"])
def test_a_time_is_written_the_same_way_in_every_command(
    words: list[str], since: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    assert main([*words, "--since", since]) == 1
    assert "--since" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["goodput"], ["record", "OUT", "--job", "j"]], ids=lambda words: words[0])
def test_since_after_until_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--since", "-1h", "--until", "-2h"]) == 2
    assert "--since: expected a time before --until, '-2h', got '-1h'" in capsys.readouterr().err
