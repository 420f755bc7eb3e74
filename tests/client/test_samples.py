"""A job's part of the history as frames in chunks, from a real server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from eagle_eye.client import Client, DataLacking, Refused, Unreachable, UnreadableAnswer
from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.frame import Frame, Rank, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.recording import message
from tests.client.breaking_proxy import breaking
from tests.server.builders import NOW, FakeClock, Running, body, frame, running

SECONDS = 8
STEP = 2.0**24 + 1  # more than a float32 can count


def sent(node: str, second: int) -> Frame:
    """Return one second of a node: two devices, of which the second tells no power, the node and a link."""
    blocks = [
        block(Scope.DEVICE, {0: {"gpu_power_watts": 100.0 + second, "train_step": STEP}, 1: {"train_step": STEP}}),
        block(Scope.NODE, {-1: {"node_iowait_ratio": 0.0}}),
        block(Scope.LINK, {"mlx5_0": {"link_up": 1.0}}),
    ]
    return frame(second, node, NOW + second, blocks=blocks, ranks=[Rank("job", 0, 1, 0)])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("samples"), FakeClock(NOW + SECONDS)) as started:
        for node in ("n1", "n2"):
            started.send(body(*(sent(node, second) for second in range(1, SECONDS + 1)), sent_s=NOW + SECONDS))
        yield started


def samples(server: Running, *columns: str, rows_max: int = 100_000, url: str = "") -> list[pd.DataFrame]:
    client = Client(url or server.url)
    return list(client.samples("job", NOW, NOW + SECONDS, columns or None, rows_max=rows_max))


def test_each_row_that_was_sent_is_a_row(server: Running) -> None:
    (found,) = samples(server, "gpu_power_watts", "train_step")
    assert [str(kind) for kind in found.dtypes] == ["datetime64[us, UTC]", "category", "int16", "float32", "float64"]
    assert len(found) == 2 * SECONDS * 2
    row = found.iloc[0]
    assert (row["time"], row["node"]) == (pd.Timestamp(NOW + 1, unit="s", tz="UTC"), "n1")
    assert (row["device"], row["gpu_power_watts"], row["train_step"]) == (0, 101.0, STEP)
    assert found[found["device"] == 1]["gpu_power_watts"].isna().all()


def test_without_columns_there_is_every_metric_of_devices_and_nodes(server: Running) -> None:
    (found,) = samples(server)
    expected = {spec.name for spec in catalogue.METRICS if spec.scope is not Scope.LINK}
    assert set(found.columns) == {"time", "node", "device", *expected}
    assert len(found) == 2 * SECONDS * 3
    of_nodes = found[found["device"] == -1]
    assert set(of_nodes["node_iowait_ratio"]) == {0.0}
    assert of_nodes["gpu_power_watts"].isna().all()


def test_links_have_frames_of_their_own(server: Running) -> None:
    (found,) = samples(server, "link_up")
    assert list(found.columns) == ["time", "node", "link", "link_up"]
    assert set(found["link"]) == {"mlx5_0"}


@pytest.mark.parametrize("rows_max", [1, 2, 3, 7, 31, 32, 1_000])
def test_chunks_are_no_longer_than_asked_for_and_together_the_whole(server: Running, rows_max: int) -> None:
    chunks = samples(server, "gpu_power_watts", rows_max=rows_max)
    assert all(1 <= len(chunk) <= max(rows_max, 2) for chunk in chunks)  # one message has two rows
    assert len(chunks) >= 32 / max(rows_max, 2)
    (whole,) = samples(server, "gpu_power_watts")
    joined = pd.concat(chunks, ignore_index=True)
    joined["node"] = joined["node"].astype("category")
    pd.testing.assert_frame_equal(joined, whole)


def test_a_job_that_nobody_knows_is_no_empty_history(server: Running) -> None:
    client = Client(server.url)
    with pytest.raises(Refused, match="nobody") as refused:
        list(client.samples("nobody", NOW, NOW + SECONDS))
    assert refused.value.status == 404
    assert list(client.samples("job", NOW - 100, NOW - 50)) == []


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        (["gpu_powr_watts"], "'gpu_powr_watts' is no metric .*did you mean gpu_power_watts"),
        (["link_up", "gpu_power_watts"], "link_up is of links; ask for metrics of links in a call of their own"),
        ("gpu_power_watts", "expected a list of metrics"),
        ([], "expected a list of metrics"),
    ],
)
def test_columns_that_are_none_are_named_at_once(server: Running, columns: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Client(server.url).samples("job", NOW, NOW + 1, columns)
    with pytest.raises(ValueError, match="rows_max: expected at least 1"):
        Client(server.url).samples("job", NOW, NOW + 1, rows_max=0)


def test_a_history_that_breaks_off_does_not_end(server: Running) -> None:
    with breaking(server.url) as proxy:
        proxy.answer_bytes = 3_000
        chunks = Client(proxy.url).samples("job", NOW, NOW + SECONDS, ["gpu_power_watts"], rows_max=2)
        next(chunks)
        with pytest.raises(Unreachable):
            list(chunks)


def test_what_is_lacking_is_a_warning_and_nonsense_no_recording(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_eye.server.api import metric_history
    from eagle_eye.server.history.history import UnreadableRange

    history = server.dispatcher.services.history
    monkeypatch.setattr(history, "gaps", lambda *_a, **_k: [UnreadableRange(NOW, NOW + 2, "a segment is damaged")])
    lacking = "2023-11-14 22:13:20.00:00 to 2023-11-14 22:13:22.00:00: a segment is damaged"
    with pytest.warns(DataLacking, match=lacking) as told:
        assert sum(map(len, Client(server.url).samples("job", NOW, NOW + SECONDS))) == 2 * SECONDS * 3
    assert told[0].filename == __file__
    for nonsense in (message(b""), message(b"\xc1") + message(b""), message(b"\x81\xa7version\x09")):
        monkeypatch.setattr(metric_history, "stream", lambda *_a, said=nonsense, **_k: iter([said]))
        with pytest.raises(UnreadableAnswer):
            samples(server)


def test_a_metric_that_was_not_finite_is_infinite(tmp_path: Path) -> None:
    with running(tmp_path, FakeClock(NOW + 1)) as server:
        loss = block(Scope.DEVICE, {0: {"train_loss": math.inf}})
        server.send(body(frame(1, time_s=NOW + 1, blocks=[loss]), sent_s=NOW + 1))
        (found,) = samples(server, "train_loss")
    assert np.isposinf(found["train_loss"]).all()
