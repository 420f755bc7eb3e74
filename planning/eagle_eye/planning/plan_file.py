"""Reads a plan's file: the output of ``eagle-eye plan --json``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from eagle_eye.planning.plan import Plan, check_plan
from eagle_eye.planning.profile import read_bounded
from eagle_eye.schema.configuration import ConfigurationError

FILE_BYTES_MAX = 256 << 20


def read_plan(path: Path, option: str = "--plan") -> Plan:
    """Return the plan in the file that the option names. Raises ConfigurationError for an invalid one."""
    raw = read_bounded(path, option, FILE_BYTES_MAX)
    try:
        plan = msgspec.json.decode(raw, type=Plan)
        check_plan(plan)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise ConfigurationError(f"{option}: {path}: {error}; eagle-eye plan --json writes plans") from None
    return plan


def check_hardware(plan: Plan, gpus_per_node: int | None, gpu_memory_bytes: int | None) -> None:
    """Check that the plan is for nodes like these; None: unknown. Raises ConfigurationError."""
    wanted = plan.hardware
    gpus = wanted.gpus_per_node if gpus_per_node is None else gpus_per_node
    memory_bytes = wanted.gpu_memory_bytes if gpu_memory_bytes is None else gpu_memory_bytes
    if gpus != wanted.gpus_per_node or memory_bytes < wanted.gpu_memory_bytes:
        raise ConfigurationError(
            f"--plan: it is for other hardware: GPUs of a node {wanted.gpus_per_node}, not {gpus}; bytes of a GPU"
            f" {wanted.gpu_memory_bytes}, not {memory_bytes}; plan again"
        )
