"""What dashboards, receivers and configurations build on keeps name and meaning: docs/reference/compatibility.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.names import names

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "compatibility" / "names.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("group", sorted(RECORDED))
def test_no_name_went_away_or_means_something_else(group: str) -> None:
    recorded, now = RECORDED[group], names()[group]
    if group == "events":  # which may come to say more
        now = {kind: [each for each in said if each in now.get(kind, ())] for kind, said in recorded.items()}
    assert recorded.items() <= now.items()
