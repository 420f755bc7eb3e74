from __future__ import annotations

import re

import pytest

from eagle_eye.agent.collectors.tensorboard import TAGS
from eagle_eye.agent.training_logs.frameworks import FRAMEWORKS
from tests.agent.fakes import REPOSITORY

TEXT = (REPOSITORY / "docs/explanation/training-logs.md").read_text(encoding="utf-8")
MODULES = [
    *(REPOSITORY / "agent/eagle_eye/agent/training_logs").glob("*.py"),
    REPOSITORY / "agent/eagle_eye/agent/collectors/training_log.py",
    REPOSITORY / "agent/eagle_eye/agent/collectors/tensorboard.py",
]


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda item: item.name)
def test_every_framework_is_in_the_docs(framework: object) -> None:
    assert f"| `{framework.name}` |" in TEXT  # type: ignore[attr-defined]


def test_every_tag_is_in_the_docs_and_no_other() -> None:
    listed = TEXT.split("by exact tag:")[1].split(".\n")[0]
    assert set(re.findall(r"`([^`]+)`", listed)) == set(TAGS)


def test_every_reason_for_a_drop_is_in_the_docs() -> None:
    found = {
        reason
        for path in MODULES
        for reason in re.findall(r'drops\.count\(\s*"(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert len(found) > 5
    assert [reason for reason in found if f"`{reason}`" not in TEXT] == []
