"""Runs the tests that need a GPU and keeps what they showed.

    make test-gpu

A run writes two files into ``benchmarks/results/gpu``, named by the GPUs: what came of each test with its figures
(JSON), and pytest's own output. Exit code 0: all that ran passed; 1: one failed; 2: none ran, and nothing is written.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from benchmarks.gpu.report import BadReport, Machine, Results, file_name, has_shown, outcomes, table

ROOT = Path(__file__).parents[2]
OUT = ROOT / "benchmarks" / "results" / "gpu"


def main(
    arguments: list[str] | None = None, machine: Callable[[], Machine] | None = None, commit: str | None = None
) -> int:
    """Run, tell, keep; ``machine`` and ``commit`` are looked up unless they are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, default=ROOT / "tests" / "gpu", help="which tests (tests/gpu)")
    parser.add_argument("--out", type=Path, default=OUT, help="where results are kept (benchmarks/results/gpu)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder) / "report.xml", Path(folder) / "output.txt"
        code = _run(args.tests, report, output)
        try:
            found = outcomes(report.read_text(encoding="utf-8")) if report.exists() else []
        except BadReport as error:
            print(f"benchmarks.gpu: pytest ended with {code}: {error}", file=sys.stderr)
            return 1
        sys.stdout.write(table(found))
        if not has_shown(found):
            why = next((one.reason for one in found), f"pytest ended with {code}, see above")
            print(f"benchmarks.gpu: no test ran, so nothing is kept: {why}", file=sys.stderr)
            return 2
        results = Results(
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            commit=_commit() if commit is None else commit,
            machine=(machine or _machine)(),
            outcomes=found,
        )
        kept = args.out / f"{file_name(results.machine)}.json"
        args.out.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(_without_root(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"))
        kept.with_suffix(".txt").write_bytes(_without_root(output.read_bytes()))
        print(f"kept: {kept} and {kept.with_suffix('.txt').name}")
    return 1 if code else 0


def _run(tests: Path, report: Path, output: Path) -> int:
    """Run the tests in one process, show and keep what pytest says, and return its exit code."""
    # A test keeps its figures as properties of its own case, which the newer family of reports does not have.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "junit_family=xunit1"]
    command += [f"--junitxml={report}"]
    with (
        output.open("wb") as kept,
        subprocess.Popen(
            [*command, str(tests)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            kept.write(line)
            sys.stdout.write(line.decode("utf-8", "replace"))
            sys.stdout.flush()
    return process.returncode


def _without_root(text: bytes) -> bytes:
    """Return it without the folder in which the sources happen to lie."""
    return text.replace(f"{ROOT}/".encode(), b"").replace(str(ROOT).encode(), b".")


def _machine() -> Machine:
    """Return what NVML and the Python with torch say. Touches NVML, processes."""
    import pynvml

    from tests.gpu.machine import torch_python

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(pynvml.nvmlDeviceGetCount())]
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Machine(
            gpus=[str(pynvml.nvmlDeviceGetName(handle)) for handle in handles],
            driver=str(pynvml.nvmlSystemGetDriverVersion()),
            cuda=f"{version // 1000}.{version % 1000 // 10}",
            python=platform.python_version(),
            torch=torch_python().version,
            processors=os.cpu_count() or 0,
        )
    finally:
        pynvml.nvmlShutdown()


def _commit() -> str:
    """Return the commit of the sources, "" where git cannot say."""
    try:
        said = [
            subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60.0).stdout
            for command in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        ]
    except (OSError, subprocess.SubprocessError):
        return ""
    return said[0].strip() + ("+" if said[1].strip() else "")


if __name__ == "__main__":
    sys.exit(main())
