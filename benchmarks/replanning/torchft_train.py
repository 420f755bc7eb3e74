"""A replica group of torchft on one node: the layers of the job of pipelines, and its share of each step's samples.

Needs torchft. A step takes as long with fewer groups, and holds fewer samples.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it in its first step, for seconds, while all other groups wait
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.checkpointing.http_transport import HTTPTransport

from benchmarks.replanning.plain_train import keep, resume
from benchmarks.torchft.processes import COMPUTE_S, STEP_S
from eagle_eye.agent.hook import attach
from eagle_eye.demo.pipeline_train import (
    GRADIENT_NORM_MAX,
    LAYERS,
    LEARNING_RATE,
    NO_TARGET,
    Samples,
    make_layer,
)
from eagle_eye.demo.train import log_step
from eagle_eye.orchestrators.torchft.disconnect_excluded import Release
from torchft import Manager, ProcessGroupGloo

COMPUTED_RATIO = COMPUTE_S / STEP_S  # of a step, before its reduction: that is when most faults come
QUORUM_S = 60.0  # torchft's default


class Transport(HTTPTransport[dict[str, Any]]):  # type: ignore[misc]  # torchft is not typed for us
    """State over HTTP from the node's own address: all nodes here have this machine's name."""

    def __init__(self, address: str, timeout: timedelta) -> None:
        self._own = address
        super().__init__(timeout, num_chunks=0)

    def address(self) -> str:
        """Return where others get the state, without the step."""
        return f"http://{self._own}:{self._server.socket.getsockname()[1]}/checkpoint/"


def main() -> None:
    """Train until killed."""
    args = _arguments()
    torch.set_num_threads(1)
    samples = Samples()
    model = nn.Sequential(*(make_layer(number, samples.characters) for number in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    store = TCPStore(args.address, 0, is_master=True, wait_for_workers=False)  # all groups meet at one of these
    within = timedelta(seconds=args.collective_seconds_max)
    collectives = ProcessGroupGloo(timeout=within)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=collectives, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1, replica_id=f"group_{args.group}", rank=0, world_size=1,
        store_addr=args.address, store_port=store.port, lighthouse_addr=args.lighthouse, hostname=args.address,
        timeout=within, quorum_timeout=timedelta(seconds=QUORUM_S),
        checkpoint_transport=Transport(args.address, within),
    )  # fmt: skip
    state = {"model": model, "optimizer": optimizer, "torchft": manager}
    resume(args.checkpoint_dir, state)
    training = None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    if args.watched:  # after torchft, for which these two mean ranks within the group
        os.environ.update(RANK=str(args.group), WORLD_SIZE=str(args.nodes))
        training = attach(step=manager.current_step())
        peers = json.loads(args.peers)
        waiting = Release(args.exclude_file, lambda node: [peers[node]]).waiting
    share = args.global_batch // args.nodes
    while True:
        began_s = time.monotonic()
        manager.start_quorum()
        optimizer.zero_grad()
        begin = manager.current_step() * args.global_batch + args.group * share
        inputs, targets = samples.batch(range(begin, begin + share))
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        summed = nn.utils.parameters_to_vector(gradients)
        _fill_up(began_s + COMPUTED_RATIO * args.step_seconds)
        computed_s = time.monotonic()
        with waiting():
            manager.allreduce(summed).wait()
        if manager.errored() is not None:
            # Only the dead group's neighbours have noticed. The others wait in the reduction until these hang up.
            collectives.abort()
        reduced_s = time.monotonic()
        nn.utils.vector_to_parameters(summed, gradients)
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        if manager.should_commit():
            optimizer.step()
            if manager.participating_rank() == 0:
                step, groups = manager.current_step(), manager.num_participants()
                log_step(args.step_log, step=step, attempt=0, ranks=groups, samples=groups * share, loss=loss.item())
                if step % args.checkpoint_every == 0:
                    keep(args.checkpoint_dir, step, state)
            if training is not None and manager.is_participating():
                training.step(
                    step=manager.current_step(),
                    loss=loss.item(),
                    tokens=share,
                    compute_s=computed_s - began_s,
                    collective_s=reduced_s - computed_s,
                )
        _fill_up(began_s + args.step_seconds)


def _fill_up(until_s: float) -> None:
    time.sleep(max(0.0, until_s - time.monotonic()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--group", type=int, required=True, help="from 0 on")
    add("--address", required=True, help="of the node")
    add("--lighthouse", required=True, help="URL")
    add("--global-batch", type=int, required=True)
    add("--step-log", type=Path, required=True)
    add("--nodes", type=int, required=True)
    add("--step-seconds", type=float, required=True)
    add("--collective-seconds-max", type=float, required=True)
    add("--checkpoint-dir", type=Path, required=True)
    add("--checkpoint-every", type=int, required=True)
    add("--watched", action="store_true", help="by Eagle Eye's hook")
    add("--exclude-file", type=Path, help="of the orchestrator, where it is watched")
    add("--peers", metavar="JSON", help="the nodes' addresses by name, where it is watched")
    return parser.parse_args()


if __name__ == "__main__":
    main()
