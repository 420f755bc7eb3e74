"""Nodes that keep to one layout take a short way into a segment; it must lead where the general way leads."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Block, Frame, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.history import compactor as steady
from eagle_eye.server.history.compactor import Gatherer, GroupTables
from eagle_eye.server.history.embedded_history import EmbeddedHistory
from eagle_eye.server.history.segment_tables import FRAMES_SCHEMA, LINKS_SCHEMA
from tests.server.builders import NOW, frame
from tests.server.segments.kept import WITHIN_S, compact, opened, told
from tests.server.segments.test_rows_in_segments import as_rows

values = st.one_of(st.floats(width=32), st.sampled_from([math.nan, 1e300, 2.0**40 + 1, -0.0]))


@st.composite
def blocks(draw: st.DrawFn) -> list[Block]:
    """Return tables whose rows and metrics stand in any order."""
    found = []
    devices = draw(st.permutations(range(draw(st.integers(1, 3)))))
    metrics = draw(st.sampled_from([["gpu_power_watts"], ["gpu_power_watts", "gpu_ecc_corrected_total", "train_step"]]))
    found.append(_block(draw, Scope.DEVICE, list(devices), metrics))
    if draw(st.booleans()):
        found.append(_block(draw, Scope.NODE, [-1], ["node_blocked_tasks"]))
    if draw(st.booleans()):
        links = draw(st.permutations(["mlx5_10", "mlx5_2", "eth0"]))
        found.append(_block(draw, Scope.LINK, list(links), ["link_up", "link_errors_total"]))
    return found


def _block(draw: st.DrawFn, scope: Scope, keys: list[Any], metrics: list[str]) -> Block:
    return block(scope, {key: {metric: draw(values) for metric in metrics} for key in keys})


@st.composite
def fleets(draw: st.DrawFn) -> list[list[Frame]]:
    """Return each node's frames, all of one layout, which nodes may have in common."""
    layouts = [draw(blocks()), draw(blocks())]
    found = []
    for node in ("n1", "n2", "n3", "n4"):
        layout = draw(st.sampled_from(layouts))
        count = draw(st.sampled_from([1, 3, 3]))
        times = draw(st.permutations(range(count)))
        found.append(
            [
                frame(number + 1, node, NOW + at, blocks=[_anew(draw, one) for one in layout])
                for number, at in enumerate(times)
            ]
        )
    return found


def _anew(draw: st.DrawFn, one: Block) -> Block:
    count = len(one.keys) * len(one.metrics)
    numbers = np.array(draw(st.lists(values, min_size=count, max_size=count)), dtype="<f8")
    return Block(one.scope, one.keys, one.metrics, numbers.tobytes())


def tables(history: EmbeddedHistory) -> list[Any]:
    """Return what the journal becomes, table by table; two NaN are one."""
    connection = sqlite3.connect(history.journal.path)
    try:
        chunks = connection.execute("SELECT id, size FROM chunks ORDER BY id").fetchall()
        _, frames = Gatherer(connection).gather(0, [id_ for id_, _ in chunks], sum(size for _, size in chunks))
        found = GroupTables(connection).of(frames, 5)
    finally:
        connection.close()
    return [None if table is None else repr(table.to_pydict()) for table in found]


@given(fleets())
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_the_short_way_leads_where_the_general_way_leads(
    tmp_path_factory: pytest.TempPathFactory, sent: list[list[Frame]]
) -> None:
    with opened(tmp_path_factory.mktemp("history")) as history, pytest.MonkeyPatch.context() as patch:
        for frames in sent:
            history.submit(as_rows(frames, NOW + 10, 0.25)).result(WITHIN_S)
        short = tables(history)
        patch.setattr(steady, "constant_layout_runs", lambda *_: None)
        assert short == tables(history)


def test_runs_are_nodes_of_one_layout_and_length() -> None:
    node = np.array([0, 0, 1, 1, 2, 2, 2, 4])
    assert steady.constant_layout_runs(node, np.array([0, 0, 0, 0, 0, 0, 0, 1])) == [
        (0, 4, 2, 0),
        (4, 7, 1, 0),
        (7, 8, 1, 1),
    ]


def test_a_node_that_changed_its_layout_is_no_run() -> None:
    assert steady.constant_layout_runs(np.array([0, 0, 1]), np.array([0, 1, 1])) is None


def fleet(history: EmbeddedHistory) -> None:
    """Have a node's ten minutes: a gauge that is always another, parts of a hundred, and what never changes."""
    rng = np.random.default_rng(1)
    for first in range(0, 600, 50):
        frames = []
        for at in range(first, first + 50):
            power, used = rng.normal(600.0, 20.0, 8), rng.integers(95, 100, 8) / 100
            rows = {
                device: {
                    "gpu_power_watts": float(power[device]),
                    "gpu_utilization_ratio": float(used[device]),
                    "gpu_pcie_link_width": 16.0,
                }
                for device in range(8)
            }
            event = Event(NOW + at, "training_error", 0, {"text": f"{at} {'x' * 3_000}"})
            frames.append(frame(at + 1, "n1", NOW + at, blocks=[block(Scope.DEVICE, rows)], events=[event]))
        history.submit(as_rows(frames, NOW)).result(WITHIN_S)


def test_columns_are_written_as_their_values_suit(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        fleet(history)
        before = told(history)
        compact(history)
        assert told(history) == before  # also texts that are too many for one dictionary
        (folder,) = history.segment_store.folder.iterdir()
    group = pq.ParquetFile(folder / "samples.parquet").metadata.row_group(0)
    columns = {group.column(at).path_in_schema: group.column(at) for at in range(group.num_columns)}
    assert "RLE_DICTIONARY" in columns["gpu_utilization_ratio"].encodings
    assert "BYTE_STREAM_SPLIT" in columns["gpu_power_watts"].encodings
    assert columns["gpu_pcie_link_width"].total_compressed_size < 500
    assert columns["node"].statistics.max == "n1"


def test_readers_are_told_the_documented_types(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        history.submit(as_rows([frame(1, blocks=[block(Scope.LINK, {"a": {"link_up": 1.0}})])])).result(WITHIN_S)
        compact(history)
        (folder,) = history.segment_store.folder.iterdir()
    assert pq.read_schema(folder / "frames.parquet").equals(FRAMES_SCHEMA)
    assert pq.read_schema(folder / "links.parquet").equals(LINKS_SCHEMA)
