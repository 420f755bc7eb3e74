"""Nodes that are long gone leave nothing in memory, and those of jobs stay however long they are silent."""

from __future__ import annotations

from eagle_eye.schema.events import Event
from eagle_eye.server.engine.engine import FORGET_S, Engine, NodeTracks
from tests.server.builders import frame
from tests.server.engine.frames import SETTINGS, START_S

HOUR_S = 3_600.0


def run(engine: Engine, hours: int, *nodes: str, from_s: float = START_S, job: str = "", model: str = "") -> float:
    """Have the nodes speak every hour, and the engine look as often; return the time of its last look."""
    for hour in range(hours):
        now_s = from_s + hour * HOUR_S
        for node in nodes:
            events = [Event(now_s, "inventory", 0, {"model": model})] if model else []
            engine.observe(frame(hour + 1, node, now_s, job=job or None, ranks=[], events=events), now_s)
        engine.tick(now_s)
    return from_s + hours * HOUR_S


def test_a_node_that_is_long_gone_is_forgotten_with_its_gpus() -> None:
    engine = Engine(SETTINGS, watching_since_s=START_S)
    now_s = run(engine, 2, "gone", "here", model="NVIDIA H100 80GB HBM3")
    changes = engine.gpu_models.changes
    run(engine, 50, "here", from_s=now_s)
    assert (engine.node_count, engine.gpu_models.changes) == (1, changes + 1)


def test_a_node_that_a_job_has_stays_however_long_it_is_silent() -> None:
    engine = Engine(SETTINGS, watching_since_s=START_S)
    now_s = run(engine, 2, "n0", "n1", job="train", model="NVIDIA H100 80GB HBM3")
    run(engine, 75, "n0", from_s=now_s, job="train")
    (track,) = engine.tracks()
    assert set(track.nodes) == {"n0", "n1"}
    assert engine.tick(now_s + 75 * HOUR_S)[0].gpu_models.keys() == {"n0", "n1"}
    assert engine.node_count == 2


def test_gpus_known_from_before_the_start_wait_a_day_for_their_node() -> None:
    engine = Engine(SETTINGS, watching_since_s=START_S)
    engine.gpu_models.record_name("late", 0, "NVIDIA H100 80GB HBM3")
    now_s = run(engine, 20, "here")
    assert engine.gpu_models.changes == 1
    run(engine, 30, "here", from_s=now_s)
    assert engine.gpu_models.changes == 2


def test_places_are_given_again_and_nothing_of_the_one_before_stays() -> None:
    tracks = NodeTracks()
    assert not tracks.forget_gone(0.0, list)
    tracks.hear(tracks.meet("old", 0.0, 5.0), 0.0, farewell=True)
    place = tracks.meet("kept", 0.0, 1.0)
    assert tracks.forget_gone(2 * FORGET_S, lambda: ["kept"])
    new = tracks.place("new")
    assert ("old" in tracks, new, tracks.place("kept"), tracks.place("newer")) == (False, 0, place, 2)
    assert (tracks.interval_s("new"), tracks.farewell(tracks.places(["new"])).tolist()) == (None, [False])


def test_however_many_nodes_come_and_go_there_are_no_more_places_than_there_were_nodes_at_once() -> None:
    tracks = NodeTracks()
    for day in range(100):
        now_s = 2 * day * FORGET_S
        places = [tracks.meet(f"n{day}-{at}", now_s, 1.0) for at in range(10)]
        assert max(places) < 20
        tracks.forget_gone(now_s, list)
