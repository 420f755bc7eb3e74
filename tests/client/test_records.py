"""The types of records are the server's own."""

from __future__ import annotations

from tests.client import record_types


def test_the_types_of_records_are_those_of_the_api() -> None:
    again = "run: .venv/bin/python -m tests.client.record_types"
    assert record_types.FILE.read_text(encoding="utf-8") == record_types.declarations(), again
