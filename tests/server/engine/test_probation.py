from __future__ import annotations

import pytest

from eagle_eye.server.engine.ledger import probation
from eagle_eye.server.engine.settings import PolicySettings
from tests.server.engine.situations import NOW_S, past

SETTINGS = PolicySettings(probation_s=100, probation_s_max=350)


@pytest.mark.parametrize(("times", "until_s"), [(0, None), (1, None), (2, 100), (3, 200), (4, 350), (900, 350)])
def test_each_exclusion_needs_twice_as_long_up_to_a_limit(times: int, until_s: float | None) -> None:
    done = [past(id=str(number), exclude=["n1"], updated_s=NOW_S) for number in range(times)]
    found = probation("n1", done, SETTINGS, NOW_S + 1)
    assert found == (found.__class__(times, None if until_s is None else NOW_S + until_s))


def test_only_what_was_done_lately_to_the_node_itself_counts() -> None:
    others = [
        past(exclude=["n2"], updated_s=NOW_S),
        past(exclude=["n1"], updated_s=NOW_S, state="failed"),
        past(exclude=["n1"], updated_s=NOW_S, kind="drain_node"),
        past(exclude=["n1"], updated_s=NOW_S - SETTINGS.flapping_window_s - 1),
        past(exclude=["n1"], updated_s=NOW_S),
    ]
    assert probation("n1", others, SETTINGS, NOW_S) == probation("n1", others[-1:], SETTINGS, NOW_S)
