from __future__ import annotations

import re

from eagle_eye.agent.training_hook.message import HOOK_EVENTS, MESSAGE_BYTES_MAX, Totals
from tests.agent.fakes import REPOSITORY

TEXT = (REPOSITORY / "docs" / "reference" / "hook.md").read_text(encoding="utf-8")


def test_the_page_lists_the_totals_in_their_order() -> None:
    found = re.search(r"Totals: `([^`]+)`", TEXT)
    assert found is not None
    assert tuple(found.group(1).split()) == Totals._fields


def test_the_page_has_every_event_and_the_limit() -> None:
    assert f"{MESSAGE_BYTES_MAX:,} bytes" in TEXT
    for kind in HOOK_EVENTS:
        assert f"`{kind}`" in TEXT


def test_the_page_has_every_reason_for_dropping_a_message() -> None:
    source = (REPOSITORY / "agent/eagle_eye/agent/training_hook/message.py").read_text(encoding="utf-8")
    reasons = re.findall(r'BadMessage\(\s*"(\w+)"', source)
    assert reasons
    for reason in reasons:
        assert f"`{reason}`" in TEXT, reason
