"""``python -m dashboards.grafana.source``: writes the dashboards that this folder describes beside it, as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.grafana.source import details, overview, server
from dashboards.grafana.source.parts import Dashboard, described

BOARDS = {
    "fleet": overview.fleet,
    "job": details.job,
    "node": details.node,
    "incidents": overview.incidents,
    "server": server.build,
}
FOLDER = Path(__file__).parents[1] / "dashboards"


def texts() -> dict[str, str]:
    """Return the content of each file, by its name."""
    return {
        f"{name}.json": json.dumps(_tidied(build()), indent=1, sort_keys=True) + "\n" for name, build in BOARDS.items()
    }


def _tidied(built: Dashboard) -> Any:
    """Return the dashboard's plain data without what the SDK writes and Grafana's schema has no place for."""
    plain = json.loads(json.dumps(built.build(), cls=JSONEncoder))
    for variable in plain["templating"]["list"]:
        for key in ("auto", "auto_count", "auto_min"):  # an interval's
            variable.pop(key, None)
    for panel in plain["panels"]:
        if panel.get("targets") and not panel.get("description"):
            panel["description"] = described(panel)
        if panel["type"] == "table":
            panel.get("options", {}).pop("footer", None)  # of Grafana before 12
    return plain


def main() -> None:
    """Write the files."""
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
