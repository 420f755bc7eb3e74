"""The history as it reaches a store that forgives nothing, whatever happens on the way."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import httpx
import msgspec
import pytest

from eagle_eye.schema.frame import encode_frame
from eagle_eye.server.history.embedded_history import HISTORY_FILE, EmbeddedHistory
from eagle_eye.server.history.remote_store import SenderReport
from eagle_eye.server.history.segment_tables import FACTS_FILE
from tests.server.builders import NOW
from tests.server.remote_store.strict_store import StrictStore, bring, keep, second
from tests.server.segments.kept import WITHIN_S, batch, compact, opened


class Killed(BaseException):
    """The process ended here."""


def refused(said: list[SenderReport]) -> int:
    return sum(sum(reported.refused.values()) for reported in said)


def taken(said: list[SenderReport]) -> int:
    return sum(reported.taken for reported in said)


def test_every_value_arrives_under_its_name(tmp_path: Path) -> None:
    store = StrictStore()
    with opened(tmp_path) as history:
        keep(history, *(second(at) for at in range(3)))
        compact(history)
        said = bring(tmp_path, store, external_labels={"cluster": "a"})
    times_s = [NOW + at for at in range(3)]
    assert store.samples("gpu_power_watts", device="0", node="n1", cluster="a") == list(
        zip(times_s, (300.1, 301.1, 302.1), strict=True)
    )
    assert store.samples("train_step", device="1", job="job")[0][1] == 2.0**40
    assert store.samples("node_cpu_utilization_ratio", job="job") == [(time_s, 0.83) for time_s in times_s]
    assert [value for _, value in store.samples("link_up", link="mlx5_0")] == [1.0] * 3
    assert {key for key in store.series if ("device", "0") in key and "job" in dict(key)} == set()
    assert (taken(said), refused(said)) == (3 * 6, 0)


def test_of_an_interval_the_last_value_is_sent(tmp_path: Path) -> None:
    store = StrictStore()
    with opened(tmp_path) as history:
        keep(history, *(second(at) for at in range(12)))
        compact(history)
        bring(tmp_path, store, interval_s=5.0)
    assert store.samples("gpu_power_watts", device="0") == [(NOW + 4, 304.1), (NOW + 9, 309.1), (NOW + 11, 311.1)]


def test_only_the_chosen_metrics_are_sent(tmp_path: Path) -> None:
    store = StrictStore()
    with opened(tmp_path) as history:
        keep(history, second(0))
        compact(history)
        bring(tmp_path, store, metrics=("gpu_*", "eagle_eye_link_up"))
    assert {dict(key)["__name__"] for key in store.series} == {"eagle_eye_gpu_power_watts", "eagle_eye_link_up"}


def test_what_was_sent_is_not_sent_again(tmp_path: Path) -> None:
    store = StrictStore()
    with opened(tmp_path) as history:
        for begin in (0, 10):
            keep(history, *(second(begin + at) for at in range(3)))
            compact(history)
            bring(tmp_path, store)
        requests = store.requests
        assert bring(tmp_path, store) == []
    assert store.requests == requests
    assert len(store.samples("gpu_power_watts", device="0")) == 6


@pytest.mark.parametrize("answered", [False, True])
def test_killed_at_any_request_it_loses_nothing_and_breaks_no_order(tmp_path: Path, answered: bool) -> None:
    store = StrictStore()

    def die(number: int) -> None:
        if number % 3 == 0:
            raise Killed

    if answered:
        store.after = die  # the store has taken the request, and nobody heard of it
    else:
        store.before = die
    said: list[SenderReport] = []
    deaths = 0
    with opened(tmp_path) as history:
        for begin in (0, 4):
            keep(history, *(second(begin + at, node) for at in range(4) for node in ("n1", "n2")))
            compact(history)
        while True:
            try:
                said = bring(tmp_path, store, request_samples_max=100)
                break
            except Killed:
                deaths += 1
    assert deaths >= 3
    assert refused(said) == 0
    for node in ("n1", "n2"):
        assert [time_s - NOW for time_s, _ in store.samples("gpu_power_watts", node=node, device="0")] == list(range(8))


def test_what_the_store_will_not_have_costs_the_others_nothing(tmp_path: Path) -> None:
    store = StrictStore()
    with opened(tmp_path) as history:
        keep(history, *(second(at, f"n{node}") for node in range(8) for at in (0,)))
        compact(history)
        ahead = tuple(sorted({"__name__": "eagle_eye_link_up", "node": "n3", "link": "mlx5_0", "job": "job"}.items()))
        store.series[ahead] = [(NOW + 100, 1.0)]
        said = bring(tmp_path, store, request_samples_max=100)
    assert (taken(said), [reported.refused for reported in said if reported.refused]) == (
        8 * 6 - 1,
        [{"out_of_order": 1}],
    )
    assert store.samples("gpu_power_watts", node="n3", device="0") == [(NOW, 300.1)]


def test_late_frames_are_offered_after_those_that_were_in_time(tmp_path: Path) -> None:
    store = StrictStore()
    with opened(tmp_path) as history:
        keep(history, *(second(at) for at in range(30, 33)))
        late = [encode_frame(second(at)) for at in range(3)]
        history.submit(batch(late, NOW + 33)).result(WITHIN_S)
        compact(history)
        said = bring(tmp_path, store)
    assert [time_s - NOW for time_s, _ in store.samples("gpu_power_watts", device="0")] == [30, 31, 32]
    assert (taken(said), refused(said)) == (18, 18)


def test_a_segment_that_retention_took_is_counted(tmp_path: Path) -> None:
    store = StrictStore()
    with opened(tmp_path) as history:
        for at in (0, 1, 2):
            keep(history, second(10 * at))
            compact(history)
            if at == 0:
                bring(tmp_path, store)
        with sqlite3.connect(tmp_path / HISTORY_FILE) as connection:
            connection.execute("DELETE FROM segments WHERE id = 2")
        said = bring(tmp_path, store)
    assert [reported.lost for reported in said if reported.lost] == [{"retired": 1}]
    assert [time_s - NOW for time_s, _ in store.samples("gpu_power_watts", device="0")] == [0, 20]


def test_a_broken_segment_is_counted_and_passed_over(tmp_path: Path) -> None:
    store = StrictStore()
    with opened(tmp_path) as history:
        for at in (0, 1):
            keep(history, second(10 * at))
            compact(history)
        first = min(history.segment_store.folder.iterdir(), key=lambda path: path.name)
        (first / "samples.parquet").write_bytes(b"PAR1 this is none PAR1")
        said = bring(tmp_path, store)
    assert [reported.lost for reported in said if reported.lost] == [{"broken": 1}]
    assert [time_s - NOW for time_s, _ in store.samples("gpu_power_watts", device="0")] == [10]


def merge(history: EmbeddedHistory, tmp_path: Path, id_: int, *sources: str) -> None:
    """Have the first segment stand for those that it was merged of."""
    folder = min(history.segment_store.folder.iterdir(), key=lambda path: path.name)
    facts = msgspec.json.decode((folder / FACTS_FILE).read_bytes())
    (folder / FACTS_FILE).write_bytes(msgspec.json.encode({**facts, "name": "merged", "sources": sources}))
    folder.rename(folder.with_name("merged"))
    with sqlite3.connect(tmp_path / HISTORY_FILE) as connection:
        connection.execute("DELETE FROM segments WHERE id < ?", (id_,))
        connection.execute(
            "INSERT OR REPLACE INTO segments SELECT ?, 'merged', 'n1', 'n1', 0, 0, 0, 0, 0, NULL", (id_,)
        )


def test_what_segments_were_merged_of_is_not_sent_twice(tmp_path: Path) -> None:
    store = StrictStore()
    with opened(tmp_path) as history:
        keep(history, second(0))
        compact(history)
        bring(tmp_path, store)
        requests = store.requests
        merge(history, tmp_path, 2, next(history.segment_store.folder.iterdir()).name)
        assert bring(tmp_path, store) == []
    assert store.requests == requests


def test_what_was_merged_before_it_was_sent_is_sent_and_nothing_is_missed(tmp_path: Path) -> None:
    store = StrictStore()
    with opened(tmp_path) as history:
        for at in (0, 10, 20):
            keep(history, second(at))
            compact(history)
            if at == 0:
                bring(tmp_path, store)
                shutil.rmtree(next(history.segment_store.folder.iterdir()))
        merge(history, tmp_path, 3, "one", "other")
        said = bring(tmp_path, store)
    assert [reported.lost for reported in said if reported.lost] == []
    assert [time_s - NOW for time_s, _ in store.samples("gpu_power_watts", device="0")] == [0, 10]


def test_another_store_gets_all_that_the_history_has(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        keep(history, second(0))
        compact(history)
        bring(tmp_path, StrictStore())
        other = StrictStore()
        bring(tmp_path, other, url="http://other/api/v1/write")
    assert len(other.series) == 6


def test_a_frame_that_columns_cannot_hold_is_sent_too(tmp_path: Path) -> None:
    raw = encode_frame(second(0))
    twice = msgspec.msgpack.decode(raw)
    twice["blocks"].append({**twice["blocks"][1], "metrics": ["node_cpu_steal_ratio"]})
    store = StrictStore()
    with opened(tmp_path) as history:
        history.submit(batch([msgspec.msgpack.encode(twice)], NOW + 0.1)).result(WITHIN_S)
        compact(history)
        bring(tmp_path, store)
    assert [time_s for time_s, _ in store.samples("node_cpu_steal_ratio", node="n1", job="job")] == [NOW]
    assert [time_s for time_s, _ in store.samples("gpu_power_watts", device="0")] == [NOW]


def test_a_store_that_is_away_is_waited_for(tmp_path: Path) -> None:
    store = StrictStore()
    store.before = lambda number: httpx.Response(503, headers={"Retry-After": "1"}) if number < 4 else None
    with opened(tmp_path) as history:
        keep(history, second(0))
        compact(history)
        assert taken(bring(tmp_path, store)) == 6
