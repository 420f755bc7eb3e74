"""The traffic benchmark, small: two ranks of which the stores learn the idle spans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.checkpoint import traffic
from benchmarks.checkpoint.namespaces import why_not

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    if reason := why_not():
        pytest.skip(reason)
    out: Path = tmp_path_factory.mktemp("traffic") / "figures.json"
    words = ["--seconds", "1", "--rate", "200mbit", "--width", "400", "--micro-batches", "2", "--compute", "0.1"]
    assert traffic.main([*words, "--block", "12", "--out", str(out)]) == 0
    figures: dict[str, object] = json.loads(out.read_text(encoding="utf-8"))["modes"]["scheduled"]
    return figures


def test_the_idle_spans_of_two_ranks_are_learned_from_what_passes(found: dict[str, list[float]]) -> None:
    assert len(found["idle_spans_s"]) >= 2
    assert 0.05 < max(found["idle_spans_s"]) < 1.0


def test_steps_become_whole_between_collectives(found: dict[str, int]) -> None:
    assert found["whole_steps"] > 0
