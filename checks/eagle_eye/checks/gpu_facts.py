"""The GPU faults known to the driver; read after the load checks, so that they are included."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_eye.checks import gpus
from eagle_eye.checks.check import (
    NO_GPU,
    Check,
    CheckedGpu,
    CheckOptions,
    Host,
    Measured,
    Result,
    could_not_check,
    passed,
    sick,
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


def absent(asked: CheckOptions) -> str:
    """Return why there is nothing to check."""
    return "" if asked.host.has_gpus else NO_GPU


def run(asked: CheckOptions) -> Result:
    """Return what is wrong with any GPU, from a reading now."""
    host = gpus.host(asked.until_s) if asked.host.gpus or asked.host.lost else asked.host
    return judge(host, max(asked.site.gpus_expected or 0, len(asked.host.gpus)))  # none may have disappeared meanwhile


def judge(host: Host, expected: int) -> Result:
    """Return what a look means; ``expected``: how many GPUs the host should have at least."""
    reasons = [*host.lost, *(reason for gpu in host.gpus for reason in _wrong_with(gpu))]
    if host.gpus and len(host.gpus) + len(host.lost) < expected:
        reasons.append(f"NVML shows {len(host.gpus)} of {expected} GPUs")
    figures = [figure for gpu in host.gpus for figure in _figures(gpu)]
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


def _figures(gpu: CheckedGpu) -> Iterator[Measured]:
    for name, _ in _REPAIRS:
        if name in gpu.facts:
            source = "NVML API Reference: any at all asks for a repair"
            yield Measured(name=name, value=gpu.facts[name], unit="1", device=gpu.name, threshold=0.0, source=source)
    for name, unit in _REPORTED:
        if name in gpu.facts:
            yield Measured(name=name, value=gpu.facts[name], unit=unit, device=gpu.name)


CHECK = Check(
    name="gpu_facts",
    needs="NVIDIA GPUs, nvidia-ml-py",
    measures="pending and failed row remaps, pages to be retired, uncorrectable memory errors, GPUs lost or missing",
    limit_s=gpus.LOOK_S,
    quick_limit_s=5.0,
    absent=absent,
    run=run,
)
