"""An all-reduce among the node's GPUs, in torch, for hosts without nccl-tests; without GPUs among two CPU ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

from eagle_eye.checks import devices
from eagle_eye.checks.check import NO_GPU, ONE_GPU, Check, CheckOptions, Measured, Result, could_not_check

WORK_S = 4.0
QUICK_WORK_S = 1.0
CPU_RANKS = 2
INSTEAD_OF = "nccl_tests"


def absent(asked: CheckOptions) -> str:
    """Return why it is not needed, or cannot run."""
    if INSTEAD_OF in asked.passed:
        return f"{INSTEAD_OF} has done it"
    return ONE_GPU if len(asked.host.gpus) == 1 else ""


def run(asked: CheckOptions) -> Result:
    """Return whether the sums were right on every rank."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    names = devices.names(asked.host) if asked.host.gpus else tuple(f"rank {rank}" for rank in range(CPU_RANKS))
    try:
        with tempfile.TemporaryDirectory(prefix="eagle-eye-check-", ignore_cleanup_errors=True) as folder:
            seconds = QUICK_WORK_S if asked.quick else WORK_S
            children = devices.ask(asked, "all_reduce", seconds, len(names), folder=folder)
    except OSError as error:
        return could_not_check(f"{asked.site.torch_python}: {error.strerror or error}")

    def judge(device: str, values: Mapping[str, float]) -> tuple[str, tuple[Measured, ...]]:
        wrong = values["wrong"]
        source = "ours: the sums are exact, any difference is a fault"
        reasons = [f"{wrong:.0f} numbers of a sum are wrong"] if wrong else []
        name = "bus_bytes_per_second"
        reason, figure = devices.measured(name, values[name], device, asked.site.thresholds[f"all_reduce.{name}"])
        wrongs = Measured(name="wrong", value=wrong, unit="1", device=device, threshold=0.0, source=source)
        return ", ".join([*reasons, *([reason] if reason else [])]), (wrongs, figure)

    form = f"{len(names)} GPUs" if asked.host.gpus else f"{len(names)} ranks on the CPU ({NO_GPU})"
    return devices.result(names, children, judge, f"{form}, every sum right on every rank")


CHECK = Check(
    name="all_reduce",
    needs="torch; two GPUs or more, or none",
    measures="all-reduces with known sums among the node's GPUs: wrong numbers, bus bandwidth",
    limit_s=35.0,
    quick_limit_s=10.0,
    absent=absent,
    run=run,
    loads_gpus=True,
)
