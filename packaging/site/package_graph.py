"""Draws the packages and the imports between them: ``python packaging/site/package_graph.py`` needs Graphviz.

The graph is import-linter's own (grimp). An arrow that two or more others imply is left out, so that the layers show.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent.parent
PICTURES = ROOT / "docs" / "assets"
PORTIONS = (
    *("schema", "agent", "detectors", "server", "orchestrators", "checks", "cli", "demo", "simulator", "learning"),
    *("checkpoint", "planning", "client", "traces"),
)
WIRING = ("app", "command", "parts", "process", "reload")  # what puts the server together, as one

Edges = set[tuple[str, str]]


def portions(graph: grimp.ImportGraph) -> Edges:
    """Return which of the top-level packages imports which."""
    return {(a.split(".")[1], b.split(".")[1]) for a, b in _imports(graph) if a.split(".")[1] != b.split(".")[1]}


def server_packages(graph: grimp.ImportGraph) -> Edges:
    """Return which of the server's packages imports which; what puts it together is one, ``app``."""
    ours = [tuple("app" if name in WIRING else name for name in edge) for edge in packages_of(graph, "server")]
    return {(a, b) for a, b in ours if a != b}


def packages_of(graph: grimp.ImportGraph, portion: str) -> Edges:
    """Return which of a portion's folders and files imports which."""
    inside = f"eagle_eye.{portion}."
    ours = [
        (a.split(".")[2], b.split(".")[2]) for a, b in _imports(graph) if a.startswith(inside) and b.startswith(inside)
    ]
    return {(a, b) for a, b in ours if a != b}


def import_graph() -> grimp.ImportGraph:
    """Return the imports of everything that is installed of ours."""
    return grimp.build_graph(*(f"eagle_eye.{portion}" for portion in PORTIONS), cache_dir=None)


def _imports(graph: grimp.ImportGraph) -> Iterator[tuple[str, str]]:
    for module in graph.modules:
        yield from ((module, other) for other in graph.find_modules_directly_imported_by(module))


def reduced(edges: Edges) -> Edges:
    """Return the edges without those that a longer way implies. Of a graph without circles."""
    below: dict[str, set[str]] = {}

    def reached(name: str) -> set[str]:
        if name not in below:
            below[name] = set()
            for a, b in edges:
                if a == name:
                    below[name] |= {b} | reached(b)
        return below[name]

    return {
        (a, b) for a, b in edges if not any(b in reached(middle) for start, middle in edges if start == a != middle)
    }


def dot(edges: Edges) -> str:
    """Return the graph in Graphviz' language."""
    lines = [f'  "{a}" -> "{b}";' for a, b in sorted(reduced(edges))]
    style = 'node [shape=box, style="rounded,filled", fillcolor="#eef3fa", color="#5b7aa6", fontname="sans-serif"];'
    return "\n".join(["digraph {", "  rankdir=TB; bgcolor=white; ranksep=0.45;", f"  {style}", *lines, "}"]) + "\n"


def drawn(svg: str) -> Edges:
    """Return the edges of a picture that Graphviz drew."""
    titles = [part.split("</title>")[0] for part in svg.split("<title>")[1:]]
    pairs = [title.split("&#45;&gt;") for title in titles if "&#45;&gt;" in title]
    return {(a, b) for a, b in pairs}


def pictures(graph: grimp.ImportGraph) -> dict[str, Edges]:
    """Return the edges of each picture, by its file's name."""
    return {"packages.svg": portions(graph), "server-packages.svg": server_packages(graph)}


def main() -> None:
    """Write the pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name, edges in pictures(import_graph()).items():
        done = subprocess.run(["dot", "-Tsvg"], input=dot(edges), capture_output=True, text=True, check=True)
        (PICTURES / name).write_text(done.stdout, encoding="utf-8")


if __name__ == "__main__":
    main()
