"""The bill of materials of one artefact: CycloneDX 1.6 in JSON, the same bytes for the same repository."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from datetime import datetime, timezone

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.contact import OrganizationalContact
from cyclonedx.model.license import LicenseAcknowledgement, LicenseExpression
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from release.artefacts import Artefact
from release.libraries import Library, brought_by, direct, project
from release.licences import licence_of, rules
from release.vendored import Vendored, vendored

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
