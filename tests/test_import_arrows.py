"""ARCHITECTURE.md's arrows are the code's: what imports what, and what is started by name, in both directions."""

from __future__ import annotations

import ast
import graphlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = (
    *("schema", "agent", "detectors", "server", "orchestrators", "checks", "cli", "demo", "simulator", "learning"),
    *("checkpoint", "planning"),
)
HEADING = "## What may import what"

Arrows = dict[str, set[str]]


@cache
def modules() -> dict[str, Path]:
    """Return every module of the distribution and its file."""
    return {
        ".".join(path.relative_to(ROOT / room).with_suffix("").parts): path
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
    }


def room_of(module: str) -> str:
    """Return the room of a module: its top-level folder, or the folder within the server."""
    _, room, *inner = module.split(".")
    return f"server/{inner[0]}" if room == "server" and len(inner) > 1 else room


def imported(module: str, tree: ast.Module) -> Iterator[str]:
    """Yield our modules that this one imports: at its top, in a function, or for types alone, as lint-imports does."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            package = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{package}.{alias.name}" for alias in node.names] + [package]
        else:
            continue
        yield from (name for name in names if name in modules())


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements; imports are nowhere else, and expressions are most of a tree."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(tree, field, ()):
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


def named(text: str) -> Iterator[str]:
    """Yield our modules that stand in a text as ``module`` or ``module:object``: they are loaded or run by name."""
    yield from (name for name in re.findall(r"""["'](eagle_eye[\w.]+)(?::\w+)?["']""", text) if name in modules())


@cache
def links() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return which module imports which, and which names which."""
    imports, names = {}, {}
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        imports[module] = set(imported(module, ast.parse(text))) - {module}
        names[module] = set(named(text)) - {module}
    return imports, names


def between_rooms(linked: dict[str, set[str]]) -> Arrows:
    """Return the same as arrows from room to room; every room is a key."""
    arrows: Arrows = {room_of(module): set() for module in modules()}
    for module, others in linked.items():
        arrows[room_of(module)] |= {room_of(other) for other in others} - {room_of(module)}
    return arrows


def drawn(column: int) -> Arrows:
    """Return the arrows of one column of the document's tables, by the room in the first column."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    arrows: Arrows = defaultdict(set)
    for line in section.splitlines():
        cells = line.split("|")
        if room := re.fullmatch(r" `([\w/]+)` ", cells[1] if len(cells) > 1 else ""):
            arrows[room[1]] |= set(re.findall(r"`([\w/]+)`", cells[column]))
    return dict(arrows)


@pytest.mark.parametrize(("column", "kind"), [(2, 0), (3, 1)], ids=["imports", "starts by name"])
def test_the_arrows_drawn_are_the_arrows_there_are(column: int, kind: int) -> None:
    real, picture = between_rooms(links()[kind]), drawn(column)
    assert picture.keys() == real.keys()
    assert {room: picture[room] - real[room] for room in real if picture[room] - real[room]} == {}, "drawn, not there"
    assert {room: real[room] - picture[room] for room in real if real[room] - picture[room]} == {}, "there, not drawn"


def test_of_the_server_its_engine_knows_the_records_alone() -> None:
    imports = links()[0]
    known = {other for module in imports if room_of(module) == "server/engine" for other in imports[module]}
    assert {other for other in known if room_of(other) == "server"} == {"eagle_eye.server.model.records"}


def test_no_module_imports_itself_by_a_detour() -> None:
    graphlib.TopologicalSorter(links()[0]).prepare()  # raises CycleError, which names the circle


def test_an_import_counts_wherever_it_stands() -> None:
    program = (
        "from typing import TYPE_CHECKING\n"
        "from ..schema import frame\n"
        "if TYPE_CHECKING:\n    from eagle_eye.server.engine.policy import Rule\n"
        "def later():\n    import eagle_eye.agent.hook\n"
    )
    assert set(imported("eagle_eye.cli.main", ast.parse(program))) == {
        "eagle_eye.schema.frame",
        "eagle_eye.server.engine.policy",
        "eagle_eye.agent.hook",
    }
