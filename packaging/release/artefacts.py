"""What is shipped, and which extras and portions each artefact is made of."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from release.errors import ReleaseError
from release.libraries import ROOT, extras
from release.vendored import PORTION

IMAGES = ("agent", "orchestrator", "server")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


class Artefact(NamedTuple):
    """One thing that a site installs.

    ``needed`` are the extras whose libraries it always has, ``offered`` those that its user may ask for;
    ``pythons`` the versions of Python that it may run on. ``vendored``: the page's libraries are in it. ``base`` is the
    image that it stands on, "" where it is none. ``file`` is None for an image.
    """

    name: str
    file: Path | None
    needed: tuple[str, ...]
    offered: tuple[str, ...]
    pythons: tuple[str, ...]
    vendored: bool
    base: str


def in_files(files: Iterable[Path]) -> list[Artefact]:
    """Return the artefacts that these files are; raise ReleaseError for one of which nobody knows what is in it."""
    return [_of(file) for file in files]


def images() -> list[Artefact]:
    """Return the container images, as their Dockerfiles describe them."""
    return [_image(name) for name in IMAGES]


def host_module(name: str) -> Any:
    """Return a module of packaging/host, which is a folder of programs and no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"packaging/host/{name}.py")
    if spec is None or spec.loader is None:
        raise ReleaseError(f"packaging/host/{name}.py is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _of(file: Path) -> Artefact:
    if file.name.endswith((".whl", ".tar.gz")):
        return Artefact(file.name, file, (), extras(), PYTHONS, vendored=True, base="")
    name = re.match(r"eagle-eye-([a-z]+)", file.name)
    if file.suffix in (".deb", ".rpm") and name and name[1] in (recipes := host_module("recipes").RECIPES):
        recipe, python = recipes[name[1]], re.search(r"python(3\.\d+)", file.name)
        pythons = (python[1],) if python else recipe.pythons
        return Artefact(file.name, file, recipe.extras, (), pythons, vendored=PORTION in recipe.portions, base="")
    raise ReleaseError(f"{file.name}: packaging/release/artefacts.py does not say what is in it")


def _image(name: str) -> Artefact:
    text = (ROOT / "packaging/container" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    base = re.search(r"^ARG BASE=(\S+)$", text, re.MULTILINE)
    wanted = re.search(r'install\.sh "?(?:\$\{EXTRAS\}|([\w,-]+))"?$', text, re.MULTILINE)
    by_default = re.search(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    if base is None or wanted is None or not (wanted[1] or by_default):
        raise ReleaseError(f"packaging/container/{name}.Dockerfile says no ARG BASE, or not what install.sh installs")
    needed = (wanted[1] or (by_default[1] if by_default else "")).split(",")
    python = re.search(r"python:(3\.\d+)", base[1])
    if python is None:
        raise ReleaseError(f"packaging/container/{name}.Dockerfile: {base[1]} does not say its version of Python")
    portions = re.findall(r"^COPY (\w+) \1$", text, re.MULTILINE)
    return Artefact(f"eagle-eye-{name}", None, tuple(needed), (), (python[1],), PORTION in portions, base[1])
