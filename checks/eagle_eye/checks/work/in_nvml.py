"""A child that queries NVML, whose calls may never return. Touches: NVML, through the agent's modules.

It prints its readings as one line of JSON; with a folder in ``while``, repeatedly while the folder exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from .lines import bounded, private_output

LOOK_EVERY_S = 0.5
# Readings without a metric in the agent, because they never change or come from another source.
_MORE_FACTS = (
    ("pcie_link_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
    ("pcie_link_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
    ("retired_pages_pending", "nvmlDeviceGetRetiredPagesPendingStatus"),
)


def main(job_json: str) -> None:
    """Read once, or ``while`` a folder exists."""
    job: dict[str, Any] = json.loads(job_json)
    bounded(int(job["parent"]), float(job["until_s"]))
    out = private_output()
    try:
        import pynvml  # noqa: F401 - told apart from a driver that is missing

        from eagle_eye.agent.nvml.connection import Library
    except ModuleNotFoundError as error:
        _say(out, {"problem": f"{error.name} is not installed: pip install 'eagle-eye[agent]'"})
        return
    try:
        library = Library({})
    except Exception as error:  # noqa: BLE001 - NVML's errors: not installed, no driver, another version
        _say(out, {"problem": f"NVML: {error}"})
        return
    for place in sorted(library.pending):
        library.open_gpu(place)
    folder = job.get("while")
    _say(out, _look(library))
    while folder and Path(folder).is_dir():
        time.sleep(LOOK_EVERY_S)
        _say(out, _look(library))
    library.close()


def _look(library: Any) -> dict[str, Any]:
    from eagle_eye.schema.driver_facts import BY_NAME, NVML_FACTS, NVML_OPENING_FACTS

    gpus: list[dict[str, Any]] = []
    lost: list[str] = []
    problems: list[str] = []
    for failure in library.unopened:
        (lost if failure.code in NVML_OPENING_FACTS else problems).append(failure.describe())
    for device in library.devices:
        answer = device.read()
        gone = [failure.describe() for failure in answer.failed if failure.code in NVML_FACTS]
        if gone:
            lost.append(f"gpu {device.index}: {gone[0].partition(': ')[2]}")
            continue
        asks = [text for name, text in answer.facts.items() if BY_NAME[name].repair != "none"]
        if asks:
            lost.append(f"gpu {device.index}: {'; '.join(asks)}")
            continue
        if answer.problem:
            problems.append(f"gpu {device.index}: {answer.problem}")
        failures = [*answer.failed, *answer.left_out, *device.occupants.read()]
        known = not any(failure.name == "processes" for failure in failures)
        gpus.append(
            {
                "row": device.index,
                "uuid": device.uuid,
                "model": device.name,
                "facts": _facts(device, answer.row),
                "processes": sorted(device.occupants.processes) if known else None,
                "instances": len(device.occupants.instances),
            }
        )
    return {"gpus": gpus, "lost": lost, "problem": "; ".join(problems), "simulated": library.simulated}


def _facts(device: Any, row: dict[str, float]) -> dict[str, float]:
    import pynvml

    facts = {name.removeprefix("gpu_"): value for name, value in row.items()}
    for name, function in _MORE_FACTS:
        try:
            facts[name] = float(getattr(pynvml, function)(device.handle))
        except (pynvml.NVMLError, AttributeError):
            continue  # what is not reported is not there
    with contextlib.suppress(pynvml.NVMLError, AttributeError):
        facts["remap_failed"] = float(pynvml.nvmlDeviceGetRemappedRows(device.handle)[3])
    with contextlib.suppress(pynvml.NVMLError):
        facts["memory_total_bytes"] = float(pynvml.nvmlDeviceGetMemoryInfo(device.handle).total)
    return facts


def _say(out: int, seen: dict[str, Any]) -> None:
    data = json.dumps(seen).encode("ascii") + b"\n"
    while data:
        data = data[os.write(out, data) :]
