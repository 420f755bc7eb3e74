from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.fakes import FakeClock, Listener


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    end = Listener(tmp_path / "hook.sock")
    yield end
    end.close()
