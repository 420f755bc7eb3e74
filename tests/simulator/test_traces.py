"""Every name writes a valid trace with the right labels; profiles keep what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from eagle_eye.schema.events import BY_KIND
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.simulator.names import FAULTS, SITUATIONS
from eagle_eye.simulator.scenario import Scenario, WrongScenario
from eagle_eye.simulator.simulate import Recording, simulate
from eagle_eye.simulator.sites import (
    GPU_EXPORTER,
    NODE_EXPORTER,
    PROFILES,
    Scraping,
    of_exporter,
    profile,
    scraping,
    visible_faults,
)
from eagle_eye.simulator.writer import FolderTaken, write
from tests.simulator.builders import SMALL, recorded

# The action table of the contract; slowness is excluded where it costs more than a restart.
EXPECTED = {
    "gpu_lost": {"exclude"},
    "gpu_memory_error": {"exclude", "restart"},
    "gpu_hang": {"exclude"},
    "hang": {"exclude", "restart"},
    "network_hang": {"exclude"},
    "node_unreachable": {"exclude"},
    "silent_data_corruption": {"exclude"},
    "straggler": {"exclude"},
    "thermal_throttle": {"exclude"},
    "power_throttle": {"exclude"},
    "pcie_degraded": {"exclude"},
    "nic_degraded": {"exclude"},
    "nvlink_degraded": {"exclude"},
    "cpu_contention": {"exclude"},
    "process_crash": {"restart"},
    "out_of_memory": {"restart"},
    "loss_not_finite": {"restart"},
    "loss_divergence": {"restart"},
    "loss_spike": {"job"},
    "switch_down": {"job"},
    "network_congestion": {"job"},
    "storage_stall": {"job"},
    "workload_imbalance": {"job"},
    "throughput_drop": {"job"},
    "recurrent_node": {"exclude"},
}


def test_every_fault_of_the_contract_is_there() -> None:
    assert set(FAULTS) == {"none", *EXPECTED}


@pytest.mark.parametrize("fault", sorted(EXPECTED))
def test_every_fault_writes_a_trace_with_its_label(fault: str, tmp_path: Path) -> None:
    write(recorded(fault), tmp_path)
    trace = Trace(tmp_path)
    labels = trace.labels()
    assert labels
    last = labels[-1]
    assert last.fault == fault
    assert last.expect in EXPECTED[fault]
    assert trace.header.start < last.start < last.end <= trace.header.end
    assert set(last.nodes) <= {node.node for node in trace.header.nodes}
    assert last.nodes or last.expect != "exclude"
    frames = [step.frame for step in trace.steps() if step.frame]
    assert len(frames) > 600
    assert all(event.kind in BY_KIND for frame in frames for event in frame.events)


@pytest.mark.parametrize("situation", sorted(SITUATIONS))
def test_every_situation_writes_a_trace_without_labels(situation: str, tmp_path: Path) -> None:
    write(recorded(situation), tmp_path)
    trace = Trace(tmp_path)
    assert trace.labels() == []
    assert sum(step.frame is not None for step in trace.steps()) > 300


@pytest.mark.parametrize("fault", ["none", "straggler", "node_unreachable"])
def test_the_same_seed_gives_the_same_bytes(fault: str, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(simulate(Scenario(**(SMALL | {"fault": fault}))), tmp_path / folder)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_fault_and_its_absence_share_all_noise_before_the_onset() -> None:
    faulty, healthy = recorded("straggler"), recorded("none")
    rows = int(faulty.labels[0].start - faulty.start) - 5
    assert np.array_equal(
        faulty.device["train_compute_seconds"][:rows], healthy.device["train_compute_seconds"][:rows], equal_nan=True
    )


@pytest.mark.parametrize("name", [p.name for p in PROFILES])
def test_profiles_keep_what_they_say_and_no_more(name: str, tmp_path: Path) -> None:
    write(recorded("process_crash"), tmp_path, name)
    site = profile(name)
    columns = set(pq.read_schema(tmp_path / "samples.parquet").names) - {"time", "node", "device"}
    assert columns
    assert columns <= site.metrics
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {event["kind"] for event in events} <= site.events
    assert Trace(tmp_path).labels()


def test_profiles_leave_out_what_their_instruments_lack() -> None:
    assert not [m for m in profile("no_hook").metrics if m.startswith(("train_", "nccl_"))]
    assert "gpu_tensor_active_ratio" not in profile("no_profiling").metrics
    assert not [m for m in profile("remote_write").metrics if "throttle" in m or "ecc" in m or "pfc" in m]


def exported(folder: Path, seed: int = 7) -> tuple[Recording, list[dict[str, Any]]]:
    """Return a healthy job and the rows that a Prometheus has of it."""
    recording = recorded("none", seed=seed)
    write(recording, folder, "remote_write")
    return recording, pq.read_table(folder / "samples.parquet").to_pylist()


def read_at(rows: list[dict[str, Any]], node: str, device: int) -> list[float]:
    """Return when a node's exporter of hosts (device -1) or GPUs was read."""
    return sorted(row["time"] for row in rows if row["node"] == node and row["device"] == device)


def test_a_prometheus_knows_nodes_and_no_ranks(tmp_path: Path) -> None:
    exported(tmp_path)
    assert "ranks" not in json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_exporter_is_scraped_at_its_own_interval(seed: int, tmp_path: Path) -> None:
    recording, rows = exported(tmp_path, seed)
    found = {}
    for exporter, device in ((GPU_EXPORTER, 0), (NODE_EXPORTER, -1)):
        gaps_s = np.diff(read_at(rows, recording.layout.names[0], device))
        found[exporter] = float(np.median(gaps_s))
        assert found[exporter] == pytest.approx(scraping(seed, exporter).interval_s, abs=1.0)
    assert json.loads((tmp_path / "trace.json").read_text())["interval_s"] == min(
        scraping(seed, exporter).interval_s for exporter in found
    )


def test_exporters_of_one_node_are_scraped_at_different_moments(tmp_path: Path) -> None:
    recording, rows = exported(tmp_path)
    gpus, host = (read_at(rows, recording.layout.names[0], device) for device in (0, -1))
    assert not set(gpus) & set(host)


def test_a_scrape_may_be_missed_by_one_exporter_alone() -> None:
    how = Scraping(15.0, 0.0, missed_ratio=0.3, restarts_per_day=0.0, restart_s=0.0)
    recording = recorded("none")
    gpus, hosts = (of_exporter(recording, exporter, how).here for exporter in (GPU_EXPORTER, NODE_EXPORTER))
    assert (gpus != hosts).any()


def test_between_two_scrapes_a_rate_is_the_mean_and_a_level_the_last(tmp_path: Path) -> None:
    recording, rows = exported(tmp_path)
    name = recording.layout.names[0]
    times = read_at(rows, name, -1)
    last = {row["time"]: row for row in rows if row["node"] == name and row["device"] == -1}[times[2]]
    begin, end = np.searchsorted(recording.true_time[:, 0], times[1:3], side="right")
    moved = recording.node["node_rdma_tx_bytes_per_second"][begin:end, 0]
    assert last["node_rdma_tx_bytes_per_second"] == pytest.approx(float(moved.mean()), rel=1e-5)
    used = float(recording.node["node_memory_used_ratio"][end - 1, 0])
    assert last["node_memory_used_ratio"] == pytest.approx(used, rel=1e-5)


def test_without_the_hook_nobody_knows_the_parallel_groups(tmp_path: Path) -> None:
    write(recorded("none"), tmp_path, "no_hook")
    ranks = json.loads((tmp_path / "trace.json").read_text())["ranks"]
    assert set(ranks[0]) == {"rank", "node", "device"}


def test_better_instruments_show_more() -> None:
    full, blind = set(visible_faults("full")), set(visible_faults("remote_write"))
    assert full == set(EXPECTED)
    assert blind < set(visible_faults("no_hook")) < full


def test_another_attempt_is_in_the_membership(tmp_path: Path) -> None:
    write(recorded("recurrent_node"), tmp_path)
    lines = (tmp_path / "membership.jsonl").read_text().splitlines()
    assert [json.loads(line)["attempt"] for line in lines] == [1, 2]
    labels = Trace(tmp_path).labels() or []
    assert [(label.fault, label.expect) for label in labels] == [
        ("process_crash", "restart"),
        ("recurrent_node", "exclude"),
    ]
    assert labels[0].nodes == labels[1].nodes


def test_a_trace_is_written_over_a_trace_if_that_is_asked_for_and_over_nothing_else(tmp_path: Path) -> None:
    write(recorded("recurrent_node"), tmp_path / "trace")
    with pytest.raises(FolderTaken, match=r"holds a trace; .* --overwrite"):
        write(recorded("none"), tmp_path / "trace")
    assert (tmp_path / "trace" / "membership.jsonl").exists()
    write(recorded("none"), tmp_path / "trace", overwrite=True)
    assert not (tmp_path / "trace" / "membership.jsonl").exists()
    (tmp_path / "trace" / "thesis.tex").write_text("years of work")
    with pytest.raises(FolderTaken, match=r"thesis\.tex"):
        write(recorded("none"), tmp_path / "trace", overwrite=True)
    with pytest.raises(FolderTaken, match="is a file"):
        write(recorded("none"), tmp_path / "trace" / "thesis.tex")


def test_a_fault_may_happen_in_the_midst_of_a_situation() -> None:
    recording = recorded("straggler", background="packed_sequences", strength="strong")
    assert [label.fault for label in recording.labels] == ["straggler"]
    assert np.nanstd(recording.device["train_compute_seconds"][:50]) > 0.03


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fault": "gremlins"}, "gremlins"),
        ({"background": "hang"}, "expected one of"),
        ({"background": "scancel"}, "expected one of"),
        ({"fault": "hang", "variant": "odd"}, "late, symmetric"),
        ({"strength": "mighty"}, "faint, weak, medium, strong"),
        ({"nodes": 0}, "nodes is 0"),
        ({"interval_s": 120.0}, "ask for more"),
        ({"nodes": 4096, "minutes": 10_000.0}, "do not fit"),
    ],
)
def test_impossible_scenarios_are_refused_with_a_reason(changes: dict[str, object], message: str) -> None:
    with pytest.raises(WrongScenario, match=message):
        simulate(Scenario(**changes))  # type: ignore[arg-type]
