"""All checks in execution order: cheap ones first, the site's long tests last."""

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
    sdc_all_reduce,
    sdc_gemm,
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
    sdc_gemm.CHECK,
    sdc_all_reduce.CHECK,
)
SDC = (sdc_gemm.CHECK.name, sdc_all_reduce.CHECK.name)  # those that look for silent data corruption
