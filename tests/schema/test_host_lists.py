"""Slurm's host lists as names: as Slurm itself expands them, and within limits whatever is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.slurm import BadHostList, expand_hosts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("(null)", ()),
        ("n1", ("n1",)),
        ("gpu[001-003,7],login", ("gpu001", "gpu002", "gpu003", "gpu7", "login")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("rack[1-2]node[1-2]-ib", ("rack1node1-ib", "rack1node2-ib", "rack2node1-ib", "rack2node2-ib")),
        ("n[1,3-4].cluster.local", ("n1.cluster.local", "n3.cluster.local", "n4.cluster.local")),
    ],
)
def test_lists_are_expanded_as_slurm_does(text: str, names: tuple[str, ...]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    "text", ["n[1-", "n]1[", "n[[1]]", "n[2-1]", "n[a-b]", "n[]", "[1-2]", "a,,b", "a b", "n[1-99999999999999999999]"]
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(BadHostList):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["n[1-65537]", "a[1-999]b[1-999]c[1-999]", "n[0-999999999999999999]"])
def test_a_list_that_stands_for_too_many_is_refused_at_once(text: str) -> None:
    with pytest.raises(BadHostList, match="more than 65536"):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["n" * 256, "n[1-65536]" + "x" * 255, "n[1-65536]" + "x" * 500_000])
def test_names_of_too_many_characters_are_refused_before_they_are_made(text: str) -> None:
    with pytest.raises(BadHostList, match="more than 255 characters"):
        expand_hosts(text)


@given(st.text(alphabet="n01-9[],.-|\n é", max_size=60))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        names = expand_hosts(text, 100)
    except BadHostList:
        return
    assert len(names) <= 100
    assert all(name and name.isprintable() and not set(name) & set("[],") for name in names)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5)), min_size=1, max_size=5))
def test_ranges_keep_the_width_in_which_they_are_written(ranges: list[tuple[int, int]]) -> None:
    text = ",".join(f"{first:04d}-{first + more:04d}" for first, more in ranges)
    expected = tuple(f"n{first + step:04d}" for first, more in ranges for step in range(more + 1))
    assert expand_hosts(f"n[{text}]") == expected
