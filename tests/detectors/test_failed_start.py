"""Who alone could not reach the others when the ranks met, and when nobody can tell."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from eagle_eye.detectors.progress.failed_start import FailedStart
from eagle_eye.detectors.types import Verdict
from tests.detectors.windows import NOW_S, Story

START = FailedStart(settle_s=1.0, silent_s=5.0)
FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 3, in main\n    init_process_group(timeout=9)\n'
GLOO = (
    "RuntimeError: [enforce fail at third_party/gloo/gloo/transport/tcp/socket.cc:142] rv != -1. -1 vs -1."
    " connect: Invalid argument"
)
CANNOT_CONNECT = [
    GLOO,
    "RuntimeError: Gloo connectFullMesh failed with [third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
    "RuntimeError: timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.3]:2991",
    (
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to"
        " (10.0.0.1, 29500)."
    ),
    (
        "torch.distributed.DistNetworkError: The client socket has failed to connect to [n0]:29500 (errno: 113 - No"
        " route to host)."
    ),
    (
        "torch.distributed.DistBackendError: NCCL error, ncclSystemError: System call (e.g. socket, malloc) failed.\n"
        "Last error:\nsocketStartConnect: Connect to 10.0.0.3<49893> failed : Connection timed out"
    ),
    (
        "torch.distributed.DistBackendError: NCCL error\nLast error:\nCall to ibv_modify_qp failed with 110 Connection"
        " timed out"
    ),
]
LOST = "RuntimeError: Connection closed by peer [10.0.0.2]:4711"
WAITED = "torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 2/3 clients joined."


def starting(nodes: int = 3) -> Story:
    """An attempt whose ranks have made no step."""
    story = Story(nodes)
    story.device = {"gpu_power_watts": np.full((60, nodes), 90.0)}
    return story


def judged(story: Story, *unreached: str) -> list[Verdict]:
    window = story.window()
    beginning = dataclasses.replace(window.beginning, unreached=unreached)
    return START.detect(dataclasses.replace(window, beginning=beginning))


@pytest.mark.parametrize("words", CANNOT_CONNECT)
def test_the_node_whose_rank_alone_could_not_connect_is_named_and_the_job_restarted(words: str) -> None:
    (verdict,) = judged(starting().exit("n1", 1, 5, FRAMES + words))
    assert (verdict.fault, verdict.node, verdict.asks) == ("network_hang", "n1", "restart_job")


@pytest.mark.parametrize("words", [LOST, WAITED])
def test_ranks_that_ended_because_it_had_gone_or_did_not_come_are_no_other_accused(words: str) -> None:
    story = starting().exit("n1", 1, 5, FRAMES + GLOO).exit("n0", 1, 4, FRAMES + words)
    (verdict,) = judged(story)
    assert verdict.node == "n1"


def test_a_second_such_start_is_surer() -> None:
    story = starting().exit("n1", 1, 5, GLOO)
    assert judged(story, "n1")[0].confidence > judged(story)[0].confidence
    assert "2 starts in a row" in judged(story, "n1")[0].summary


def test_starts_in_a_row_that_accuse_different_nodes_accuse_none() -> None:
    (verdict,) = judged(starting().exit("n1", 1, 5, GLOO), "n2")
    assert (verdict.node, verdict.nodes) == (None, ("n1", "n2"))
    assert "cannot be told" in verdict.summary


def test_of_two_nodes_nobody_can_tell() -> None:
    assert judged(starting(2).exit("n1", 1, 5, GLOO)) == []


def test_where_several_did_not_reach_others_as_behind_one_switch_nobody_is_accused() -> None:
    assert judged(starting(6).exit("n1", 1, 5, GLOO).exit("n2", 1, 5, GLOO)) == []


@pytest.mark.parametrize("words", ["KeyError: 3", "", "RuntimeError: CUDA error: unspecified launch failure"])
def test_a_rank_that_ended_of_anything_else_is_another_story(words: str) -> None:
    assert judged(starting().exit("n1", 1, 5, GLOO).exit("n0", 1, 4, words)) == []


@pytest.mark.parametrize("words", [LOST, WAITED, "KeyError: 3", ""])
def test_who_could_connect_is_not_accused(words: str) -> None:
    assert judged(starting().exit("n1", 1, 5, words)) == []


def test_a_source_line_that_speaks_of_connections_is_no_error() -> None:
    frames = 'Traceback (most recent call last):\n  File "t.py", line 3, in f\n    raise E("connection refused")\n'
    assert judged(starting().exit("n1", 1, 5, frames + "KeyError: 3")) == []


def test_a_peer_that_was_told_to_stop_before_is_what_was_not_reached() -> None:
    assert judged(starting().exit("n0", -15, 6).exit("n1", 1, 5, GLOO)) == []


def test_peers_that_are_cleaned_up_afterwards_change_nothing() -> None:
    assert judged(starting().exit("n1", 1, 5, GLOO).exit("n0", -15, 3))[0].node == "n1"


def test_a_node_that_is_not_heard_may_be_what_was_not_reached() -> None:
    story = starting().exit("n1", 1, 8, GLOO)
    story.heard_s[2] = NOW_S - 9
    assert judged(story) == []


def test_the_others_ends_are_waited_for() -> None:
    assert judged(starting().exit("n1", 1, 0.5, GLOO)) == []


def test_a_job_that_makes_steps_has_started() -> None:
    assert judged(Story(3).exit("n1", 1, 5, GLOO)) == []
