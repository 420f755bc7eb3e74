"""The documents' notebook: its cells, and a run of them as its reader starts it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.page.site import replayed

NOTEBOOK = ROOT / "docs/how-to/incident-notebook.ipynb"
FAULT = "thermal_throttle"
PARAMETERS = "parameters"  # the tag of the cell that its reader edits


def notebook() -> dict[str, Any]:
    """Return the notebook."""
    found: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return found


def filled_in(incident: str) -> dict[str, Any]:
    """Return the notebook with the reader's incident in the cell that asks for it."""
    found = notebook()
    (asked,) = (cell for cell in found["cells"] if PARAMETERS in cell["metadata"].get("tags", ()))
    asked["source"] = [f"INCIDENT = {incident!r}\n"]
    return found


@contextmanager
def incident_on_a_server(folder: Path) -> Iterator[str]:
    """Run a server that has watched the fault, name it in the environment, and give the incident's id."""
    with replayed(folder, FAULT, nodes=8, gpus=2) as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("EAGLE_EYE_SERVER", server.url)
        environment.delenv("EAGLE_EYE_TOKEN_FILE", raising=False)
        (found,) = server.client.get("/api/v1/incidents", params={"fault": FAULT}).json()["items"]
        yield str(found["id"])


def run_plainly(incident: str) -> dict[str, Any]:
    """Run the cells in one namespace, and return it."""
    names: dict[str, Any] = {}
    for cell in filled_in(incident)["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {cell['id']}", "exec"), names)
    return names
