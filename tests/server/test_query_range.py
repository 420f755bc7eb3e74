"""A query over the history through the API: its statistics, and which level answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.frame import Frame, Rank, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.history.embedded_history import EmbeddedHistory
from eagle_eye.server.history.segment_tables import MINUTES_FOLDER
from tests.server.builders import NOW, FakeClock, Running, body, frame, running
from tests.server.segments.kept import compact

HOUR_S = 3_600.0


def sample(number: int, time_s: float) -> Frame:
    values = {"gpu_power_watts": 100.0 + number, "gpu_ecc_corrected_total": float(number)}
    return frame(number, time_s=time_s, blocks=[block(Scope.DEVICE, {0: values})])


def asked(server: Running, **more: Any) -> dict[str, Any]:
    query = {"metric": "gpu_power_watts", "start": NOW, "end": NOW + 8, "step": 4, **more}
    answer = server.client.get("/api/v1/query_range", params=query)
    found: dict[str, Any] = answer.json()
    return found


def values(answer: dict[str, Any]) -> list[float]:
    return [value for _, value in answer["series"][0]["points"]]


def test_statistics_of_a_step(tmp_path: Path) -> None:
    with running(tmp_path, FakeClock(NOW + 6)) as server:
        server.send(body(*(sample(n, NOW + n) for n in range(1, 7)), sent_s=NOW + 6))
        assert values(asked(server)) == [103.0, 106.0]
        assert values(asked(server, statistic="min")) == [101.0, 104.0]
        assert values(asked(server, statistic="max")) == [103.0, 106.0]
        assert values(asked(server, statistic="mean")) == [102.0, 105.0]
        # From 1, 2, 3 to 4, 5, 6: what there was before the first value is not known.
        assert values(asked(server, metric="gpu_ecc_corrected_total", statistic="increase")) == [2.0, 3.0]
        assert asked(server)["resolutions"][0]["resolution_seconds"] == 0


def test_a_job_that_was_restarted_elsewhere_keeps_its_former_nodes_also_where_only_agents_speak_of_it(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as server:
        server.send(body(sample(1, NOW + 1), sent_s=NOW))
        server.send(body(frame(1, "n2", NOW + 5, ranks=[Rank("job", 0, 1, 0, attempt=1)]), sent_s=NOW))
        assert [series["node"] for series in asked(server, job="job")["series"]] == ["n1", "n2"]


@pytest.mark.parametrize(
    ("metric", "statistic", "reason"),
    [
        ("gpu_power_watts", "increase", "statistic"),
        ("gpu_ecc_corrected_total", "mean", "statistic"),
        ("train_step", "increase", "statistic"),
        ("gpu_power_watts", "median", "parameter"),
    ],
)
def test_a_statistic_that_there_is_not_is_refused(tmp_path: Path, metric: str, statistic: str, reason: str) -> None:
    with running(tmp_path) as server:
        answer = asked(server, metric=metric, statistic=statistic)
        assert (answer["status"], answer["reason"]) == (400, reason)


def test_levels_answer_and_the_broken_among_them_cost_no_answer(tmp_path: Path) -> None:
    clock = FakeClock()
    start_s = NOW // HOUR_S * HOUR_S
    with running(tmp_path, clock) as server:
        server.send(body(*(sample(n, NOW + n) for n in range(1, 7)), sent_s=NOW))
        history = server.dispatcher.services.history
        assert isinstance(history, EmbeddedHistory)
        compact(history)
        query = {"start": start_s, "end": start_s + 2 * HOUR_S, "step": 600, "statistic": "mean"}
        answer = asked(server, **query)
        assert [one["resolution_seconds"] for one in answer["resolutions"]] == [60, 0]
        assert values(answer) == [103.5]
        (folder,) = history.segment_store.levels.folder(MINUTES_FOLDER).iterdir()
        (folder / "series.parquet").write_bytes(b"")
        answer = asked(server, **query)
        assert [one["resolution_seconds"] for one in answer["resolutions"]] == [0]
        assert values(answer) == [103.5]
        assert server.metric("history_level_segments", level="raw") == 1
        assert server.metric("history_level_segments", level="1m") == 0
        assert server.metric("history_set_aside_level_segments_total") == 1
