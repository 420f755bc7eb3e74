"""Matrix products on all devices at once: finds wrong numbers, and devices slower or hotter than their peers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from eagle_eye.checks import devices
from eagle_eye.checks.check import NO_GPU, Check, CheckOptions, Host, Measured, Result, could_not_check
from eagle_eye.checks.gpus import Watching
from eagle_eye.checks.thresholds import Threshold

WORK_S = 8.0  # a GPU reaches its temperature and its power limit within a few seconds
QUICK_WORK_S = 1.5

# NVML's clocks-event-reasons (nvml.h): hardware slowdown, software and hardware thermal slowdown, power brake. The
# software power cap (0x4) is not a fault: every GPU at full load has it.
BRAKE_BITS = 0x08 | 0x20 | 0x40 | 0x80
LOADED_RATIO = 0.5  # a look counts as one under load where the GPU is this busy
LOOKS_MIN = 3
LINK = ("pcie_link_width", "pcie_link_generation")
COPIED = "host_to_device_bytes_per_second"


def run(asked: CheckOptions) -> Result:
    """Return whether all devices compute correctly, and none is an outlier."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    names = devices.names(asked.host)
    seconds = asked.site.gemm_s or (QUICK_WORK_S if asked.quick else WORK_S)
    looks: Sequence[Host] = ()
    try:
        if asked.host.gpus:
            with Watching(asked.until_s) as watching:
                children = devices.ask(asked, "gemm", seconds, len(names))
            looks = watching.looks()
        else:
            children = devices.ask(asked, "gemm", seconds, len(names))
    except OSError as error:
        return could_not_check(f"{asked.site.torch_python}: {error.strerror or error}")
    ratios = devices.ratios(names, children, "flops_per_second", asked.host)
    seen_loaded = under_load(looks)

    def judge(device: str, values: Mapping[str, float]) -> tuple[str, tuple[Measured, ...]]:
        return _judge(device, values, ratios.get(device), seen_loaded.get(device), asked.site.thresholds)

    answered = [course.values for course in children.courses if course.values is not None]
    repetitions = min((values.get("repetitions", 0.0) for values in answered), default=0.0)
    form = f"{len(names)} GPUs" if asked.host.gpus else f"on the CPU ({NO_GPU})"
    seen = f"{form}, {repetitions:.0f} products alike and as known"
    if asked.host.gpus and not seen_loaded:
        seen += "; NVML was not seen under load, so links and clocks are not judged"
    return devices.result(names, children, judge, seen)


class UnderLoad(NamedTuple):
    """One GPU while it was busy: the share of looks in which it braked, and by link figure the best, and the most."""

    braked: float
    link: Mapping[str, tuple[float, float]]


def under_load(looks: Sequence[Host]) -> dict[str, UnderLoad]:
    """Return each GPU's state under load; those seen under load less than LOOKS_MIN times are missing.

    The best of all looks counts for a link: at rest it runs at a lower generation, and needs a moment.
    """
    loaded: dict[str, list[Mapping[str, float]]] = defaultdict(list)
    for look in looks:
        for gpu in look.gpus:
            if gpu.facts.get("utilization_ratio", 0.0) >= LOADED_RATIO:
                loaded[gpu.name].append(gpu.facts)
    found = {}
    for name, seen in loaded.items():
        if len(seen) < LOOKS_MIN:
            continue
        braked = sum(int(facts.get("throttle_reasons", 0.0)) & BRAKE_BITS != 0 for facts in seen)
        link = {
            what: (max(facts.get(what, 0.0) for facts in seen), seen[-1][f"{what}_max"])
            for what in LINK
            if f"{what}_max" in seen[-1]
        }
        found[name] = UnderLoad(braked / len(seen), link)
    return found


def _judge(
    device: str,
    values: Mapping[str, float],
    ratio: float | None,
    seen: UnderLoad | None,
    thresholds: Mapping[str, Threshold],
) -> tuple[str, tuple[Measured, ...]]:
    wrong, differing = values["wrong_rows"], values["differing"]
    reasons = [
        f"{wrong:.0f} rows of a product are not what they must be" if wrong else "",
        f"{differing:.0f} numbers differ between repetitions of one product" if differing else "",
    ]
    exact = "ours: the products are exact, any difference is a fault"
    figures = [
        Measured(name="wrong_rows", value=wrong, unit="1", device=device, threshold=0.0, source=exact),
        Measured(name="differing", value=differing, unit="1", device=device, threshold=0.0, source=exact),
        Measured(name="repetitions", value=values["repetitions"], unit="1", device=device),
    ]
    judged = {"flops_per_second": values["flops_per_second"], "throughput_ratio": ratio}
    for name, value in {**judged, "throttled_ratio": seen.braked if seen else None}.items():
        if value is not None:
            reason, figure = devices.measured(name, value, device, thresholds[f"gemm.{name}"])
            figures.append(figure)
            reasons.append(reason)
    for name, (best, most) in (seen.link if seen else {}).items():
        source = "NVML: the most that this GPU can have in this slot"
        figures.append(Measured(name=name, value=best, unit="1", device=device, threshold=most, source=source))
        reasons += [f"{name} {best:.0f} of {most:.0f} under load"] if 0.0 < best < most else []
    if COPIED in values:
        figures.append(Measured(name=COPIED, value=values[COPIED], unit="B/s", device=device))
    return ", ".join(reason for reason in reasons if reason), tuple(figures)


CHECK = Check(
    name="gemm",
    needs="torch; on GPUs nvidia-ml-py for clocks and links under load",
    measures="products with known results, repeated: wrong numbers, speed among peers, PCIe link and brakes under load",
    limit_s=40.0,
    quick_limit_s=10.0,
    absent=lambda _asked: "",
    run=run,
    loads_gpus=True,
    longer_s=lambda site: site.gemm_s or 0.0,
)
