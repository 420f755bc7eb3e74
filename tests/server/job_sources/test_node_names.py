"""Names that mean one node, and those that do not."""

from __future__ import annotations

import pytest

from eagle_eye.server.model.node_names import NodeNames

NAMES = NodeNames(["gpu1.cluster.local", "GPU2", "a.rack1", "a.rack2", "b", "b.rack1"])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("gpu1", "gpu1.cluster.local"),
        ("GPU1.Cluster.Local", "gpu1.cluster.local"),
        ("gpu1.other", None),
        ("gpu2.cluster.local", "GPU2"),
        ("a", None),
        ("a.rack1", "a.rack1"),
        ("b.rack2", "b"),
        ("gpu3", None),
    ],
)
def test_a_name_is_found_but_for_case_and_domain(theirs: str, ours: str | None) -> None:
    assert NAMES.ours(theirs) == ours
