"""A child with torch: opens its devices, runs one kind of work on each, reports the result. Touches: GPUs, memory."""

from __future__ import annotations

import json
import os
from typing import Any

from .all_reduce import all_reduce
from .gemm import gemm
from .lines import LOADING, OPENING, WORKING, WorkerOutput, bounded, side_by_side
from .memory import memory
from .sdc_all_reduce import sdc_all_reduce
from .sdc_gemm import HostMiscomputes, sdc_gemm

CPU_THREADS_MAX = 4  # enough to load a few cores; a host has other work
WORKS = {
    "gemm": gemm,
    "memory": memory,
    "all_reduce": all_reduce,
    "sdc_gemm": sdc_gemm,
    "sdc_all_reduce": sdc_all_reduce,
}
TOGETHER = ("all_reduce", "sdc_all_reduce")  # the ranks must see each other's GPUs

# CUDA's and NCCL's texts for hardware errors, whatever the program did. Source: CUDA Runtime API, cudaError: 214
# uncorrectable ECC error, 220 uncorrectable NVLink error, 714 hardware stack error, 721 contained error.
HARDWARE_ERRORS = ("uncorrectable ecc error", "uncorrectable nvlink error", "hardware stack error", "hardware error")


def main(job_json: str) -> None:
    """Do the work that the parent asks for: ``work``, ``devices`` (UUIDs of GPUs), ``workers``, ``seconds``, ..."""
    job: dict[str, Any] = json.loads(job_json)
    bounded(int(job["parent"]), float(job["until_s"]))
    side_by_side(int(job["workers"]), float(job["until_s"]), lambda worker, line: _work(job, worker, line))


def _work(job: dict[str, Any], worker: int, line: WorkerOutput) -> None:
    devices: list[str] = job["devices"]
    line.phase(LOADING)
    together = job["work"] in TOGETHER
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices if together else devices[worker : worker + 1])
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the same bits every time
    import torch

    if not devices:
        torch.set_num_threads(max(1, min(CPU_THREADS_MAX, len(os.sched_getaffinity(0))) // int(job["workers"])))
    elif not torch.version.cuda:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA")
    line.phase(OPENING)
    try:
        device = torch.device("cpu" if not devices else f"cuda:{worker if together else 0}")
        if devices:
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        line.phase(WORKING)
        line.values(WORKS[job["work"]](torch, device, job, worker, line))
    except Exception as error:  # noqa: BLE001 - whatever torch raises is judged by its words
        hardware = isinstance(error, HostMiscomputes) or any(word in str(error).lower() for word in HARDWARE_ERRORS)
        line.error(error, hardware=hardware)
