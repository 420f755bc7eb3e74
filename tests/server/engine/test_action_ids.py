"""The ids of actions: the same request has the same, and the next of the same another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from eagle_eye.server.engine.action_ids import AT_ONCE, WantedAction, action_id, new_action_id

REQUEST = WantedAction("job", 3, "exclude_node", ("n1", "n2"))


def test_the_same_request_has_the_same_id_in_whatever_order_its_nodes_are_named() -> None:
    assert action_id("salt", REQUEST, 0) == action_id("salt", REQUEST._replace(nodes=["n2", "n1"]), 0)


def test_an_id_is_one_that_subscribers_and_paths_take() -> None:
    assert re.fullmatch(r"act_[0-9a-f]{16}", action_id("salt", REQUEST, 0))


@pytest.mark.parametrize(
    "other",
    [{"job": "another"}, {"attempt": 4}, {"kind": "drain_node"}, {"nodes": ("n1",)}, {"nodes": ("n1,n2",)}],
    ids=str,
)
def test_what_differs_in_job_attempt_kind_or_nodes_has_another_id(other: dict[str, Any]) -> None:
    assert action_id("salt", REQUEST._replace(**other), 0) != action_id("salt", REQUEST, 0)


def test_other_records_make_other_ids() -> None:
    assert action_id("other", REQUEST, 0) != action_id("salt", REQUEST, 0)


@pytest.mark.parametrize("before", [0, 1, AT_ONCE - 1, AT_ONCE, 3 * AT_ONCE])
def test_the_next_of_the_same_has_the_first_number_that_no_record_has(before: int) -> None:
    kept = {action_id("salt", REQUEST, number) for number in range(before)}

    def missing(ids: Sequence[str]) -> list[str]:
        return [one for one in ids if one not in kept]

    assert new_action_id("salt", REQUEST, missing) == action_id("salt", REQUEST, before)
