"""Flight-recorder dumps of a process that has made its process groups anew."""

from __future__ import annotations

from typing import Any

from eagle_eye.schema.flight_recorder import entries_of


def entry(name: str, number: int | str, sequence: int) -> dict[str, Any]:
    return {"process_group": [name, "default_pg"], "pg_id": number, "collective_seq_id": sequence}


def test_operations_of_a_group_that_was_made_anew_under_its_name_are_those_of_the_last_one() -> None:
    entries = [entry("0", 0, 811), entry("1", 1, 7), entry("0", 2, 1), entry("1", 3, 1), entry("0", 2, 2)]
    assert entries_of({"entries": entries}) == entries[2:]


def test_groups_that_were_made_once_keep_all_of_theirs() -> None:
    entries = [entry("0", 0, 1), entry("1", 1, 1), entry("0", 0, 2)]
    assert entries_of({"entries": entries}) == entries


def test_an_operation_that_does_not_say_of_which_group_it_is_stays() -> None:
    entries = [entry("0", 0, 811), entry("0", "x", 5), {"pg_id": 0}, entry("0", 2, 1)]
    assert entries_of({"entries": entries}) == entries[1:]
