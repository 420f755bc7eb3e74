from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle_eye.agent.collector import Drops, Observed
from eagle_eye.agent.collectors.training import TrainingCollector
from tests.agent.fakes import until

pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[ml]")

EXPECTED = {
    "train_step",
    "train_step_seconds",
    "train_compute_seconds",
    "train_data_wait_seconds",
    "train_loss",
    "train_grad_norm",
    "train_local_grad_norm",
    "train_tokens_per_second",
    "nccl_sequence",
    "nccl_completed_sequence",
    "nccl_collective_seconds",
}


@pytest.mark.slow
def test_a_data_parallel_job_is_seen_whole(tmp_path: Path) -> None:
    drops = Drops()
    collector = TrainingCollector(tmp_path / "hook.sock", drops)
    collector.open()
    seen: list[Observed] = []
    environ = {
        **os.environ,
        "EAGLE_EYE_HOOK_SOCKET": str(tmp_path / "hook.sock"),
        "EAGLE_EYE_JOB": "ddp",
        "OMP_NUM_THREADS": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
    }
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with subprocess.Popen([*job, str(Path(__file__).with_name("ddp_job.py")), "3"], env=environ) as process:

        def look() -> bool:
            seen.append(collector.collect(time.time()))
            time.sleep(0.2)
            return process.poll() is not None

        until(look, 120.0)
        assert process.returncode == 0
    seen.append(collector.collect(time.time()))
    collector.close()

    both = [each.devices for each in seen if set(each.devices) == {0, 1} and each.devices[0].keys() >= EXPECTED]
    assert len(both) > 3
    row = both[len(both) // 2]
    assert EXPECTED == set(row[0]) == set(row[1])

    def typical(rank: int, name: str) -> float:
        return statistics.median(each[rank][f"{name}_seconds"] for each in both)

    for rank in (0, 1):
        # Not all of these short steps are looked into: the parts are those of some, the duration is that of all.
        parts = sum(typical(rank, name) for name in ("train_compute", "train_data_wait", "nccl_collective"))
        assert 0.5 * typical(rank, "train_step") < parts < 1.2 * typical(rank, "train_step")
        assert row[rank]["nccl_sequence"] >= row[rank]["nccl_completed_sequence"] > row[rank]["train_step"]
        assert typical(rank, "train_data_wait") > 0.004
    # Who has more work computes longer, and the other waits for it.
    assert typical(1, "train_compute") > typical(0, "train_compute")
    assert typical(1, "nccl_collective") < typical(0, "nccl_collective")

    ranks = {(r.rank, r.device, r.world_size, r.job) for each in seen for r in each.ranks}
    assert ranks == {(0, 0, 2, "ddp"), (1, 1, 2, "ddp")}
    exits = [event for each in seen for event in each.events if event.kind == "process_exit"]
    assert [(e.attributes["exit_code"], e.attributes["goodbye"]) for e in exits] == [(0, True)] * 2
    assert drops.snapshot() == {}
