"""The ids of actions and incidents: the same has the same, and the next of the same another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from eagle_eye.server.model.records import IDS_AT_ONCE, Derived, OpenedIncident, WantedAction, derived_id, new_id

REQUEST = WantedAction("job", 3, "exclude_node", ("n1", "n2"))
OPENED = OpenedIncident("job", 3, "stop")
EACH = pytest.mark.parametrize("what", [REQUEST, OPENED], ids=["action", "incident"])


def test_the_same_request_has_the_same_id_in_whatever_order_its_nodes_are_named() -> None:
    assert derived_id("salt", REQUEST, 0) == derived_id("salt", REQUEST._replace(nodes=["n2", "n1"]), 0)


def test_an_id_is_one_that_subscribers_and_paths_take() -> None:
    assert re.fullmatch(r"act_[0-9a-f]{16}", derived_id("salt", REQUEST, 0))
    assert re.fullmatch(r"inc_[0-9a-f]{16}", derived_id("salt", OPENED, 0))


@pytest.mark.parametrize(
    "other",
    [{"job": "another"}, {"attempt": 4}, {"kind": "drain_node"}, {"nodes": ("n1",)}, {"nodes": ("n1,n2",)}],
    ids=str,
)
def test_what_differs_in_job_attempt_kind_or_nodes_has_another_id(other: dict[str, Any]) -> None:
    assert derived_id("salt", REQUEST._replace(**other), 0) != derived_id("salt", REQUEST, 0)


@pytest.mark.parametrize("other", [{"job": "another"}, {"attempt": 4}, {"family": "slow:n1"}], ids=str)
def test_what_differs_in_job_attempt_or_family_is_another_incident(other: dict[str, Any]) -> None:
    assert derived_id("salt", OPENED._replace(**other), 0) != derived_id("salt", OPENED, 0)


@EACH
def test_other_records_make_other_ids(what: Derived) -> None:
    assert derived_id("other", what, 0) != derived_id("salt", what, 0)


@EACH
@pytest.mark.parametrize("before", [0, 1, IDS_AT_ONCE - 1, IDS_AT_ONCE, 3 * IDS_AT_ONCE])
def test_the_next_of_the_same_has_the_first_number_that_no_record_has(before: int, what: Derived) -> None:
    kept = {derived_id("salt", what, number) for number in range(before)}

    def missing(ids: Sequence[str]) -> list[str]:
        return [one for one in ids if one not in kept]

    assert new_id("salt", what, missing) == derived_id("salt", what, before)
