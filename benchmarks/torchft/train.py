"""One replica group of a torchft job on CPU (gloo): a small network, a step about every tenth of a second.

    python -m benchmarks.torchft.train GROUP HOST LOG

Appends a line to LOG for each try at a step: Unix time, step, replica groups that took part, 1 where it was committed.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchft import Manager, ProcessGroupGloo

STEP_S = 0.1
OPERATION_S = 5.0


def main() -> None:
    """Train until killed."""
    group, host, log = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=OPERATION_S)),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        replica_id=group,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname=host,
        timeout=timedelta(seconds=OPERATION_S),
        quorum_timeout=timedelta(seconds=30.0),
    )
    with Path(log).open("a", buffering=1, encoding="ascii") as steps:
        while True:
            manager.start_quorum()
            optimizer.zero_grad()
            loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            committed = manager.should_commit()
            if committed:
                optimizer.step()
            steps.write(f"{time.time():.3f} {manager.current_step()} {manager.num_participants()} {int(committed)}\n")
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()
