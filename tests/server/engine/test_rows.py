"""Rows of numbers taken together show detectors the same as the frames that they stand for, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle_eye.detectors.types import Window
from eagle_eye.schema.action import MemberRank
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Frame, Rank, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import encode_row, encode_template, template_id, template_of
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.settings import DetectionSettings
from eagle_eye.server.model.batch import ResolvedTemplate, Row, batches_of
from eagle_eye.server.model.records import Job

NOW = 1_000_000.0
NODES = 5
METRICS = ("gpu_power_watts", "gpu_ecc_corrected_total", "train_step", "train_step_seconds")


def frame(node: int, second: int, shape: int, *, silent: bool, moved: bool) -> Frame:
    """Return a node's frame; ``shape`` is which GPUs and metrics it has."""
    devices = range(2 if shape == 0 else 3)
    names = METRICS if shape < 2 else METRICS[:2]
    rows = {d: {name: float(1 + second + 10 * d + 100 * node + at) for at, name in enumerate(names)} for d in devices}
    blocks = [block(Scope.DEVICE, rows), block(Scope.NODE, {-1: {"node_cpu_utilization_ratio": second / 100}})]
    if shape == 1:
        blocks.append(block(Scope.LINK, {"mlx5_0": {"link_up": 1.0, "link_errors_total": float(second)}}))
    jobs = [f"job-{(node + (d if shape == 2 else 0)) % 2}" for d in range(2)]  # in the last shape, two on one node
    ranks = [Rank(jobs[d], 2 * node + d, 2 * NODES, d, attempt=int(moved), silent_s=2.0 * silent) for d in range(2)]
    return Frame(1, f"n{node}", "boot", "s", second + 1, NOW + second, 1.0, "0", None, ranks, blocks)


def row_of(each: Frame) -> Row:
    template = template_of(each)
    raw = encode_template(template)
    row = encode_row(each, template, template_id(raw))
    known = _resolved.setdefault(raw, ResolvedTemplate(template, ()))
    return Row(known, each.sequence, each.time_s, each.time_s + 0.1, 0.0, row)


_resolved: dict[bytes, ResolvedTemplate] = {}

moments = st.lists(
    st.tuples(st.integers(0, NODES - 1), st.integers(0, 20), st.integers(0, 2), st.booleans(), st.booleans()),
    max_size=60,
)


@given(moments, st.lists(st.integers(1, 20), max_size=10))
@example([(0, 0, 1, False, True), (0, 0, 0, False, True)], [])
@example([(0, 6, 1, False, False), (0, 11, 1, False, True), (0, 16, 1, False, False)], [0])
@settings(max_examples=60)
def test_windows_are_the_same(said: list[tuple[int, int, int, bool, bool]], cuts: list[int]) -> None:
    by_frames, by_rows = (Engine(DetectionSettings(), NOW) for _ in range(2))
    frames = [frame(node, second, shape, silent=silent, moved=moved) for node, second, shape, silent, moved in said]
    waiting: list[Row] = []
    for number, each in enumerate(frames):
        by_frames.observe(each, each.time_s + 0.1)
        if any(rank.silent_s for rank in each.ranks):  # such a row has a tail, and is sent as a frame
            by_rows.observe_rows(batches_of(waiting))
            waiting = []
            by_rows.observe(each, each.time_s + 0.1)
        else:
            waiting.append(row_of(each))
        if number in cuts:
            by_rows.observe_rows(batches_of(waiting))
            waiting = []
    by_rows.observe_rows(batches_of(waiting))
    assert _shown(by_rows) == _shown(by_frames)
    assert by_rows.drops()["stale_attempt"] == by_frames.drops()["stale_attempt"]


def word(which: int) -> Job:
    """Return what a launcher or scheduler says of a job: its ranks, or its nodes, or that it is over."""
    job, attempt, state, members, nodes = (
        ("job-0", 0, "running", (0, 1, 2), []),
        ("job-0", 1, "running", (0, 1), []),
        ("job-1", 0, "running", (), ["n0", "n3"]),
        ("job-1", 0, "completed", (), ["n0", "n3"]),
        ("job-1", 1, "running", (), ["n3", "n4"]),
    )[which]
    ranks = [MemberRank(rank, f"n{node}", 0) for rank, node in enumerate(members)]
    return Job(job=job, attempt=attempt, state=state, ranks=ranks, restart_owner="", updated_s=NOW, nodes=nodes)


def reported(node: int, second: int, shape: int, *, leaves: bool) -> Frame:
    """Return a node's frame; ``shape`` is whose it says that its one GPU is. The last node reports more often."""
    ranks = {0: [Rank("job-0", node, NODES, 0)], 1: [Rank("job-0", node, NODES, 0, attempt=1)]}
    row = {"gpu_power_watts": float(second + 100 * node), "train_step": float(second)}
    blocks = [block(Scope.DEVICE, {0: row}), block(Scope.NODE, {-1: {"node_cpu_utilization_ratio": second / 100}})]
    return Frame(
        version=1,
        node=f"n{node}",
        boot_id="boot",
        stream="s",
        sequence=second + 1,
        time_s=NOW + second,
        interval_s=0.5 if node == NODES - 1 else 1.0,
        agent_version="0",
        job="job-2" if shape == 3 else None,
        ranks=ranks.get(shape, []),
        blocks=blocks,
        events=[Event(NOW + second, "agent_stop")] if leaves else [],
    )


stories = st.lists(
    st.tuples(
        st.integers(0, NODES - 1), st.integers(0, 40), st.integers(0, 3), st.booleans(), st.none() | st.integers(0, 4)
    ),
    max_size=60,
)


@given(stories, st.lists(st.integers(1, 20), max_size=10))
@example([(0, 1, 0, False, None), (4, 1, 0, False, None)], [])
@settings(max_examples=60)
def test_windows_are_the_same_whoever_says_whose_the_rows_are(
    said: list[tuple[int, int, int, bool, int | None]], cuts: list[int]
) -> None:
    few_lines = DetectionSettings(window_s=16.0)  # rows of long ago are too late
    by_frames, by_rows = (Engine(few_lines, NOW) for _ in range(2))
    waiting: list[Row] = []
    for number, (node, second, shape, leaves, which) in enumerate(said):
        each = reported(node, second, shape, leaves=leaves)
        if leaves or which is not None or number in cuts:
            by_rows.observe_rows(batches_of(waiting))
            waiting = []
        for engine in (by_frames, by_rows) if which is not None else ():
            engine.observe_job(word(which or 0))
        by_frames.observe(each, each.time_s + 0.1)
        if leaves:
            by_rows.observe(each, each.time_s + 0.1)
        else:
            waiting.append(row_of(each))
    by_rows.observe_rows(batches_of(waiting))
    assert _shown(by_rows) == _shown(by_frames)
    assert by_rows.drops() == {**by_frames.drops(), "late_row": by_rows.drops()["late_row"]}


@pytest.mark.parametrize(("shape", "rows"), [(0, 2 + 1), (1, 3 + 1 + 1)])  # of GPUs, the node and its link
def test_rows_that_come_too_late_are_counted_one_by_one_however_they_come(shape: int, rows: int) -> None:
    by_frames, by_rows = (Engine(DetectionSettings(window_s=16.0), NOW) for _ in range(2))
    lately = [frame(node, second, shape, silent=False, moved=False) for second in range(2, 20) for node in range(NODES)]
    late = [frame(node, 0, shape, silent=False, moved=False) for node in range(NODES)]
    for frames in (lately, late):
        for each in frames:
            by_frames.observe(each, each.time_s + 0.1)
        by_rows.observe_rows(batches_of(map(row_of, frames)))
    assert by_frames.drops()["late_row"] == by_rows.drops()["late_row"] == NODES * rows


def _shown(engine: Engine) -> dict[str, dict[str, object]]:
    """Return what detectors would see of each job, in plain values, by names of series."""
    return {track.job: _plain(engine.window(track, NOW + 30, NOW)) for track in engine.tracks()}


def _plain(window: Window) -> dict[str, object]:
    def table(values: np.ndarray, names: list[str]) -> dict[str, list[float]]:
        return {name: np.nan_to_num(values[:, at], nan=-1.0).tolist() for at, name in enumerate(names)}

    series = [f"{one.node}/{one.device}/{one.rank}" for one in window.series]
    links = [f"{one.node}/{one.link}" for one in window.links]
    return {
        "attempt": window.attempt,
        "interval_s": window.interval_s,
        "heard_s": window.heard_s.tolist(),
        "farewell": window.farewell.tolist(),
        "times": window.times_s.tolist(),
        "series": series,
        "silent": window.silent_s.tolist(),
        "last_step": repr(window.last_step),
        "device": {name: table(values, series) for name, values in sorted(window.device.items())},
        "node": {name: table(values, list(window.nodes)) for name, values in sorted(window.node.items())},
        "link": {name: table(values, links) for name, values in sorted(window.link.items())},
    }
