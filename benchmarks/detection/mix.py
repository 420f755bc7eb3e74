"""Which faults are drawn, how often, and where the numbers come from.

The production shares are Minder's: faults of seven months at ByteDance (Deng et al., NSDI'25, arXiv 2411.01791), each
class under our name for what it looks like. Minder counts faults that stop or cripple a machine; slowness that a job
survives is hardly in it. The second part adds that slowness, and faults of the job as a whole, in the proportions of
Greyhound's characterisation (arXiv 2410.12588: CPU contention to thermal throttling 4:2 on single nodes, network
congestion in 42 of 43 slow four-node jobs), Llama 3 (arXiv 2407.21783: silent corruption 1.4%) and ByteRobust (arXiv
2509.16293: loss faults below 1%). None of these shares a denominator with Minder, so the part's size is a choice: a
third of Minder's, enough to see each of its faults some ten times in a thousand.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Share(NamedTuple):
    """One line of the mix; ``weight`` is Minder's percentage, or on that scale."""

    fault: str
    weight: float
    source: str


MIX: tuple[Share, ...] = (
    Share("gpu_memory_error", 38.9, "Minder: ECC error"),
    Share("process_crash", 14.6, "Minder: CUDA execution error, the process dies"),
    Share("gpu_hang", 7.7, "Minder: GPU execution error"),
    Share("pcie_degraded", 6.6, "Minder: PCIe downgrading"),
    Share("node_unreachable", 6.0, "Minder: machine unreachable"),
    Share("network_hang", 5.7, "Minder: NIC dropout"),
    Share("storage_stall", 5.7, "Minder: HDFS error"),
    Share("gpu_lost", 2.0, "Minder: GPU card drop"),
    Share("nvlink_degraded", 1.7, "Minder: NVLink error"),
    Share("nic_degraded", 0.9, "Minder: AOC error"),
    # Minder's remaining tenth is "others", software above all.
    Share("hang", 5.0, "Minder: others"),
    Share("out_of_memory", 3.0, "Minder: others"),
    Share("loss_not_finite", 2.2, "Minder: others"),
    # Slowness that a job survives, and faults of the whole job.
    Share("straggler", 6.0, "MegaScale, arXiv 2402.15627: 0.5% of machines 10% slow"),
    Share("cpu_contention", 6.0, "Greyhound: 4 of 6 slow single-node jobs"),
    Share("network_congestion", 6.0, "Greyhound: 42 of 43 slow four-node jobs"),
    Share("thermal_throttle", 3.0, "Greyhound: 2 of 6 slow single-node jobs"),
    Share("power_throttle", 3.0, "as often as heat"),
    Share("silent_data_corruption", 2.0, "Llama 3: 1.4% of interruptions; FT-HSDP: up to 5.5% with NaN"),
    Share("switch_down", 2.0, "Llama 3: switches and cables 8.4%, mostly cables"),
    Share("loss_divergence", 1.5, "ByteRobust: NaN and loss below 1%"),
    Share("loss_spike", 1.5, "ByteRobust: NaN and loss below 1%"),
    Share("workload_imbalance", 3.0, "What-if, arXiv 2505.05713: most slow jobs are slow for uneven work"),
    Share("recurrent_node", 1.5, "Meta, arXiv 2410.21680: lemon nodes"),
    Share("throughput_drop", 1.5, "ByteRobust: MFU decline 0.8%"),
)


def draw(count: int, rng: np.random.Generator) -> list[str]:
    """Return ``count`` fault names in the mix's proportions, shuffled.

    Not drawn one by one: every fault gets its share to the nearest whole, the rest goes to the largest remainders.
    """
    weights = np.array([share.weight for share in MIX])
    exact = count * weights / weights.sum()
    whole = np.floor(exact).astype(int)
    rest = count - int(whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:rest]] += 1
    names = np.repeat([share.fault for share in MIX], whole)
    return [str(name) for name in rng.permutation(names)]
