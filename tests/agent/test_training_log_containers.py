"""Logs that container runtimes write: what the program wrote is taken out of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collectors.training_log import TrainingLogCollector
from eagle_eye.agent.training_logs.lines import LINE_BYTES_MAX, ContainerLines, LogLine, without_prefixes
from tests.agent.fakes import FakeClock
from tests.agent.training_log_site import FRAME, HEADER, Site, append, iteration, kinds

TIME = "2026-03-02T08:15:02.123456789Z"
PIECE = 16_384  # Docker's and containerd's buffer


def docker(text: str, stream: str = "stdout", **more: object) -> str:
    """One line as Docker's json-file driver writes it: a few characters more are escaped than JSON asks for."""
    line = json.dumps({"log": text, "stream": stream, **more, "time": TIME}, ensure_ascii=False, separators=(",", ":"))
    return line.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026") + "\n"


def cri(text: str, tag: str = "F", stream: str = "stdout") -> str:
    return f"{TIME} {stream} {tag} {text}\n"


def unwrapped(*chunks: str) -> bytes:
    lines = ContainerLines()
    return b"".join(lines.unwrapped(chunk.encode()) for chunk in chunks)


def test_dockers_json_is_taken_off() -> None:
    text = 'loss: 1.5 <ok> & "quoted" \u00e9 \x1b[32m\n'
    assert unwrapped(docker(text)) == text.encode()
    assert unwrapped(docker("a\n", attrs={"tag": "x"}) + docker("b\n", "stderr")) == b"a\nb\n"


def test_what_docker_did_not_write_stays_as_it_is() -> None:
    for line in (
        '{"log":"a line of the program\'s own"}\n',
        '{"log":"x","stream":"metrics","time":"now"}\n',
        '{"log":"cut o\n',
        '{"rank": 0, "log":"x"}\n',
        'text {"log":"x","stream":"stdout","time":"1"}\n',
        '{"log":"x","more":' + "[" * 10_000 + "\n",
    ):
        assert unwrapped(line) == line.encode()


def test_pieces_of_a_line_are_put_together_by_stream() -> None:
    lines = docker("a" * 100) + docker("other\n", "stderr") + docker("b\n")
    assert unwrapped(lines) == b"other\n" + b"a" * 100 + b"b\n"
    assert unwrapped(docker("a"), docker("b"), docker("c\n")) == b"abc\n"
    lines = cri("a", "P") + cri("other", stream="stderr") + cri("b", "P") + cri("c")
    assert unwrapped(lines) == cri("other", stream="stderr").encode() + cri("abc", "P").encode()
    assert unwrapped(cri("a", "P"), cri("b")) == cri("ab", "P").encode()
    assert without_prefixes(cri("ab", "P").rstrip()) == LogLine("ab")


def test_cri_lines_that_are_whole_are_left_to_the_prefixes() -> None:
    assert unwrapped(cri("[rank2]: text")) == cri("[rank2]: text").encode()
    assert without_prefixes(cri("[rank2]: text").rstrip()) == LogLine("text", rank=2)


def test_a_progress_bar_in_dockers_json_is_many_lines() -> None:
    assert unwrapped(docker("\r 10%|\r 20%|"), docker("\r 30%|\n")).split() == [b"10%|", b"20%|", b"30%|"]


@pytest.mark.parametrize("piece", [docker("x" * PIECE), cri("x" * PIECE, "P")])
def test_a_line_that_never_ends_costs_no_memory(piece: str) -> None:
    lines = ContainerLines()
    for _ in range(1_000):
        assert lines.unwrapped(piece.encode()) == b""
        assert sum(len(kept) for kept in lines._pieces.values()) <= LINE_BYTES_MAX


@given(st.lists(st.one_of(st.binary(max_size=80), st.text(max_size=20).map(lambda t: docker(t).encode())), max_size=9))
def test_any_bytes_are_lines_or_pieces(chunks: list[bytes]) -> None:
    lines = ContainerLines()
    for chunk in chunks:
        assert len(lines.unwrapped(chunk)) <= len(chunk) + LINE_BYTES_MAX
        assert sum(len(kept) for kept in lines._pieces.values()) <= 2 * LINE_BYTES_MAX


@given(st.lists(st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]), max_size=20), max_size=9))
def test_what_a_program_wrote_comes_back(lines: list[str]) -> None:
    written = "".join(f"{line}\n" for line in lines)
    whole = [piece + "\n" for piece in written.split("\n")[:-1]]
    assert unwrapped("".join(docker(line) for line in whole)).decode() == written


@pytest.fixture
def site(tmp_path: Path, clock: FakeClock) -> Site:
    return Site(tmp_path, clock)


def followed(site: Site) -> tuple[TrainingLogCollector, Path]:
    site.runs(0, size=1)
    agent = site.agent("*.log")
    log = site.log("c-json.log")
    site.collect(agent)
    return agent, log


@pytest.mark.parametrize("wrapped", [docker, lambda text: cri(text.rstrip("\n"))])
def test_a_containers_log_tells_as_a_plain_one_does(site: Site, wrapped: object) -> None:
    agent, log = followed(site)
    append(log, wrapped(iteration(10)))  # type: ignore[operator]
    assert site.collect(agent).devices[0]["train_step"] == 10.0
    for line in (HEADER + FRAME + "ValueError: x\n").splitlines(keepends=True):
        append(log, wrapped(line))  # type: ignore[operator]
    site.alive.clear()
    assert kinds(site.collect(agent).events) == ["training_error"]


def test_structured_lines_within_dockers_json_are_found(site: Site) -> None:
    agent, log = followed(site)
    for step in (5, 6):
        line = {"log_type_name": "x", "rank": 0, "source": "train", "step": step, "time_us": step * 1_000_000}
        append(log, docker(json.dumps(line) + "\n"))
    assert site.collect(agent).devices[0]["train_step"] == 5.0


def test_what_a_flood_left_out_is_not_put_together_with_what_comes_after(site: Site) -> None:
    agent, log = followed(site)
    append(log, docker(iteration(10).rstrip("\n")))
    site.collect(agent)
    append(log, docker("x" * 1_000 + "\n") * 2_000 + docker(iteration(20)))
    assert site.collect(agent).devices[0]["train_step"] == 20.0
    assert site.drops.snapshot()["training_log_bytes_skipped"] > 0
