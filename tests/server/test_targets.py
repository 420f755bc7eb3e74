from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from eagle_eye.server.delivery.attempts import WebhookSettings
from eagle_eye.server.delivery.webhook import Targets, target_of
from tests.server.builders import FakeClock


@dataclass
class Load:
    """What goes on at targets at a time."""

    under_way: int = 0
    most: int = 0
    done: list[str] = field(default_factory=list)

    async def visit(self, targets: Targets, url: str, until: asyncio.Event | None = None) -> None:
        async with targets.turn(url):
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            if until is not None:
                await until.wait()
            await asyncio.sleep(0)
            self.under_way -= 1
            self.done.append(url)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://Hook.Example./a", "hook.example:443"),
        ("https://hook.example:443/b?x=1", "hook.example:443"),
        ("http://hook.example", "hook.example:80"),
        ("http://[::1]:9093/", "::1:9093"),
    ],
)
def test_a_target_is_a_host_and_a_port_in_one_spelling(url: str, target: str) -> None:
    assert target_of(url) == target


def test_no_more_go_to_one_target_at_a_time_than_are_allowed_and_all_get_there() -> None:
    load = Load()

    async def story() -> None:
        targets = Targets(WebhookSettings(target_concurrency=3), FakeClock())
        await asyncio.gather(*(load.visit(targets, f"https://hook.example/{n}") for n in range(20)))

    asyncio.run(story())
    assert (load.most, len(load.done)) == (3, 20)


def test_who_waits_for_a_slow_target_is_in_nobodys_way_who_goes_elsewhere() -> None:
    slow, fast = Load(), Load()

    async def story() -> None:
        targets = Targets(WebhookSettings(target_concurrency=2), FakeClock())
        release = asyncio.Event()
        stuck = [asyncio.create_task(slow.visit(targets, "https://slow.example/", release)) for _ in range(10)]
        await asyncio.wait_for(
            asyncio.gather(*(fast.visit(targets, "https://fast.example/") for _ in range(10))), timeout=5.0
        )
        assert (slow.most, len(slow.done), len(fast.done)) == (2, 0, 10)
        stuck[-1].cancel()
        release.set()
        await asyncio.gather(*stuck, return_exceptions=True)

    asyncio.run(story())
    assert len(slow.done) == 9


def test_urgent_requests_have_room_and_a_rate_of_their_own() -> None:
    load, clock = Load(), FakeClock()

    async def story() -> None:
        webhooks = WebhookSettings(target_concurrency=1, target_requests_per_s=1.0, target_burst=1)
        targets = Targets(webhooks, clock)
        release = asyncio.Event()
        stuck = [asyncio.create_task(load.visit(targets, "https://hook.example/", release)) for _ in range(5)]
        async with asyncio.timeout(5.0):
            async with targets.turn("https://hook.example/", urgent=True):
                pass
        for one in stuck:
            one.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)

    asyncio.run(story())


def test_a_target_is_asked_no_more_often_than_allowed() -> None:
    clock, slept = FakeClock(), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.advance(seconds)

    async def story() -> None:
        settings = WebhookSettings(target_requests_per_s=10.0, target_burst=5, target_concurrency=1)
        targets = Targets(settings, clock, sleep)
        for _ in range(25):
            async with targets.turn("https://hook.example/"):
                pass
            async with targets.turn("https://other.example/"):
                pass

    began_s = clock.time_s
    asyncio.run(story())
    assert clock.time_s - began_s == pytest.approx((25 - 5) / 10.0, abs=0.01)
