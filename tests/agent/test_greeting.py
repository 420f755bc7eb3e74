"""An agent's greeting: once, when the server takes its frames, with what is read and what is not."""

from __future__ import annotations

import logging

import pytest

from eagle_eye.agent.collector import SIMULATED, CollectorStanding, Observed, TickFrame
from eagle_eye.agent.command import Greeting, greeting

URL = "http://server:8470"


def standing(name: str, state: str = "ok") -> CollectorStanding:
    return CollectorStanding(name, state, 0.0, 0)


def tick(*collectors: CollectorStanding) -> TickFrame:
    return TickFrame(0.0, 1.0, Observed(), (), collectors, 1)


def test_a_host_that_has_everything_is_told_of_no_lack() -> None:
    assert (
        greeting("n1", URL, [standing("host"), standing("nvml")]) == f"connected to {URL} as n1: 2 sources read in full"
    )


def test_what_is_not_read_is_named_with_whether_it_matters() -> None:
    collectors = [
        standing("host"),
        standing("nvml", SIMULATED),
        standing("processes", "failed: grant CAP_SYS_PTRACE"),
        standing("temperature", "unsupported: no sensor"),
        standing("fabric", "unsupported: no RDMA device"),
    ]
    assert greeting("n1", URL, collectors) == (
        f"connected to {URL} as n1: 1 source read in full; simulated: nvml;"
        " to be mended, as eagle-eye doctor says: processes; not on this host, which is no fault: fabric, temperature"
    )


def test_it_is_said_once_and_not_before_the_server_has_taken_a_frame(caplog: pytest.LogCaptureFixture) -> None:
    place = [""]
    one = Greeting("n1", lambda: place[0])
    with caplog.at_level(logging.INFO, "eagle_eye.agent"):
        one.show(tick(standing("host")))
        assert caplog.messages == []
        place[0] = URL
        one.show(tick(standing("host")))
        one.show(tick(standing("host")))
    assert caplog.messages == [f"connected to {URL} as n1: 1 source read in full"]
