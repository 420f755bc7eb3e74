"""Simulated jobs with a rank that computes longer: a slow node leaves, one with more work stays."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from eagle_eye.server.backtest.run import Backtest, VerdictLine
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import simulate
from eagle_eye.simulator.writer import write


def lines(folder: Path, *without: str, **scenario: object) -> tuple[list[VerdictLine], tuple[str, ...], float]:
    """Return what is said of a run without the metrics of these prefixes, its culprits and the onset."""
    fields = {"nodes": 6, "gpus": 4, "minutes": 6.0, "step_s": 2.0, "seed": 5, "habits": False, **scenario}
    run = simulate(Scenario(**fields))  # type: ignore[arg-type]
    seen = {name: values for name, values in run.device.items() if not name.startswith(("#", *without))}
    write(dataclasses.replace(run, device=seen), folder / "trace")
    said = list(Backtest(Trace(folder / "trace"), DetectionSettings(), PolicySettings()).run())
    label = run.labels[0] if run.labels else None
    return said, label.nodes if label else (), label.start if label else run.start


@pytest.mark.slow
@pytest.mark.parametrize("without", [("nccl_",), ("nccl_", "gpu_")])
def test_a_node_that_is_slow_with_nothing_else_wrong_leaves_within_two_minutes(
    tmp_path: Path, without: tuple[str, ...]
) -> None:
    said, culprits, onset_s = lines(tmp_path, *without, fault="straggler", strength="strong", variant="one")
    (out,) = [line for line in said if line.action == "exclude_node"]
    assert (out.node,) == culprits
    assert out.time - onset_s <= 120


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hot_expert", "long_documents"])
@pytest.mark.parametrize("without", [("nccl_",), ()])
def test_a_node_that_was_given_more_work_stays(tmp_path: Path, fault: str, without: tuple[str, ...]) -> None:
    said, _, _ = lines(tmp_path, *without, fault=fault)
    assert {line.action for line in said} <= {"notify", "none"}
