"""Names in the order in which people count them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.names import natural_order


@given(st.lists(st.text(max_size=12)))
def test_any_names_can_be_put_in_order(names: list[str]) -> None:
    sorted(names, key=natural_order)
    assert sorted(["n10", "n2", "n1"], key=natural_order) == ["n1", "n2", "n10"]
