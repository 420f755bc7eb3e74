"""The checks for silent corruption: wrong numbers per GPU, and how little a clean result proves."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping

from eagle_eye.checks import devices
from eagle_eye.checks.check import ONE_GPU, Check, CheckOptions, Host, Measured, Result, could_not_check, printable
from eagle_eye.checks.child import Children
from eagle_eye.checks.devices import CPU
from eagle_eye.checks.node_checks import CPU_RANKS

WORK_S = 60.0  # of all of them together, by default
WORK_S_MIN, WORK_S_MAX = 1.0, 600.0
FINDINGS_SHOWN = 2  # per device in a reason
FINDING_CHARS_MAX = 120
SOURCE = "ours: the results are exact, any difference is a fault"


def result(host: Host, names: tuple[str, ...], children: Children, what: str) -> Result:
    """Return the result of all devices' answers; figures are by UUID, so that they stay with a GPU that moves.

    ``names`` are the devices for people, ``what`` the operations that were counted, in the plural.
    """
    uuids = {gpu.name: gpu.uuid for gpu in host.gpus}
    found = findings(children)
    workers = {name: worker for worker, name in enumerate(names)}

    def judge(device: str, values: Mapping[str, float]) -> tuple[str, tuple[Measured, ...]]:
        operations, wrong, seconds = values["operations"], values["wrong"], values["seconds"]
        uuid = uuids.get(device, device)
        figures = (
            Measured(name="wrong_numbers", value=wrong, unit="1", device=uuid, threshold=0.0, source=SOURCE),
            Measured(name="operations", value=operations, unit="1", device=uuid),
            Measured(name="compared_seconds", value=seconds, unit="s", device=uuid),
        )
        if not wrong:
            return "", figures
        reported = "; ".join(found[workers[device]][:FINDINGS_SHOWN])
        whose = f" ({uuid})" if uuid != device else ""
        return f"{wrong:.0f} wrong numbers in {operations:.0f} {what}{whose}: {reported}", figures

    answered = [course.values for course in children.courses if course.values is not None]
    operations = sum(values.get("operations", 0.0) for values in answered)
    seconds = max((values.get("seconds", 0.0) for values in answered), default=0.0)
    where = f"on {len(names)} GPUs" if host.gpus else f"on the {CPU.upper()}"
    return devices.result(names, children, judge, f"nothing found in {seconds:.0f} s, {operations:.0f} {what} {where}")


def findings(children: Children) -> Mapping[int, list[str]]:
    """Return each worker's reported wrong numbers, as untrusted text."""
    found: dict[int, list[str]] = defaultdict(list)
    for line in children.answers:
        worker, reported = line.get("worker"), line.get("finding")
        if isinstance(worker, int) and isinstance(reported, dict):
            operation, index, expected, got = (str(reported.get(k)) for k in ("operation", "index", "expected", "got"))
            found[worker].append(printable(f"{operation} [{index}] expected {expected}, got {got}")[:FINDING_CHARS_MAX])
    return found


GEMM_SHARE = 0.75  # of the seconds, where there are several devices, whose sums are compared in the rest


def run_gemm(asked: CheckOptions) -> Result:
    """Return whether any number of any product was wrong."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    names = devices.names(asked.host)
    share = 1.0 if len(asked.host.gpus) == 1 else GEMM_SHARE
    try:
        children = devices.ask(asked, "sdc_gemm", share * asked.site.sdc_s, len(names))
    except OSError as error:
        return could_not_check(f"{asked.site.torch_python}: {error.strerror or error}")
    return result(asked.host, names, children, "products")


SDC_GEMM = Check(
    name="sdc_gemm",
    needs="torch; only when named, or with --sdc",
    measures="products in several types with known results, for --seconds: numbers that are silently wrong",
    limit_s=60.0,
    quick_limit_s=None,
    absent=lambda _asked: "",
    run=run_gemm,
    loads_gpus=True,
    longer_s=lambda site: site.sdc_s,
    on_request=True,
)


def run_all_reduce(asked: CheckOptions) -> Result:
    """Return whether any number of any sum was wrong on any rank; the cause is not located."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    names = devices.names(asked.host) if asked.host.gpus else tuple(f"rank {rank}" for rank in range(CPU_RANKS))
    seconds = (1.0 - GEMM_SHARE) * asked.site.sdc_s
    try:
        with tempfile.TemporaryDirectory(prefix="eagle-eye-check-", ignore_cleanup_errors=True) as folder:
            children = devices.ask(asked, "sdc_all_reduce", seconds, len(names), folder=folder)
    except OSError as error:
        return could_not_check(f"{asked.site.torch_python}: {error.strerror or error}")
    return result(asked.host, names, children, "all-reduces")


SDC_ALL_REDUCE = Check(
    name="sdc_all_reduce",
    needs="torch; two GPUs or more, or none; only when named, or with --sdc",
    measures="all-reduces with known sums among the node's GPUs, for --seconds: numbers that are silently wrong",
    limit_s=60.0,
    quick_limit_s=None,
    absent=lambda asked: ONE_GPU if len(asked.host.gpus) == 1 else "",
    run=run_all_reduce,
    loads_gpus=True,
    longer_s=lambda site: (1.0 - GEMM_SHARE) * site.sdc_s,
    on_request=True,
)
