"""A notebook as a Markdown page of the site: its cells without outputs. ``make docs`` does it.

``python packaging/site/notebook_page.py NOTEBOOK > FILE`` in any Python 3.11: a notebook is JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def page(notebook: str) -> str:
    """Return the page; code becomes fenced blocks."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page(Path(sys.argv[1]).read_text(encoding="utf-8")))
