"""Shared by checks with a child per device: which devices are usable, and merging answers into one result."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from eagle_eye.checks import child
from eagle_eye.checks.check import (
    CheckOptions,
    Host,
    Measured,
    Result,
    Threshold,
    against_peers,
    could_not_check,
    passed,
    sick,
)
from eagle_eye.checks.child import Children

CPU = "cpu"
REASONS_MAX = 8

# Judges one device's values: what is wrong with it, "" for nothing, and its figures.
Judge = Callable[[str, Mapping[str, float]], tuple[str, tuple[Measured, ...]]]


def unable(host: Host) -> str:
    """Return why the host's GPUs cannot be used, "" when they can, or when there is none and the CPU is tested."""
    if host.simulated:
        return "the GPUs are simulated"
    if host.lost:
        return f"{host.lost[0]}: nothing is begun on a node that has lost a GPU"
    if host.gpu_problem:
        return host.gpu_problem
    divided = [gpu.name for gpu in host.gpus if gpu.instances]
    return f"{divided[0]} is divided into MIG instances, which are not checked" if divided else ""


def names(host: Host) -> tuple[str, ...]:
    """Return the tested devices: the GPUs, or the CPU where there is none."""
    return tuple(gpu.name for gpu in host.gpus) or (CPU,)


def ask(asked: CheckOptions, work: str, seconds: float, workers: int, **job: object) -> Children:
    """Run the work on the devices in a child. Raises OSError when it cannot be started."""
    uuids = [gpu.uuid for gpu in asked.host.gpus]
    return child.run(
        "in_torch",
        {"work": work, "devices": uuids, "seconds": seconds, "quick": asked.quick, **job},
        workers,
        asked.until_s,
        asked.site.torch_python,
    )


def result(devices: tuple[str, ...], children: Children, judge: Judge, seen: str) -> Result:
    """Merge all devices' answers: one sick device makes the node sick."""
    broken: list[str] = []
    unknown: list[str] = []
    figures: list[Measured] = []
    for device, course in zip(devices, children.courses, strict=True):
        if course.values is None:
            state, reason = child.without_answer(course, children)
            (broken if state == "sick" else unknown).append(f"{device}: {reason}")
            continue
        try:
            wrong, measured = judge(device, course.values)
        except KeyError as error:
            unknown.append(f"{device}: the answer lacks {error}")
            continue
        figures += measured
        broken += [f"{device}: {wrong}"] if wrong else []
    if broken:
        return sick("; ".join(broken[:REASONS_MAX]), *figures)
    if unknown:
        return could_not_check("; ".join(unknown[:REASONS_MAX]), *figures)
    return passed(seen, *figures)


def measured(name: str, value: float, device: str, threshold: Threshold) -> tuple[str, Measured]:
    """Return what is wrong with a value by its threshold, "" for nothing, and its figure."""
    figure = Measured(
        name=name,
        value=value,
        unit=threshold.unit,
        device=device,
        threshold=threshold.value,
        source=threshold.source if threshold.value is not None else "",
    )
    if not threshold.broken_by(value):
        return "", figure
    side = "below" if threshold.at_least else "above"
    return f"{name} {value:.4g} {threshold.unit}, {side} {threshold.value:.4g} ({threshold.source})", figure


def ratios(devices: tuple[str, ...], children: Children, name: str, host: Host) -> dict[str, float]:
    """Return each device's figure as a ratio of the median of the others of its model."""
    values = {
        device: course.values[name]
        for device, course in zip(devices, children.courses, strict=True)
        if course.values is not None and name in course.values
    }
    return against_peers(values, {gpu.name: gpu.model for gpu in host.gpus})
