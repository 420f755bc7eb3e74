"""The notebook runs against a server with a fault, shows who was accused, and is a page of the site."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'eagle-eye[reports]'")

import matplotlib as mpl
import matplotlib.pyplot as plt

from tests.docs import notebook
from tests.docs.pages import ROOT

ACCUSED = "#c8324b"
JUPYTER = ("nbclient", "nbformat", "ipykernel")
KERNEL = """
import json, sys
import nbformat
from nbclient import NotebookClient
read = nbformat.reads(sys.stdin.read(), as_version=4)
NotebookClient(read, timeout=120, kernel_name="python3").execute()
print(json.dumps([output for cell in read.cells if cell.cell_type == "code" for output in cell.outputs]))
"""


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with notebook.incident_on_a_server(tmp_path_factory.mktemp("site")) as found:
        yield found


@pytest.fixture(scope="module")
def ran(incident: str) -> Iterator[dict[str, Any]]:
    with mpl.rc_context({"backend": "Agg"}):
        yield notebook.run_plainly(incident)
        plt.close("all")


def test_the_accused_stands_at_the_end_of_the_list(ran: dict[str, Any]) -> None:
    assert ran["since"].index[0] == (ran["incident"]["node"], ran["incident"]["device"])
    assert ran["since"].iloc[0] < 0.9 * ran["since"].iloc[1]


def test_it_was_like_the_others_before(ran: dict[str, Any]) -> None:
    before = ran["before"]
    accused = before[(ran["incident"]["node"], ran["incident"]["device"])]
    assert accused == pytest.approx(before.median(), rel=0.02)


def test_each_plot_has_all_gpus_and_one_that_stands_out_past_its_threshold(ran: dict[str, Any]) -> None:
    assert len(ran["panels"]) == 2
    for axes, passes in zip(ran["panels"], (np.less, np.greater), strict=True):
        courses = [line for line in axes.lines if len(line.get_xdata()) > 2]
        assert len(courses) == 8 * 2
        (accused,) = (line for line in courses if mpl.colors.to_hex(line.get_color()) == ACCUSED)
        assert ran["incident"]["node"] in accused.get_label()
        (threshold,) = (line for line in axes.lines if line.get_label() == "threshold")
        last = np.asarray(accused.get_ydata(), np.float64)[-20:]
        assert passes(np.nanmedian(last), threshold.get_ydata()[0])


def test_it_runs_in_jupyter(incident: str) -> None:
    missing = [name for name in JUPYTER if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: make test-full installs them")
    asked = json.dumps(notebook.filled_in(incident))
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], input=asked, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    shown = json.loads(done.stdout.splitlines()[-1])
    assert [output for output in shown if output.get("name") == "stderr"] == []
    kinds = [kind for output in shown for kind in output.get("data", ())]
    assert kinds.count("text/html") == 1  # the evidence as a table
    assert kinds.count("image/png") == 1


def test_it_is_kept_without_what_goes_stale() -> None:
    code = [cell for cell in notebook.notebook()["cells"] if cell["cell_type"] == "code"]
    assert code
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []


def page() -> str:
    """Return the notebook as the site's page."""
    program = ROOT / "packaging/site/other_pages.py"
    done = subprocess.run(
        [sys.executable, program, notebook.NOTEBOOK], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout


def test_its_page_has_every_cell() -> None:
    text = page()
    assert text.startswith("# From an incident's id")
    for cell in notebook.notebook()["cells"]:
        source = "".join(cell["source"])
        assert (f"```python\n{source}\n```" if cell["cell_type"] == "code" else source) in text


def test_make_docs_writes_its_page() -> None:
    target = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndocs: ")[2].partition("\n\n")[0]
    assert "other_pages.py docs/how-to/incident-notebook.ipynb" in target
    assert "build/site-pages/how-to/incident-notebook.md" in target
