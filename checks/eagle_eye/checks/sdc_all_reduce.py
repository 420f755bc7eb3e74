"""Repeated all-reduces among the node's GPUs, each sum compared: finds silent errors of links and GPUs."""

from __future__ import annotations

import tempfile

from eagle_eye.checks import corruption, devices
from eagle_eye.checks.all_reduce import CPU_RANKS
from eagle_eye.checks.check import ONE_GPU, Check, CheckOptions, Result, could_not_check
from eagle_eye.checks.sdc_gemm import SHARE


def run(asked: CheckOptions) -> Result:
    """Return whether any number of any sum was wrong on any rank; the cause is not located."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    names = devices.names(asked.host) if asked.host.gpus else tuple(f"rank {rank}" for rank in range(CPU_RANKS))
    seconds = (1.0 - SHARE) * asked.site.sdc_s
    try:
        with tempfile.TemporaryDirectory(prefix="eagle-eye-check-", ignore_cleanup_errors=True) as folder:
            children = devices.ask(asked, "sdc_all_reduce", seconds, len(names), folder=folder)
    except OSError as error:
        return could_not_check(f"{asked.site.torch_python}: {error.strerror or error}")
    return corruption.result(asked.host, names, children, "all-reduces")


CHECK = Check(
    name="sdc_all_reduce",
    needs="torch; two GPUs or more, or none; only when named, or with --sdc",
    measures="all-reduces with known sums among the node's GPUs, for --seconds: numbers that are silently wrong",
    limit_s=60.0,
    quick_limit_s=None,
    absent=lambda asked: ONE_GPU if len(asked.host.gpus) == 1 else "",
    run=run,
    loads_gpus=True,
    longer_s=lambda site: (1.0 - SHARE) * site.sdc_s,
    on_request=True,
)
