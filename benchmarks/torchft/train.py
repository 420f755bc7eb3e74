"""One replica group of a torchft job on CPU (gloo): a small regression, in steps of a fixed length.

Appends a line to its log for each try at a step: Unix time, step, replica groups whose samples it holds, 1 where it
was committed, loss of the group's own samples ("-" where the step does not hold them). A file may say that its host is
slow, or wrong in its gradients.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.torchft.processes import COMPUTE_S, SAMPLES, STEP_S, Replica
from eagle_eye.agent.hook import attach
from eagle_eye.orchestrators.launch.own_process import PR_SET_PDEATHSIG, prctl
from torchft import Manager, ProcessGroupGloo

OPERATION_S = 5.0
WIDTH = 64
NOISE = 0.1  # of what is to be learnt, so that the loss stays level once it is
LEARNING_RATE = 1.0
GRADIENT_NORM_MAX = 1.0
CHECKPOINT_STEPS = 20
# What a sick host does to the time that computing takes, and to gradients before the reduction.
SLOWDOWN = {"slow": 2.5}
FACTOR = {"nan": float("nan"), "corrupt": -30.0}


def train(replica: Replica) -> None:
    """Train until killed, at the latest with whoever started this."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(replica.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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
    if replica.resume_from is not None:
        _resume(replica.resume_from, manager, model, optimizer)
    os.environ.update(replica.hook)
    training = attach(step=manager.current_step()) if replica.hook else None
    with replica.log.open("a", buffering=1, encoding="ascii") as log:
        while True:
            began_s, fault = time.monotonic(), _fault(replica.fault)
            manager.start_quorum()
            optimizer.zero_grad()
            samples = torch.randn(SAMPLES, WIDTH)
            wanted = teacher(samples) + NOISE * torch.randn(SAMPLES, WIDTH)
            loss = torch.nn.functional.mse_loss(model(samples), wanted)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            for gradient in gradients:
                gradient.mul_(FACTOR.get(fault, 1.0))
            own_norm = torch.nn.utils.get_total_norm(gradients).item()
            _fill_up(began_s + COMPUTE_S * SLOWDOWN.get(fault, 1.0))
            computed_s = time.monotonic()
            for gradient in gradients:
                manager.allreduce(gradient).wait()
            if manager.errored() is not None:
                # Only the dead group's neighbours have noticed. The others wait in the reduction until these hang up.
                collectives.abort()
            reduced_s = time.monotonic()
            torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
            committed = manager.should_commit()
            if committed:
                optimizer.step()
            step, taken_part = manager.current_step(), committed and manager.is_participating()
            said = f"{loss.item():.6g}" if taken_part else "-"
            log.write(f"{time.time():.3f} {step} {manager.num_participants()} {int(committed)} {said}\n")
            if training is not None and taken_part:
                training.step(
                    step=step,
                    loss=loss.item(),
                    local_grad_norm=own_norm,
                    tokens=SAMPLES,
                    compute_s=computed_s - began_s,
                    collective_s=reduced_s - computed_s,
                )
            if taken_part and manager.participating_rank() == 0 and step % CHECKPOINT_STEPS == 0:
                _keep(replica.checkpoints, manager, model, optimizer)
            _fill_up(began_s + STEP_S)


def _manager(
    replica: Replica, store: Any, collectives: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Any:
    """Return torchft's manager of the group's only rank."""

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=collectives,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
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


def _keep(folder: Path, manager: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The folder, where there is one, has a whole checkpoint of this step."""
    if folder.exists():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "torchft": manager.state_dict()}
        unfinished = folder / f"{manager.current_step()}.unfinished"
        torch.save(state, unfinished)
        unfinished.rename(unfinished.with_suffix(".pt"))


def _resume(file: Path, manager: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Model, optimizer and step are the checkpoint's."""
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    manager.load_state_dict(state["torchft"])


def _fault(file: Path) -> str:
    """Return what is wrong with the host, "" where nothing is."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_text(encoding="ascii")
    return ""


def _fill_up(until_s: float) -> None:
    time.sleep(max(0.0, until_s - time.monotonic()))
