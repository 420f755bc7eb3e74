"""One replica group of a torchft job on CPU (gloo): a small regression, in steps of a fixed length.

Appends a line to its log for each try at a step: Unix time, step, replica groups whose samples it holds, 1 where it
was committed.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.torchft.processes import COMPUTE_S, SAMPLES, STEP_S, Replica
from eagle_eye.orchestrators.launch.own_process import PR_SET_PDEATHSIG, prctl
from torchft import Manager, ProcessGroupGloo

OPERATION_S = 5.0
WIDTH = 64
LEARNING_RATE = 1.0
GRADIENT_NORM_MAX = 1.0


def train(replica: Replica) -> None:
    """Train until killed, at the latest with whoever started this."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(replica.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(output, standard)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, teacher = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    torch.seed()  # other samples than the others'
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # lives as long as the group
    collectives = ProcessGroupGloo(timeout=timedelta(seconds=OPERATION_S))
    manager = _manager(replica, store, collectives, model, optimizer)
    with replica.log.open("a", buffering=1, encoding="ascii") as log:
        while True:
            began_s = time.monotonic()
            manager.start_quorum()
            optimizer.zero_grad()
            samples = torch.randn(SAMPLES, WIDTH)
            loss = torch.nn.functional.mse_loss(model(samples), teacher(samples))
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            _fill_up(began_s + COMPUTE_S)
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()
            if manager.errored() is not None:
                # Only the dead group's neighbours have noticed. The others wait in the reduction until these hang up.
                collectives.abort()
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
            committed = manager.should_commit()
            if committed:
                optimizer.step()
            log.write(f"{time.time():.3f} {manager.current_step()} {manager.num_participants()} {int(committed)}\n")
            _fill_up(began_s + STEP_S)


def _manager(
    replica: Replica, store: Any, collectives: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Any:
    """Return torchft's manager of the group's only rank."""

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=collectives,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        replica_id=replica.group,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=replica.lighthouse,
        hostname=replica.host,
        timeout=timedelta(seconds=OPERATION_S),
        quorum_timeout=timedelta(seconds=30.0),
    )


def _fill_up(until_s: float) -> None:
    time.sleep(max(0.0, until_s - time.monotonic()))
