"""The documents' pictures are made by a command, and are those that the documents show."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'eagle-eye[reports]'")

from tests.docs.pages import ROOT
from tests.page import loop_strip, pictures
from tests.page.loop_strip import LoopRun, Moment

PNG = b"\x89PNG\r\n\x1a\n"
BYTES_MAX = 300_000  # of a picture of the README
NAMES = {
    "page": ["page-fleet.png", "page-incident.png"],
    "loop": ["loop-light.png", "loop-dark.png"],
    "plot": ["incident-plot.png"],
}
RUN = LoopRun(
    (
        Moment("Fault", 0.0, {"node1": "trains", "node2": "stopped"}, "the ranks of node2 were stopped"),
        Moment("Verdict", 1.6, {"node1": "waits", "node2": "accused"}, "hang of node2: no step for 2.0 s"),
        Moment("Excluded", 3.2, {"node1": "restarts", "node2": "excluded"}, "node2 is <out>"),
        Moment("Trains again", 10.9, {"node1": "trains", "node2": "excluded"}, "first new step 13"),
    ),
    ((-20.0, 2), (-2.0, 11), (-0.5, 12), (10.9, 13), (12.0, 14)),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_pictures_are_taken(name: str, tmp_path: Path) -> None:
    if shutil.which("chromium") is None:
        pytest.skip("needs chromium: apt-get install chromium")
    taken = pictures.PICTURES[name](tmp_path)
    assert [file.name for file in taken] == NAMES[name]
    assert all(file.read_bytes().startswith(PNG) for file in taken)


def test_each_picture_is_there_and_small() -> None:
    there = {file.name: file.stat().st_size for file in pictures.ASSETS.glob("*.png")}
    assert sorted(there) == sorted(name for names in NAMES.values() for name in names)
    assert {name: size for name, size in there.items() if size > BYTES_MAX} == {}


def test_the_readme_shows_the_loop_for_light_and_dark_and_in_words() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<picture>.*?</picture>", text, flags=re.DOTALL)
    assert re.findall(r'(?:src|srcset)="docs/assets/([\w.-]+)"', shown) == ["loop-dark.png", "loop-light.png"]
    (words,) = re.findall(r'alt="([^"]+)"', shown)
    assert all(word in words for word in ("stopped", "names", "excluded", "trains again"))


def test_the_strip_has_what_was_told_when_and_who_trained() -> None:
    text = loop_strip.page(RUN)
    for moment in RUN.moments:
        assert f"{moment.name}<time>+{moment.since_s:.1f} s</time>" in text
    assert "node2<i>accused</i>" in text
    assert "node2 is &lt;out&gt;" in text


def test_the_strips_staircase_stands_still_from_the_fault_to_the_first_new_step() -> None:
    (path,) = re.findall(r'<path d="([^"]+)"', loop_strip.page(RUN))
    turns = [(float(x), float(y)) for x, y in re.findall(r"H([\d.]+)V([\d.]+)", path)]
    (_, y_before), (x_again, y_again), *_ = turns
    (marked,) = re.findall(r"<rect x=([\d.]+) y=\S+ width=([\d.]+)", loop_strip.page(RUN))
    assert x_again == pytest.approx(sum(map(float, marked)), abs=0.2)
    assert y_again < y_before
    assert "step 14" in loop_strip.page(RUN)
    assert "step 2<" not in loop_strip.page(RUN)  # long before the fault
