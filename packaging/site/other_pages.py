"""Pages of the site that nobody writes: a notebook's, and those at addresses that pages once had (``moved.toml``).

``python packaging/site/other_pages.py NOTEBOOK > FILE`` in any Python 3.11 turns a notebook into Markdown,
without outputs: it is JSON. ``make docs`` does it.
"""

from __future__ import annotations

import json
import posixpath
import sys
from pathlib import Path

import tomllib

MOVED = Path(__file__).with_name("moved.toml")


def moved() -> dict[str, str]:
    """Return the former addresses in the site, each with the address of today, both relative to the site's root."""
    found: dict[str, str] = tomllib.loads(MOVED.read_text(encoding="utf-8"))
    return {old: new.removesuffix(".md") + ".html" for old, new in found.items()}


def redirect(old: str, new: str) -> str:
    """Return the HTML for the address ``old`` that leads to ``new``, and with scripts to the same heading."""
    there = posixpath.relpath(new, posixpath.dirname(old) or ".")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>This page has moved</title>
<link rel="canonical" href="{there}">
<script>location.replace("{there}" + location.hash)</script>
<meta http-equiv="refresh" content="0; url={there}">
<p>This page is now <a href="{there}">{there}</a>.</p>
</html>
"""


def write_redirects(site: Path) -> None:
    """Write a page to each former address.

    Raises FileExistsError where a page is, FileNotFoundError where one would lead to none.
    """
    for old, new in moved().items():
        if not (site / new).is_file():
            raise FileNotFoundError(f"{MOVED.name} leads from {old} to {new}, where no page is")
        (site / old).parent.mkdir(parents=True, exist_ok=True)
        with (site / old).open("x", encoding="utf-8") as file:
            file.write(redirect(old, new))


def of_notebook(notebook: str) -> str:
    """Return the notebook's page; code becomes fenced blocks."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(of_notebook(Path(sys.argv[1]).read_text(encoding="utf-8")))
