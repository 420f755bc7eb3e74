"""The checks that need no tool of the site: clock, disk, the GPUs' facts, products, memory, all-reduces in torch."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from eagle_eye.agent.collector import CollectFailed, Unsupported
from eagle_eye.agent.collectors.clock_offset import ClockOffsetCollector
from eagle_eye.checks import child, devices, gpus
from eagle_eye.checks.check import (
    NO_GPU,
    ONE_GPU,
    Check,
    CheckedGpu,
    CheckOptions,
    Host,
    Measured,
    Result,
    Threshold,
    could_not_check,
    passed,
    sick,
)
from eagle_eye.checks.gpus import Watching

CLOCK_OFFSET = "offset_seconds"


def run_clock(asked: CheckOptions) -> Result:
    """Return whether the clock is right; an undisciplined clock cannot be judged."""
    return judge_clock(ClockOffsetCollector(), asked)


def judge_clock(collector: ClockOffsetCollector, asked: CheckOptions) -> Result:
    """Judge the collector's answer."""
    try:
        offset_s = collector.collect(time.time()).node["node_clock_offset_seconds"]
    except (CollectFailed, Unsupported) as error:
        return could_not_check(str(error))
    reason, figure = devices.measured(CLOCK_OFFSET, abs(offset_s), "", asked.site.thresholds[f"clock.{CLOCK_OFFSET}"])
    if reason:
        return sick(f"the clock is {offset_s:+.3f} s off: {reason}", figure)
    return passed(f"the clock is {offset_s:+.6f} s off", figure)


CLOCK = Check(
    name="clock",
    needs="a program that keeps the clock (chrony, ntpd, systemd-timesyncd)",
    measures="the clock's offset from true time",
    limit_s=3.0,
    quick_limit_s=3.0,
    absent=lambda _asked: "",
    run=run_clock,
)


# NVML's facts that mean a GPU needs a repair, and which. Source: NVML API Reference; NVIDIA GPU Memory Error Management
# (row remapping, page retirement).
_REPAIRS = (
    ("remap_pending", "a row remap waits for a GPU reset"),
    ("remap_failed", "a row could not be remapped: the GPU is to be replaced"),
    ("retired_pages_pending", "pages wait to be retired by a GPU reset"),
    ("ecc_uncorrected_total", "uncorrectable memory errors since its last reset: reset the GPU"),
)
# Reported with the result; the gemm check judges them under load.
_REPORTED = (
    ("pcie_link_width", "1"),
    ("pcie_link_generation", "1"),
    ("temperature_celsius", "Cel"),
    ("throttle_reasons", "bitmask"),
)


def gpu_facts_absent(asked: CheckOptions) -> str:
    """Return why there is nothing to check."""
    return "" if asked.host.has_gpus else NO_GPU


def run_gpu_facts(asked: CheckOptions) -> Result:
    """Return what is wrong with any GPU, from a reading now."""
    host = gpus.host(asked.until_s) if asked.host.gpus or asked.host.lost else asked.host
    return judge_gpu_facts(
        host, max(asked.site.gpus_expected or 0, len(asked.host.gpus))
    )  # none may have disappeared meanwhile


def judge_gpu_facts(host: Host, expected: int) -> Result:
    """Return what a look means; ``expected``: how many GPUs the host should have at least."""
    reasons = [*host.lost, *(reason for gpu in host.gpus for reason in _wrong_with(gpu))]
    if host.gpus and len(host.gpus) + len(host.lost) < expected:
        reasons.append(f"NVML shows {len(host.gpus)} of {expected} GPUs")
    figures = [figure for gpu in host.gpus for figure in _fact_figures(gpu)]
    if host.simulated:
        return could_not_check("the GPUs are simulated")
    if reasons:
        return sick("; ".join(reasons), *figures)
    if host.gpu_problem or not host.gpus:
        return could_not_check(host.gpu_problem or "NVML shows no GPU any more", *figures)
    mute = [gpu.name for gpu in host.gpus if not any(name in gpu.facts for name, _ in _REPAIRS)]
    if mute:
        return could_not_check(f"{', '.join(mute)}: tells nothing of its memory's errors", *figures)
    return passed(f"{len(host.gpus)} GPUs ({host.gpus[0].model}), none asks for a repair", *figures)


def _wrong_with(gpu: CheckedGpu) -> Iterator[str]:
    for name, repair in _REPAIRS:
        if (value := gpu.facts.get(name, 0.0)) > 0.0:
            yield f"{gpu.name}: {f'{value:.0f} ' if name.endswith('_total') else ''}{repair}"


def _fact_figures(gpu: CheckedGpu) -> Iterator[Measured]:
    for name, _ in _REPAIRS:
        if name in gpu.facts:
            source = "NVML API Reference: any at all asks for a repair"
            yield Measured(name=name, value=gpu.facts[name], unit="1", device=gpu.name, threshold=0.0, source=source)
    for name, unit in _REPORTED:
        if name in gpu.facts:
            yield Measured(name=name, value=gpu.facts[name], unit=unit, device=gpu.name)


GPU_FACTS = Check(
    name="gpu_facts",
    needs="NVIDIA GPUs, nvidia-ml-py",
    measures="pending and failed row remaps, pages to be retired, uncorrectable memory errors, GPUs lost or missing",
    limit_s=gpus.LOOK_S,
    quick_limit_s=5.0,
    absent=gpu_facts_absent,
    run=run_gpu_facts,
)


GEMM_S = 8.0  # a GPU reaches its temperature and its power limit within a few seconds
QUICK_GEMM_S = 1.5

# NVML's clocks-event-reasons (nvml.h): hardware slowdown, software and hardware thermal slowdown, power brake. The
# software power cap (0x4) is not a fault: every GPU at full load has it.
BRAKE_BITS = 0x08 | 0x20 | 0x40 | 0x80
LOADED_RATIO = 0.5  # a look counts as one under load where the GPU is this busy
LOOKS_MIN = 3
LINK = ("pcie_link_width", "pcie_link_generation")
COPIED = "host_to_device_bytes_per_second"


def run_gemm(asked: CheckOptions) -> Result:
    """Return whether all devices compute correctly, and none is an outlier."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    names = devices.names(asked.host)
    seconds = asked.site.gemm_s or (QUICK_GEMM_S if asked.quick else GEMM_S)
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
        return _judge_gemm(device, values, ratios.get(device), seen_loaded.get(device), asked.site.thresholds)

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


def _judge_gemm(
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


GEMM = Check(
    name="gemm",
    needs="torch; on GPUs nvidia-ml-py for clocks and links under load",
    measures="products with known results, repeated: wrong numbers, speed among peers, PCIe link and brakes under load",
    limit_s=40.0,
    quick_limit_s=10.0,
    absent=lambda _asked: "",
    run=run_gemm,
    loads_gpus=True,
    longer_s=lambda site: site.gemm_s or 0.0,
)


MEMORY_S = 6.0
QUICK_MEMORY_S = 1.0


def run_memory(asked: CheckOptions) -> Result:
    """Return whether everything was read back correctly."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    names = devices.names(asked.host)
    try:
        children = devices.ask(asked, "memory", QUICK_MEMORY_S if asked.quick else MEMORY_S, len(names))
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


MEMORY = Check(
    name="memory",
    needs="torch",
    measures="patterns written to free memory and read back: wrong words, speed among peers",
    limit_s=35.0,
    quick_limit_s=8.0,
    absent=lambda _asked: "",
    run=run_memory,
    loads_gpus=True,
)


ALL_REDUCE_S = 4.0
QUICK_ALL_REDUCE_S = 1.0
CPU_RANKS = 2
INSTEAD_OF = "nccl_tests"


def all_reduce_absent(asked: CheckOptions) -> str:
    """Return why it is not needed, or cannot run."""
    if INSTEAD_OF in asked.passed:
        return f"{INSTEAD_OF} has done it"
    return ONE_GPU if len(asked.host.gpus) == 1 else ""


def run_all_reduce(asked: CheckOptions) -> Result:
    """Return whether the sums were right on every rank."""
    if reason := devices.unable(asked.host):
        return could_not_check(reason)
    names = devices.names(asked.host) if asked.host.gpus else tuple(f"rank {rank}" for rank in range(CPU_RANKS))
    try:
        with tempfile.TemporaryDirectory(prefix="eagle-eye-check-", ignore_cleanup_errors=True) as folder:
            seconds = QUICK_ALL_REDUCE_S if asked.quick else ALL_REDUCE_S
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


ALL_REDUCE = Check(
    name="all_reduce",
    needs="torch; two GPUs or more, or none",
    measures="all-reduces with known sums among the node's GPUs: wrong numbers, bus bandwidth",
    limit_s=35.0,
    quick_limit_s=10.0,
    absent=all_reduce_absent,
    run=run_all_reduce,
    loads_gpus=True,
)


DISK_BYTES = 256 << 20
QUICK_DISK_BYTES = 32 << 20


def run_disk(asked: CheckOptions) -> Result:
    """Return whether the disk below the folder stores data correctly and in time."""
    folder = str(asked.site.folder)
    size = QUICK_DISK_BYTES if asked.quick else DISK_BYTES
    try:
        children = child.run("on_disk", {"folder": folder, "bytes": size}, 1, asked.until_s)
    except OSError as error:
        return could_not_check(f"the child cannot be started: {error.strerror or error}")

    def judge(device: str, values: Mapping[str, float]) -> tuple[str, tuple[Measured, ...]]:
        wrong = values["wrong_blocks"]
        source = "ours: what was written must come back"
        figures = [
            Measured(name="wrong_blocks", value=wrong, unit="1", device=device, threshold=0.0, source=source),
            Measured(name="sync_seconds_max", value=values["sync_seconds_max"], unit="s", device=device),
            Measured(name="read_bytes_per_second", value=values["read_bytes_per_second"], unit="B/s", device=device),
        ]
        reasons = [f"{wrong:.0f} blocks of 1 MiB came back wrong"] if wrong else []
        for name in ("sync_seconds", "write_bytes_per_second"):
            reason, figure = devices.measured(name, values[name], device, asked.site.thresholds[f"disk.{name}"])
            figures.append(figure)
            reasons += [reason] if reason else []
        return ", ".join(reasons), tuple(figures)

    return devices.result((folder,), children, judge, f"{folder}: {size >> 20} MiB written, synced and read back")


DISK = Check(
    name="disk",
    needs="a folder on a disk (--folder)",
    measures="a file written, synced and read back: wrong blocks, how long a sync takes",
    limit_s=20.0,
    quick_limit_s=6.0,
    absent=lambda _asked: "",
    run=run_disk,
)
