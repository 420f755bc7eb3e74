"""Writes patterns to the devices' memory and reads them back: finds wrong words, and slow memory."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_eye.checks import devices
from eagle_eye.checks.check import NO_GPU, Check, CheckOptions, Measured, Result, could_not_check

WORK_S = 6.0
QUICK_WORK_S = 1.0


def run(asked: CheckOptions) -> Result:
    """Return whether everything was read back correctly."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    names = devices.names(asked.host)
    try:
        children = devices.ask(asked, "memory", QUICK_WORK_S if asked.quick else WORK_S, len(names))
    except OSError as error:
        return could_not_check(f"{asked.site.torch_python}: {error.strerror or error}")
    ratios = devices.ratios(names, children, "bytes_per_second", asked.host)

    def judge(device: str, values: Mapping[str, float]) -> tuple[str, tuple[Measured, ...]]:
        wrong, tried = values["wrong_words"], values["bytes"]
        source = "ours: what was written must come back"
        figures = [
            Measured(name="wrong_words", value=wrong, unit="1", device=device, threshold=0.0, source=source),
            Measured(name="bytes", value=tried, unit="B", device=device),
            Measured(name="passes", value=values["passes"], unit="1", device=device),
        ]
        reasons = [f"{wrong:.0f} words came back wrong of {tried / 2**30:.1f} GiB"] if wrong else []
        for name, value in (("bytes_per_second", values["bytes_per_second"]), ("throughput_ratio", ratios.get(device))):
            if value is not None:
                reason, figure = devices.measured(name, value, device, asked.site.thresholds[f"memory.{name}"])
                figures.append(figure)
                reasons += [reason] if reason else []
        return ", ".join(reasons), tuple(figures)

    tried = [course.values.get("bytes", 0.0) for course in children.courses if course.values is not None]
    each = f"{min(tried, default=0.0) / 2**30:.2f} GiB"
    where = f"to each of {len(names)} GPUs" if asked.host.gpus else f"to the host's memory ({NO_GPU})"
    return devices.result(names, children, judge, f"{each} written {where}, and all of it came back")


CHECK = Check(
    name="memory",
    needs="torch",
    measures="patterns written to free memory and read back: wrong words, speed among peers",
    limit_s=35.0,
    quick_limit_s=8.0,
    absent=lambda _asked: "",
    run=run,
    loads_gpus=True,
)
