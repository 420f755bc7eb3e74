"""The pictures of the packages are the code's, imports have no circles, and ARCHITECTURE.md names every package."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import grimp
import pytest

ROOT = Path(__file__).parent.parent
SERVER = ROOT / "server" / "eagle_eye" / "server"


@cache
def drawing() -> ModuleType:
    """Return packaging/site/package_graph.py."""
    spec = importlib.util.spec_from_file_location("package_graph", ROOT / "packaging" / "site" / "package_graph.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def imports() -> grimp.ImportGraph:
    """Return all imports, wherever they stand."""
    graph = drawing().import_graph()
    assert isinstance(graph, grimp.ImportGraph)
    return graph


def named_in_architecture(section: str) -> set[str]:
    """Return the packages in the first column of a section's table."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    part = re.split(r"\n#+ ", text.partition(f"# {section}\n")[2])[0]
    return set(re.findall(r"^\| `(\w+)` \|", part, flags=re.MULTILINE))


@pytest.mark.parametrize("picture", ["packages.svg", "server-packages.svg"])
def test_a_picture_has_the_codes_imports(picture: str) -> None:
    draw = drawing()
    drawn = draw.drawn((ROOT / "docs" / "assets" / picture).read_text(encoding="utf-8"))
    there = draw.reduced(draw.pictures(imports())[picture])
    assert drawn == there, "make picture draws it anew"


def test_a_picture_leaves_out_what_a_longer_way_implies() -> None:
    assert drawing().reduced({("a", "b"), ("b", "c"), ("a", "c")}) == {("a", "b"), ("b", "c")}


def test_no_module_imports_itself_by_a_detour() -> None:
    graph = imports()
    graphlib.TopologicalSorter(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    ).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("portion", ["agent", "server"])
def test_no_package_imports_itself_by_a_detour(portion: str) -> None:
    below: dict[str, set[str]] = {}
    for package, other in drawing().packages_of(imports(), portion):
        below.setdefault(package, set()).add(other)
    graphlib.TopologicalSorter(below).prepare()


def test_of_the_server_its_engine_knows_the_model_alone() -> None:
    assert {b for a, b in drawing().server_packages(imports()) if a == "engine"} == {"model"}


def test_the_architecture_names_every_top_level_package() -> None:
    assert named_in_architecture("Packages") == set(drawing().PORTIONS)


def test_the_architecture_names_every_package_of_the_server() -> None:
    there = {path.name for path in SERVER.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert named_in_architecture("The server's packages") == there


def test_the_server_has_few_files_of_its_own() -> None:
    assert len(list(SERVER.glob("*.py"))) <= 10


@pytest.mark.parametrize(("portion", "least"), [("agent", 5), ("detectors", 5), ("server", 15)])
def test_each_package_says_what_it_is_for(portion: str, least: int) -> None:
    folders = {path.parent for path in (ROOT / portion / "eagle_eye" / portion).glob("*/*.py")}
    assert len(folders) > least
    for folder in folders:
        text = (folder / "__init__.py").read_text(encoding="utf-8")
        assert len(ast.get_docstring(ast.parse(text)) or "") > 40, folder


@pytest.mark.parametrize("name", ["app.py", "parts.py"])
def test_the_servers_app_is_wiring_alone(name: str) -> None:
    tree = ast.parse((SERVER / name).read_text(encoding="utf-8"))
    logic = (ast.While, ast.ExceptHandler, ast.Compare, ast.Raise)
    found = [
        f"line {node.lineno}: {type(node).__name__}"
        for node in ast.walk(tree)
        if isinstance(node, logic) and not _is_none_test(node)
    ]
    assert found == []


def _is_none_test(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)


def test_the_server_has_the_parts_that_its_endpoints_need() -> None:
    from dataclasses import fields

    from eagle_eye.server.parts import Services

    needed: dict[str, set[str]] = {}
    for path in SERVER.glob("*/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Needs"):
                names = (line.target for line in node.body if isinstance(line, ast.AnnAssign))
                needed[f"{path.stem}.{node.name}"] = {name.id for name in names if isinstance(name, ast.Name)}
    assert len(needed) > 15
    there = {field.name for field in fields(Services)}
    assert {name: parts - there for name, parts in needed.items() if parts - there} == {}
    assert {name for name, parts in needed.items() if not parts} == set()
