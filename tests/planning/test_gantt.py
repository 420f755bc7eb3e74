"""The picture: every pass of a step where it ran, and nothing from elsewhere."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from eagle_eye.planning.planner import make_plan
from eagle_eye.planning.telling import PASSES_MAX, STAGES_MAX, gantt
from tests.planning.jobs import GIB, hardware, layer, profile

SVG = "{http://www.w3.org/2000/svg}"


def drawn(layers: int, nodes: int, batch: int, memory_bytes: int) -> ET.Element:
    names = [f"<n{number}>" for number in range(nodes)]
    plan = make_plan(profile(layers), names, hardware(nodes, memory_bytes), 1, batch)
    return ET.fromstring(gantt(plan, plan.layouts[-1]))


def passes(picture: ET.Element, kind: str) -> list[ET.Element]:
    return [each for each in picture.iter(f"{SVG}rect") if each.get("class") == f"{kind} pass"]


def test_each_template_of_the_layout_is_drawn_once_with_all_its_passes() -> None:
    picture = drawn(24, 5, 64, 60 * GIB)
    said = [text for each in picture.iter(f"{SVG}text") if (text := each.text or "").startswith("a pipeline of")]
    batches = [int(found[1]) for text in said if (found := re.search(r"(\d+) micro-batches", text))]
    assert len(said) == 2
    assert sum(batches) == 64
    assert len(passes(picture, "forward")) == len(passes(picture, "backward")) == 2 * batches[0] + 3 * batches[1]


def test_no_two_passes_of_a_row_overlap_and_all_are_within_the_picture() -> None:
    picture = drawn(24, 5, 64, 60 * GIB)
    rows: dict[str, list[tuple[float, float]]] = {}
    for each in passes(picture, "forward") + passes(picture, "backward"):
        begin = float(each.attrib["x"])
        rows.setdefault(each.attrib["y"], []).append((begin, begin + float(each.attrib["width"])))
    assert len(rows) == 5
    for spans in rows.values():
        spans.sort()
        assert all(end <= begin + 0.02 for (_, end), (begin, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= float(picture.attrib["width"])


def test_the_picture_stands_alone_and_has_a_dark_side() -> None:
    plan = make_plan(profile(24), ["n1", "n2"], hardware(2, 60 * GIB), 1, 8)
    text = gantt(plan, plan.layouts[-1])
    assert "prefers-color-scheme: dark" in text
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"<script|href|url\(", text)


def test_of_many_micro_batches_some_are_drawn_and_the_picture_says_so() -> None:
    picture = drawn(24, 2, 4_000, 60 * GIB)
    assert len(passes(picture, "forward")) * 2 <= PASSES_MAX
    assert any("(drawn: 1000 of 4000)" in (each.text or "") for each in picture.iter(f"{SVG}text"))


def test_a_pipeline_of_too_many_stages_is_not_drawn() -> None:
    count = STAGES_MAX + 1
    layers = [layer(number, activation_bytes=0) for number in range(count)]
    plan = make_plan(profile(layers), ["n1", "n2", "n3"], hardware(3, 5 * GIB, gpus_per_node=64), 1, 4)
    with pytest.raises(ValueError, match=f"a picture of {count} stages: at most {STAGES_MAX} are drawn"):
        gantt(plan, plan.layouts[-1])
