"""The planning benchmark, once at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_all_of_it_is_measured_and_reached(tmp_path: Path) -> None:
    out = tmp_path / "planning.json"
    command = [sys.executable, "-m", "benchmarks.planning", "--json", "--out", str(out)]
    command += ["--layers", "12", "--nodes", "6", "--cases", "5"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    reported = json.loads(ran.stdout)
    assert reported == json.loads(out.read_text())
    assert [each["nodes_min"] for each in reported["speed"]] == [1, 1, 3]
    assert reported["step_times"]["deviation_max"] < 1e-9
    assert reported["exhaustive"]["cuts_slower_max"] < 1e-6
