"""All checks, in the order in which they run: what costs little first, the site's long tests last."""

from __future__ import annotations

from eagle_eye.checks import (
    all_reduce,
    clock,
    dcgm,
    disk,
    gemm,
    gpu_facts,
    ib_write_bw,
    memory,
    nccl_tests,
)
from eagle_eye.checks.check import Check

CHECKS: tuple[Check, ...] = (
    clock.CHECK,
    disk.CHECK,
    gemm.CHECK,
    memory.CHECK,
    gpu_facts.CHECK,
    nccl_tests.CHECK,
    all_reduce.CHECK,
    ib_write_bw.CHECK,
    dcgm.CHECK,
)
