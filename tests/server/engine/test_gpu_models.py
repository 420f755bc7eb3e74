"""What GPUs are called: from agents' inventories and traces to windows and judgements."""

from __future__ import annotations

import pytest

from eagle_eye.detectors.types import Series
from eagle_eye.schema.events import Event
from eagle_eye.server.engine.roster import CHARS_MAX, DEVICES_MAX, GpuModels
from tests.server.engine.frames import Fleet

H100, GB200 = "NVIDIA H100 80GB HBM3", "NVIDIA GB200"


def inventory(name: object) -> Event:
    return Event(1_000_000.0, "inventory", 0, {"uuid": "GPU-1", "model": name})


def test_names_come_once_each_with_the_series_they_belong_to() -> None:
    models = GpuModels()
    models.record_name("b", 0, H100)
    models.record_name("a", 1, GB200)
    models.record_name("b", 1, H100)
    found = models.named([Series("a", 0), Series("a", 1), Series("b", 0), Series("b", 1)])
    assert [found.models[place] for place in found.model_of] == ["", GB200, H100, H100]
    assert sorted(found.models) == ["", GB200, H100]
    assert found.of_node == {"a": (GB200,), "b": (H100,)}


def test_nothing_known_is_nothing() -> None:
    found = GpuModels().named([Series("a", 0)])
    assert (found.models, len(found.model_of), found.of_node) == ((), 0, {})


@pytest.mark.parametrize(
    ("device", "name"),
    [(0, ""), (0, None), (0, 7), (0, "x" * (CHARS_MAX + 1)), (0, "a\n"), (-1, H100), (DEVICES_MAX, H100)],
)
def test_what_is_no_plausible_name_is_left_out(device: int, name: object) -> None:
    models = GpuModels()
    models.record_name("a", device, name)
    assert models.changes == 0


def test_a_name_told_again_is_no_news() -> None:
    models = GpuModels()
    models.record_name("a", 0, H100)
    models.record_name("a", 0, H100)
    assert models.changes == 1


def test_a_window_and_a_judgement_have_the_names_that_agents_told() -> None:
    fleet = Fleet(nodes=2)
    fleet.events.append(("n1", inventory(GB200)))
    judgements = fleet.run(5)
    track = next(iter(fleet.engine.tracks()))
    window = fleet.engine.window(track, fleet.now_s, 0.0)
    assert {one.node: window.models[place] for one, place in zip(window.series, window.model_of, strict=True)} == {
        "n0": "",
        "n1": GB200,
    }
    assert judgements[-1].gpu_models == {"n1": (GB200,)}


def test_a_name_outlives_the_job_that_it_was_told_in() -> None:
    fleet = Fleet(nodes=1)
    fleet.events.append(("n0", inventory(GB200)))
    fleet.run(2)
    fleet.job = "another"
    fleet.run(2)
    windows = {track.job: fleet.engine.window(track, fleet.now_s, 0.0).models for track in fleet.engine.tracks()}
    assert windows["another"] == (GB200,)


def test_a_gpu_that_was_replaced_has_its_new_name() -> None:
    fleet = Fleet(nodes=1)
    for name in (H100, GB200):
        fleet.events.append(("n0", inventory(name)))
        judgements = fleet.run(2)
    assert judgements[-1].gpu_models == {"n0": (GB200,)}
