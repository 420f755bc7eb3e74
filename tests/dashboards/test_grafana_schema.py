"""The dashboards' JSON against the types that Grafana publishes (@grafana/schema), by the TypeScript compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.boards import NAMES, panels, read

HERE = Path(__file__).parent / "grafana_schema"
FILES = (".npmrc", "package.json", "package-lock.json", "tsconfig.json", "types.ts")

pytestmark = pytest.mark.slow
Checked = Callable[[dict[str, Any]], str]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """A function that returns what the compiler says of dashboards, "" when nothing."""
    if "EAGLE_EYE_TEST_GRAFANA_SCHEMA" not in os.environ:
        pytest.skip("needs npm and its registry: make test-grafana-schema runs it")
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed: apt-get install npm")
    folder = tmp_path_factory.mktemp("schema")
    for name in FILES:
        shutil.copy(HERE / name, folder)
    subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, check=True)

    def check(boards: dict[str, Any]) -> str:
        shutil.rmtree(folder / "checked", ignore_errors=True)
        (folder / "checked").mkdir()
        for name, board in boards.items():
            head = "import type { Exact } from '../types';\nexport const board: Exact = "
            (folder / "checked" / f"{name}.ts").write_text(head + json.dumps(board, indent=1), encoding="utf-8")
        done = subprocess.run(["node_modules/.bin/tsc"], cwd=folder, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    return check


def test_every_dashboard_is_of_the_shape_that_grafana_publishes(checked: Checked) -> None:
    assert checked({name: read(name) for name in NAMES}) == ""


def test_a_key_that_grafana_does_not_know_is_seen(checked: Checked) -> None:
    broken = read("fleet")
    next(panels(broken))["fieldConfig"]["defaults"]["units"] = "s"
    assert "'\"units\"' does not exist" in checked({"fleet": broken})


def test_a_panel_of_no_kind_is_seen(checked: Checked) -> None:
    broken = read("fleet")
    next(panels(broken))["type"] = "graph"
    assert "graph" in checked({"fleet": broken})
