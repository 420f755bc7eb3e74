"""How training processes end, and the errors of their peers. Texts are those of NCCL, Gloo, CUDA and torch."""

from __future__ import annotations

from eagle_eye.simulator.story import Death, Place, Story

ABORT, SEGMENTATION_FAULT, KILLED, TERMINATED = -6, -11, -9, -15
CUDA_ERROR = "RuntimeError: CUDA error: unspecified launch failure"
ECC_ERROR = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU {device} has a total capacity of "
    "79.11 GiB of which 1.02 GiB is free."
)
REMOTE_ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was "
    "a network error. ncclRemoteError: Last error: socketProgress: Connection closed by remote peer {peer}<47102>"
)
RESET = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.4.{n}.17]:23961"
)
WATCHDOG = (
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, "
    "OpType=_REDUCE_SCATTER_BASE, NumelIn=268435456, NumelOut=33554432, Timeout(ms)={timeout_ms}) "
    "ran for {timeout_ms} milliseconds before timing out."
)
NCCL_TIMEOUTS_S = (600.0, 600.0, 1800.0)  # torch's default is 10 minutes, many sites take 30


def crash(story: Story, at: Place, time_s: float, exit_code: int, text: str | None) -> None:
    """End one process: its launcher ends the node's others, peers wait, some of them notice.

    ``text`` is the exception that ended it, None where it died without a word.
    """
    rng, layout = story.rng, story.layout
    rank = story.rank(at)
    if text is not None:
        story.say(time_s - 0.05, "training_error", at.node, at.device, text=text, rank=rank)
    end(story, (at,), time_s, exit_code)
    local = tuple(place for place in story.places(at.node) if place != at)
    if local:
        # torchrun's agent looks at its children a few times a second and ends the rest by SIGTERM.
        end(story, local, time_s + float(rng.uniform(0.3, 6.0)), TERMINATED)
    if rng.random() < 0.5 and layout.nodes > 1:
        _echo(story, at, time_s)
    abort_peers(story, (at.node,), time_s)


def end(story: Story, places: tuple[Place, ...], time_s: float, exit_code: int) -> None:
    """End processes with an exit code (negative: a signal)."""
    story.deaths.append(Death(time_s, places))
    for place in places:
        moment_s = time_s + float(story.rng.uniform(0.0, 0.2))
        story.say(
            moment_s,
            "process_exit",
            place.node,
            place.device,
            exit_code=exit_code,
            rank=story.rank(place),
            goodbye=False,
        )


def abort_peers(story: Story, without: tuple[int, ...], stopped_s: float) -> None:
    """Let NCCL's watchdog end all waiting ranks when its timeout has passed, if the trace lasts that long."""
    rng, layout = story.rng, story.layout
    timeout_s = float(rng.choice(NCCL_TIMEOUTS_S))
    moment_s = stopped_s + timeout_s + float(rng.uniform(0.0, 2.0))
    if moment_s >= story.scenario.duration_s:
        return
    sequence = story.job.first_step * story.job.collectives
    for node in range(layout.nodes):
        if node in without:
            continue
        at_s = moment_s + float(rng.uniform(0.0, 3.0))
        for place in story.places(node):
            rank = story.rank(place)
            text = WATCHDOG.format(rank=rank, sequence=sequence, timeout_ms=int(timeout_s * 1000))
            story.say(at_s - 0.1, "training_error", node, place.device, text=text, rank=rank)
        end(story, story.places(node), at_s, ABORT)


def _echo(story: Story, at: Place, time_s: float) -> None:
    """Let one to three nodes that talked to the dead process fail by that, seconds later."""
    rng, layout = story.rng, story.layout
    others = [n for n in range(layout.nodes) if n != at.node]
    number = min(len(others), int(rng.integers(1, 4)))
    text = REMOTE_ERROR.format(peer=layout.names[at.node]) if rng.random() < 0.6 else RESET.format(n=at.node % 250)
    for node in rng.choice(others, number, replace=False).tolist():
        moment_s = time_s + float(rng.uniform(1.0, 20.0))
        for place in story.places(node):
            story.say(moment_s, "training_error", node, place.device, text=text, rank=story.rank(place))
        end(story, story.places(node), moment_s + 0.3, 1)
