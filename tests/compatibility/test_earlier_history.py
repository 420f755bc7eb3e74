"""A history that an earlier server kept, with merged segments, minutes and hours, answers as it did then."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.metrics import BY_NAME
from eagle_eye.server.history.embedded_history import EmbeddedHistory
from eagle_eye.server.history.history import in_steps
from tests.server.builders import FakeClock
from tests.server.segments.kept import compact, opened, told

EARLIER = Path(__file__).parents[1] / "data" / "compatibility" / "8cefd94"
DAY_S = 86_400.0
THEN: dict[str, Any] = json.loads(gzip.decompress((EARLIER / "history.json.gz").read_bytes()))
KEPT = {"retention_s": 2 * DAY_S, "minutes_retention_s": 4 * DAY_S}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with tarfile.open(EARLIER / "history.tar.gz") as archive:
        archive.extractall(tmp_path / "data", filter="data")
    return tmp_path / "data"


def check(history: EmbeddedHistory) -> None:
    assert [[node, stream, sequence] for node, stream, sequence, _ in told(history)] == THEN["frames"]
    start_s = THEN["start_s"]
    for then in THEN["answers"]:
        spec, step_s = BY_NAME[then["metric"]], then["step_s"]
        with history.courses(spec, ["n1", "n2"], start_s, start_s + 8 * DAY_S, then["job"], step_s, 10**9) as reading:
            found = in_steps(reading.courses, spec, then["statistic"], start_s, step_s, 100)
        now = {(node, key): (one.steps, pytest.approx(one.values, rel=1e-6)) for (node, key), one in found.items()}
        assert {(node, key): (steps, values) for node, key, steps, values in then["series"]} == now, then


def test_it_answers_as_it_did(data: Path) -> None:
    with opened(data, FakeClock(THEN["now_s"]), **KEPT) as history:
        check(history)
        compact(history)
        check(history)
    with opened(data, FakeClock(THEN["now_s"]), **KEPT) as history:
        check(history)
        assert history.segment_store.set_aside_total == history.segment_store.levels.set_aside_total == 0
