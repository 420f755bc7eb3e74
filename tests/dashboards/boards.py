"""The dashboards' JSON as tests look at it: panels, queries, variables filled in as Grafana would."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

GRAFANA = Path(__file__).parents[2] / "dashboards/grafana"
NAMES = ("fleet", "incidents", "job", "node", "server")
METRIC = re.compile(r"eagle_eye_\w+")


class Asked(NamedTuple):
    """One query: which dashboard and panel ask it, and whether of now alone."""

    board: str
    panel: str
    expr: str
    instant: bool


def read(name: str) -> Any:
    """Return a dashboard."""
    return json.loads((GRAFANA / "dashboards" / f"{name}.json").read_text(encoding="utf-8"))


def panels(board: Any) -> Iterator[Any]:
    """Yield the panels, without the rows that hold them."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels") or ()
        else:
            yield panel


def queries() -> Iterator[Asked]:
    """Yield every panel's and annotation's query."""
    for name in NAMES:
        board = read(name)
        for panel in panels(board):
            for target in panel["targets"]:
                yield Asked(name, panel["title"], target["expr"], bool(target.get("instant")))
        for annotation in board["annotations"]["list"]:
            yield Asked(name, f"annotation {annotation['name']}", annotation["target"]["expr"], instant=False)


def variables(board: Any) -> dict[str, str]:
    """Return the queries of its variables, by name."""
    return {one["name"]: one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"}


def filled(expr: str, **values: str) -> str:
    """Return the expression with variables' values, and Grafana's own, put in."""
    for name, value in {"__rate_interval": "5s", "__range": "1h", "__interval": "1s", **values}.items():
        expr = expr.replace(f"${name}", value)
    assert "$" not in expr, f"a variable that nobody fills in: {expr}"
    return expr
