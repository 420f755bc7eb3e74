"""Writes a bill of materials for each artefact in a folder and for each container image, then the folder's SHA256SUMS.

PYTHONPATH=packaging python -m release.describe dist

A bill is CycloneDX 1.6 in JSON, the same bytes for the same repository. A licence is what a library's metadata says,
read with licences.toml.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple, cast

import license_expression
import tomllib
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.contact import OrganizationalContact
from cyclonedx.model.license import LicenseAcknowledgement, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from release.build import epoch_s
from release.libraries import (
    PORTION,
    ROOT,
    Library,
    ReleaseError,
    Vendored,
    brought_by,
    direct,
    extras,
    project,
    vendored,
)

# What is shipped, and which extras and portions each artefact is made of.

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
    raise ReleaseError(f"{file.name}: packaging/release/describe.py does not say what is in it")


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


# Under which licence each library may be used.

TABLE = Path(__file__).with_name("licences.toml")
_SPDX = license_expression.get_spdx_licensing()
SAID_CHARACTERS_MAX = 80  # longer is a licence's text


class Rules(NamedTuple):
    """licences.toml: what is allowed, what was read in libraries without an expression, what comes beside them."""

    allowed: frozenset[str]
    read: Mapping[str, Mapping[str, str]]
    also: Mapping[str, str]


def rules() -> Rules:
    """Return what licences.toml says."""
    table: dict[str, Any] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return Rules(frozenset(table["allowed"]), table["read"], table["also"])


def licence_of(name: str, by: Rules) -> str:
    """Return the SPDX expression for an installed library; raise ReleaseError where nobody has looked at it."""
    metadata = cast("Message", importlib.metadata.metadata(name))
    return licence_in(metadata, name, by)


def licence_in(metadata: Message, name: str, by: Rules) -> str:
    """Return the SPDX expression for a library with this metadata, as ``licence_of``."""
    expression = metadata["License-Expression"]
    if expression is None:
        entry, says = by.read.get(name), said(metadata)
        if entry is None:
            raise ReleaseError(
                f"{name} has no License-Expression; it says {says!r}. Read its licence file and add it to {TABLE.name}"
            )
        if entry["says"] != says:
            raise ReleaseError(f"{name} said {entry['says']!r} and says {says!r} now: read its licence file again")
        expression = entry["licence"]
    elif name in by.read:
        raise ReleaseError(f"{name} has a License-Expression, {expression}: take it off {TABLE.name}")
    if name in by.also:
        expression = (
            f"({expression}) AND {by.also[name]}" if " OR " in expression else f"{expression} AND {by.also[name]}"
        )
    refused = not_allowed(expression, by.allowed)
    if refused:
        raise ReleaseError(f"{name} is under {', '.join(refused)}, which {TABLE.name} does not allow")
    return str(_SPDX.parse(expression))


def not_allowed(expression: str, allowed: frozenset[str]) -> list[str]:
    """Return the licences of the expression that keep it from being allowed; of alternatives one is enough."""
    try:
        parsed = _SPDX.parse(expression, validate=True)
    except license_expression.ExpressionError as error:
        raise ReleaseError(f"{expression!r} is no SPDX expression: {error}") from error
    return _refused(parsed, allowed)


def said(metadata: Message) -> str:
    """Return what metadata without an expression says: its licence field, or the names of its classifiers."""
    field = str(metadata["License"] or "").strip()
    if field and "\n" not in field and len(field) <= SAID_CHARACTERS_MAX:
        return field
    classifiers = (str(each) for each in metadata.get_all("Classifier") or [])
    return ", ".join(each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License ::"))


def _refused(part: Any, allowed: frozenset[str]) -> list[str]:
    if isinstance(part, _SPDX.OR):
        answers = [_refused(each, allowed) for each in part.args]
        return [] if [] in answers else [each for answer in answers for each in answer]
    if isinstance(part, _SPDX.AND):
        return [each for argument in part.args for each in _refused(argument, allowed)]
    return [] if str(part) in allowed else [str(part)]


# The bill of materials of one artefact.

SUFFIX = ".cdx.json"
AUTHORS = "The Eagle Eye authors"
OURS = "Apache-2.0"
EXTRA = "eagle-eye:extra"  # property: the extra that brings it
FILES = "eagle-eye:sha256"  # property: a file as it lies in the artefact


def bill(artefact: Artefact, epoch_s: int) -> str:
    """Return the bill as JSON. Raises ReleaseError for a library that is not locked or whose licence is not allowed."""
    wanted = (*artefact.needed, *artefact.offered)
    libraries = brought_by(wanted, artefact.pythons)
    known = rules()
    parts = {library.name: _library(library, artefact, licence_of(library.name, known)) for library in libraries}
    others = [_vendored(each) for each in vendored()] if artefact.vendored else []
    if artefact.base:
        others.append(_base(artefact.base))
    root = _root(artefact)
    document = Bom(
        components=[*parts.values(), *others],
        metadata=BomMetaData(
            component=root,
            authors=[OrganizationalContact(name=AUTHORS)],
            timestamp=datetime.fromtimestamp(epoch_s, timezone.utc),
        ),
    )
    document.register_dependency(root, [*(parts[name] for name in direct(wanted, artefact.pythons)), *others])
    for library in libraries:
        document.register_dependency(parts[library.name], [parts[name] for name in library.needs if name in parts])
    document.serial_number = _serial(artefact, document.components)
    text: str = make_outputter(document, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1)
    return f"{text}\n"


def _root(artefact: Artefact) -> Component:
    version = project().version
    is_python = artefact.file is not None and artefact.file.name.endswith((".whl", ".tar.gz"))
    return Component(
        name=artefact.name,
        version=version,
        type=ComponentType.APPLICATION if artefact.file else ComponentType.CONTAINER,
        bom_ref=artefact.name,
        purl=PackageURL("pypi", None, "eagle-eye", version, {"file_name": artefact.name}) if is_python else None,
        licenses=[_licence(project().license if artefact.vendored else OURS)],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=_sha256(artefact.file.read_bytes()))]
        if artefact.file
        else [],
    )


def _library(library: Library, artefact: Artefact, licence: str) -> Component:
    needed = bool({"", *artefact.needed} & set(library.extras))
    purl = PackageURL("pypi", None, library.name, library.version)
    return Component(
        name=library.name,
        version=library.version,
        bom_ref=purl.to_string(),
        purl=purl,
        scope=ComponentScope.REQUIRED if needed else ComponentScope.OPTIONAL,
        licenses=[_licence(licence)],
        properties=[] if needed else [Property(name=EXTRA, value=extra) for extra in library.extras],
    )


def _vendored(library: Vendored) -> Component:
    purl = PackageURL("npm", None, library.name, library.version)
    files = [file for file in sorted(library.folder.iterdir()) if file.name != "LICENSE"]
    return Component(
        name=library.name,
        version=library.version,
        bom_ref=purl.to_string(),
        purl=purl,
        scope=ComponentScope.REQUIRED,
        licenses=[_licence(library.licence)],
        properties=[Property(name=FILES, value=f"{_sha256(file.read_bytes())} {file.name}") for file in files],
    )


def _base(image: str) -> Component:
    name, _, tag = image.rpartition(":")
    namespace, _, short = name.removeprefix("docker.io/").rpartition("/")
    purl = PackageURL("docker", namespace, short, tag)
    return Component(
        name=name,
        version=tag,
        type=ComponentType.CONTAINER,
        bom_ref=purl.to_string(),
        purl=purl,
        scope=ComponentScope.REQUIRED,
    )


def _licence(expression: str) -> LicenseExpression:
    return LicenseExpression(expression, acknowledgement=LicenseAcknowledgement.DECLARED)


def _serial(artefact: Artefact, components: Iterable[Component]) -> uuid.UUID:
    """Return a number that differs where the artefact or what is in it differs."""
    content = _sha256(artefact.file.read_bytes()) if artefact.file else artefact.base
    names = " ".join(sorted(component.bom_ref.value or "" for component in components))
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{artefact.name} {project().version} {content} {names}")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


SUMS = "SHA256SUMS"


def main(argv: Sequence[str] | None = None) -> int:
    """Describe the folder; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m release.describe", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args(argv).folder
    try:
        describe(folder)
    except ReleaseError as error:
        print(f"release.describe: {error}", file=sys.stderr)
        return 1
    print(folder / SUMS)
    return 0


def describe(folder: Path) -> None:
    """Write the bills and the sums. Raises ReleaseError for a file of which nobody knows what is in it."""
    seconds = epoch_s()
    files = [file for file in sorted(folder.iterdir()) if not file.name.endswith(SUFFIX) and file.name != SUMS]
    if not files:
        raise ReleaseError(f"{folder} is empty: make dist")
    for artefact in (*in_files(files), *images()):
        name = artefact.name if artefact.file else f"{artefact.name}-image"
        (folder / f"{name}{SUFFIX}").write_text(bill(artefact, seconds), encoding="utf-8")
    listed = [file for file in sorted(folder.iterdir()) if file.name != SUMS]
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in listed)
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
