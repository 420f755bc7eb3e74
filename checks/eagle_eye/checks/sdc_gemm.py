"""Repeated matrix products on every device, each number compared: finds otherwise silent corruption."""

from __future__ import annotations

from eagle_eye.checks import corruption, devices
from eagle_eye.checks.check import Check, CheckOptions, Result, could_not_check

SHARE = 0.75  # of the seconds, where there are several devices, whose sums are compared in the rest


def run(asked: CheckOptions) -> Result:
    """Return whether any number of any product was wrong."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    names = devices.names(asked.host)
    share = 1.0 if len(asked.host.gpus) == 1 else SHARE
    try:
        children = devices.ask(asked, "sdc_gemm", share * asked.site.sdc_s, len(names))
    except OSError as error:
        return could_not_check(f"{asked.site.torch_python}: {error.strerror or error}")
    return corruption.result(asked.host, names, children, "products")


CHECK = Check(
    name="sdc_gemm",
    needs="torch; only when named, or with --sdc",
    measures="products in several types with known results, for --seconds: numbers that are silently wrong",
    limit_s=60.0,
    quick_limit_s=None,
    absent=lambda _asked: "",
    run=run,
    loads_gpus=True,
    longer_s=lambda site: site.sdc_s,
    on_request=True,
)
