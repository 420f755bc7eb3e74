"""What a real Slurm does to jobs and nodes: the tests that have one, run as such, and what came of each."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.innocence.examine import Examined

ROOT = Path(__file__).parents[2]
WITHIN_S = 1200.0
# By file: words of which a test's name must have one.
TESTS = {
    "tests/server/job_sources/test_real_slurm.py": "cancellation or slurm_ends or administrators_drain",
    "tests/orchestrators/slurm/test_real.py": "meant_to_stop or administrator_drained or another_owner or neighbour",
}


def examine() -> list[Examined]:
    """Return one row for each test; one that says why where they could not be run."""
    found = []
    for file, words in TESTS.items():
        with tempfile.TemporaryDirectory(prefix="innocence-") as folder:
            report = Path(folder) / "report.xml"
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", file, "-k", words, f"--junitxml={report}"],
                cwd=ROOT, env={**os.environ, "EAGLE_EYE_TEST_SLURM": "1"}, capture_output=True, text=True,
                timeout=WITHIN_S, check=False,
            )  # fmt: skip
            if not report.exists():
                said = (done.stderr or done.stdout).strip().splitlines()
                found.append(_row(file, f"it was not run: {said[-1] if said else done.returncode}"))
                continue
            found += [_examined(case) for case in ET.parse(report).iter("testcase")]
    return found


def _examined(case: ET.Element) -> Examined:
    name = case.get("name", "").removeprefix("test_")
    skipped, failed = case.find("skipped"), case.find("failure")
    failed = failed if failed is not None else case.find("error")
    return _row(
        name,
        "" if failed is None else (failed.get("message") or "it failed").partition("\n")[0],
        "" if skipped is None else skipped.get("message", "skipped"),
        float(case.get("time", 0.0)),
    )


def _row(name: str, problem: str, skipped: str = "", took_s: float = 0.0) -> Examined:
    about = name.replace("_", " ")
    return Examined(
        name=name, about=about, where="real Slurm", problem=problem, skipped=skipped, took_s=round(took_s, 1)
    )
