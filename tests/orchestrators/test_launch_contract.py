"""The launcher's state machine under the claims that every orchestrator has to keep; runners that obey at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.command import LaunchOrchestrator
from eagle_eye.orchestrators.launch.state import ENDED
from eagle_eye.orchestrators.protocol import CannotCarryOutError, JobState
from tests.orchestrators.contract import OrchestratorContract
from tests.orchestrators.test_machine import NODES, Story


class PlayedCoordinator:
    """Stands where the coordinator stands: asks the machine, has runners obey, hands the answers back."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self._requests = 100

    def request(self, make: Callable[[int], on.LaunchEvent]) -> str:
        self._requests += 1
        self.post(make(self._requests))
        for order in reversed(self.story.everything):
            if isinstance(order, to.Answer) and order.request == self._requests:
                if not order.success:
                    raise CannotCarryOutError(order.text)
                return order.text
            if isinstance(order, to.Running) and self._requests in order.requests:
                return f"attempt {order.attempt} runs on {', '.join(order.nodes)}"
        raise AssertionError(f"no answer to {self._requests}: {self.story.everything[-5:]}")

    def post(self, event: on.LaunchEvent) -> None:
        self.story.happens(event)
        self.obey()

    def obey(self) -> None:
        """Runners stop and start what they are told to, until nothing is left to do."""
        while orders := [one for one in self.story.orders if isinstance(one, to.StopRanks | to.StartRanks)]:
            follow: list[on.LaunchEvent] = []
            for order in orders:
                if isinstance(order, to.StopRanks):
                    follow += [on.RanksStopped(node) for node in order.nodes]
                else:
                    follow += [on.RanksStarted(node, order.attempt) for node in order.nodes]
            self.story.happens(*follow)

    def job_state(self) -> JobState:
        state = self.story.state
        return JobState(state.attempt, frozenset(NODES), state.phase not in ENDED)


class Launched:
    """A job on three of four nodes."""

    job = "j"
    node = "n2"

    def __init__(self) -> None:
        self.story = Story().running()
        self.coordinator = PlayedCoordinator(self.story)
        self.orchestrator = self._orchestrator()

    def _orchestrator(self) -> LaunchOrchestrator:
        return LaunchOrchestrator(cast("Any", self.coordinator), self.job)

    def reopened(self) -> LaunchOrchestrator:
        self.story.is_killed_and_started_again()
        self.coordinator.obey()
        self.story.all_ready()
        self.coordinator.obey()
        return self._orchestrator()

    def runs_on(self) -> frozenset[str]:
        state = self.story.state
        return frozenset() if state.phase in ENDED else frozenset(state.members)

    def out(self) -> frozenset[str]:
        return frozenset(self.story.state.excluded | self.story.state.draining)

    def snapshot(self) -> tuple[object, ...]:
        state = self.story.state
        return (state.attempt, state.phase, state.members, *sorted(self.out()))


class TestLaunch(OrchestratorContract):
    @pytest.fixture
    def world(self) -> Launched:
        return Launched()
