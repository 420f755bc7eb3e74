"""Recorded flight-recorder dumps of hung jobs: whether the analysis names exactly the ranks that were disturbed.

The dumps are those that NVIDIA/nvidia-resiliency-ext (Apache-2.0) tests with: 16 ranks each, and beside them
``fault_injection.log``, which says who was disturbed and which only this program reads.

    python benchmarks/detection/real/flight_recorder.py --data FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from eagle_eye.detectors.progress.flight_recorder import analyse
from eagle_eye.detectors.types import Blind
from eagle_eye.server.admin.flight_recorder_command import read_folder

INJECTED = re.compile(r"Fault ranks: (\[[\d, ]*\])")


def main() -> int:
    """Print one JSON line for each incident and one for all; 1 when an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("EAGLE_EYE_DATA"), help="or EAGLE_EYE_DATA")
    args = parser.parse_args()
    folder = Path(args.data or "") / "real" / "nvrx_fr" / "fr_traces"
    if not args.data or not folder.is_dir():
        sys.stdout.write("skipped: neither --data nor EAGLE_EYE_DATA names a folder with real/nvrx_fr/fr_traces\n")
        return 0
    results = [once(incident) for incident in sorted(path for path in folder.iterdir() if path.is_dir())]
    for result in results:
        sys.stdout.write(json.dumps(result) + "\n")
    exact = sum(result["exact"] for result in results)
    sys.stdout.write(json.dumps({"incidents": len(results), "exact": exact}) + "\n")
    return 0 if exact == len(results) else 1


def once(incident: Path) -> dict[str, Any]:
    """Return what was injected, what was said, and how long reading and analysis took."""
    match = INJECTED.search((incident / "fault_injection.log").read_text(encoding="utf-8"))
    injected = json.loads(match[1]) if match else []
    started_s = time.perf_counter()
    found = read_folder(incident)
    said: dict[str, Any]
    try:
        finding = analyse(found.recordings)
        said = {"kind": finding.kind, "named": list(finding.culprits), "summary": finding.summary}
    except Blind as reason:
        said = {"kind": None, "named": [], "summary": str(reason)}
    seconds = round(time.perf_counter() - started_s, 4)
    return {
        "incident": incident.name,
        "dumps": len(found.recordings),
        "injected": injected,
        **said,
        "exact": said["named"] == injected,
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
