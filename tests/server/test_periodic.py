"""What all periodic work on the records has in common."""

from __future__ import annotations

import asyncio
import logging

import pytest

from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.store.store import repeat


class Work:
    """Raises StoreUnavailable in the first pass, and stops the story in the third."""

    def __init__(self) -> None:
        self.story: list[str] = []

    async def sleep(self, seconds: float) -> None:
        self.story.append(f"wait {seconds:g}")

    async def work(self) -> None:
        self.story.append("work")
        if self.story.count("work") == 1:
            raise StoreUnavailable("disk full")
        if self.story.count("work") == 3:
            raise asyncio.CancelledError


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    work = Work()
    monkeypatch.setattr(asyncio, "sleep", work.sleep)
    return work


def test_a_pass_without_the_records_is_said_and_the_next_is_made(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        asyncio.run(repeat(work.work, 5.0, "nothing is swept"))
    assert work.story == ["work", "wait 5", "work", "wait 5", "work"]
    assert caplog.messages == [
        "nothing is swept: the records cannot be read or written; the next pass tries again",
    ]


def test_the_first_pass_can_wait(work: Work) -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(repeat(work.work, 5.0, "", wait_first=True))
    assert work.story[:2] == ["wait 5", "work"]


def test_any_other_error_ends_it() -> None:
    async def bug() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        asyncio.run(repeat(bug, 5.0, ""))


def test_an_interval_of_zero_means_never() -> None:
    async def work() -> None:
        raise AssertionError("switched off")

    async def story() -> None:
        task = asyncio.create_task(repeat(work, 0.0, ""))
        await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()

    asyncio.run(story())
