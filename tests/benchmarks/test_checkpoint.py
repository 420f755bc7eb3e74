"""The checkpoint benchmark: its own arithmetic, and all of it once at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.checkpoint import capture, peers, restore
from benchmarks.checkpoint.simulation import PAPER, STEP_S, Way, effective

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "--gib": 0.002, "--tensors": 4, "--step": 0.01, "--width": 32, "--blocks": 1, "--rounds": 1, "--block-steps": 2,
    "--days": 5,
}  # fmt: skip


@pytest.mark.slow
def test_every_part_is_measured_and_what_was_restored_is_right(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--json", "--out", str(out)]
    command += [str(word) for flag in TINY.items() for word in flag]
    command += ["--parts", "capture", "restore", "simulation"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    reported = json.loads(ran.stdout)
    assert reported == json.loads(out.read_text())
    assert reported["restore"]["figures"]["right"]
    assert all(one["blocked_ms"]["median"] > 0 for one in reported["capture"]["figures"].values())
    assert "Eagle Eye" in reported["simulation"]["figures"]["effective_time_ratio"]


def rank(steps_s: dict[str, float], blocked_s: float) -> dict[str, Any]:
    one: dict[str, Any] = {mode: {"steps_s": [steps_s[mode]] * 4, "blocked_s": []} for mode in capture.MODES}
    one["each"]["blocked_s"] = [(step, blocked_s, blocked_s / 2) for step in range(4)]
    return {
        "rounds": {"busy": [one, one]}, "memcpy_cpu_s": [0.1, 0.1], "shard_bytes": 10**9, "skipped": 0, "tensors": 1,
        "behind_steps": {"busy": [1]},
    }  # fmt: skip


def test_of_two_ranks_the_slower_one_is_what_a_capture_blocks() -> None:
    steps_s = {"none": 0.5, "each": 0.6, "tenth": 0.5}
    found = capture.figures([rank(steps_s, 0.01), rank(steps_s, 0.02)], "busy")
    assert found["blocked_ms_per_gb"] == 20.0
    assert found["blocked_share_each_step"] == 0.04
    assert found["blocked_share_each_tenth"] == 0.004
    assert found["longer_steps_each"]["median"] == pytest.approx(0.2)


def test_a_neighbours_memory_is_measured_at_the_rank_whose_node_was_lost() -> None:
    plan = restore.RestorePlan(rank_bytes=10**9, tensors=1, rounds=1, share_bytes_per_s=2e8, seed=1)
    times = {"own": [0.5], "neighbour": [0.1], "storage": [2.0], "share": [5.0]}
    one = {"load_s": times, "restore_s": times, "memcpy_s": [0.25], "tcp_s": [0.0], "right": True}
    other = {**one, "load_s": {**times, "neighbour": [1.0], "own": [0.4]}, "tcp_s": [0.5]}
    found = restore.figures([one, other], plan)
    assert found["own_of_memcpy"]["median"] == 0.5
    assert found["neighbour_of_tcp"]["median"] == 0.5
    assert found["times_sooner"]["neighbour"] == {"storage": 2.0, "share": 5.0}


def test_who_is_not_installed_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"steps_s": [0.5], "blocked_s": [0.01], "behind_steps": [1], "survives": "a process"}
    monkeypatch.setattr(peers, "_ranks", lambda plan, _: [dict.fromkeys(plan.ways, one)])
    found = peers.measure(peers.PeersPlan(width=1, blocks=1, step_s=0.5, steps=1, rounds=1, seed=1), tmp_path)
    assert found["dlrover 0.6.1 flash checkpoint"] == {"error": "not installed"}
    assert found["Eagle Eye"]["blocked_ms"]["p50"] == 10.0


def test_geminis_part_of_the_time_on_a_thousand_nodes_is_the_papers() -> None:
    assert effective(PAPER["Gemini"], 1_000, 0.0, 200.0, 1) == pytest.approx(0.91, abs=0.01)


def test_what_costs_less_trains_more() -> None:
    way = PAPER["Gemini"]
    blocking = msgspec.structs.replace(way, blocked_s=0.1 * STEP_S)
    assert effective(blocking, 128, 0.5, 200.0, 1) < effective(way, 128, 0.5, 200.0, 1)
    assert effective(PAPER["Strawman"], 512, 0.5, 200.0, 1) < effective(PAPER["HighFreq"], 512, 0.5, 200.0, 1)


def test_without_failures_all_but_the_blocked_time_trains() -> None:
    way = Way(every_s=9.0, blocked_s=1.0, complete_s=0.0, restart_s=(0.0, 0.0), retrieve_s=(0.0, 0.0))
    assert effective(way, 2, 0.0, 100_000.0, 1) == pytest.approx(0.9, abs=1e-3)
