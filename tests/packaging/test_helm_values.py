"""values.yaml, its schema and the chart's README name the same values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.packaging.helm_site import CHART

ROW = re.compile(r"\| `([\w.]+)` \| `(.+?)` \|(.*)\|")
NEEDED = "**needed**"


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return found


def schema() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return found


def rows() -> dict[str, tuple[str, str]]:
    """Default and words of each value in the README."""
    table = [ROW.fullmatch(line) for line in (CHART / "README.md").read_text(encoding="utf-8").splitlines()]
    return {row[1]: (row[2], row[3]) for row in table if row}


def leaves(node: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each value that may be set, as the schema has it; what any site fills by itself is one value."""
    for name, inner in node["properties"].items():
        if "properties" in inner:
            yield from leaves(inner, f"{above}{name}.")
        else:
            yield f"{above}{name}", inner


def value(dotted: str) -> Any:
    found: Any = values()
    for name in dotted.split("."):
        found = found[name]
    return found


def known() -> dict[str, Mapping[str, Any]]:
    found = dict(leaves(schema()))
    del found["global"]  # Helm's own, for charts that hold this one
    return found


def test_the_schema_knows_every_value_and_no_other() -> None:
    def paths(node: Any, above: str) -> Iterator[str]:
        for name, inner in node.items():
            dotted = f"{above}{name}"
            if isinstance(inner, dict) and dotted not in known():
                yield from paths(inner, f"{dotted}.")
            else:
                yield dotted

    assert set(paths(values(), "")) == set(known())


def test_the_readme_has_every_value_with_its_default() -> None:
    assert {name: json.loads(default) for name, (default, _) in rows().items()} == {
        name: value(name) for name in known()
    }


def test_what_is_misspelt_is_refused_at_every_level() -> None:
    def closed(node: Mapping[str, Any], where: str) -> Iterator[str]:
        if "properties" in node:
            assert node["additionalProperties"] is False, where
            for name, inner in node["properties"].items():
                yield from closed(inner, f"{where}.{name}")
            yield where

    assert len(list(closed(schema(), ""))) > 20


def test_no_default_is_a_secret() -> None:
    assert [value(name) for name in known() if name.endswith("existingSecret")] == [""] * 7
    for name in ("agent.joinToken", "orchestrator.token", "metrics.serviceMonitor.token"):
        assert NEEDED in rows()[f"{name}.existingSecret"][1]


def test_what_copies_may_take_has_no_default() -> None:
    assert value("checkpoints.memory") == ""
    assert NEEDED in rows()["checkpoints.memory"][1]


def test_the_schema_takes_the_defaults() -> None:
    jsonschema = pytest.importorskip("jsonschema_rs", reason="not installed: pip install --no-deps -r tests/full.lock")
    jsonschema.validate(schema(), values())
