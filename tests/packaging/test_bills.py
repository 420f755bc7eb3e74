"""What each artefact brings is known, locked and under a licence that is allowed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from release import describe, libraries
from release.describe import bill
from release.libraries import ReleaseError

EPOCH_S = 1_700_000_000
WHEEL = "eagle_eye-1.0-py3-none-any.whl"
AGENT = "eagle-eye-agent_1.0_amd64.deb"
SERVER = "eagle-eye-server-1.0-1.python3.12.x86_64.rpm"
COMPILERS_OWN = ("libgfortran", "libgomp", "libquadmath")


def everything() -> list[libraries.Library]:
    return libraries.brought_by(libraries.extras(), describe.PYTHONS)


def metadata(**fields: str) -> Message:
    message = Message()
    for name, value in fields.items():
        message[name.replace("_", "-")] = value
    return message


def components(document: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for each in document["components"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of artefacts; their content does not matter."""
    made = tmp_path_factory.mktemp("dist")
    for name in (WHEEL, AGENT, SERVER):
        (made / name).write_bytes(name.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", str(EPOCH_S))
        describe.describe(made)
    return made


def read(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.cdx.json").read_text(encoding="utf-8"))
    return found


def test_every_library_that_a_user_gets_is_under_a_licence_that_is_allowed() -> None:
    by = describe.rules()
    assert {library.name for library in everything() if not describe.licence_of(library.name, by)} == set()


def test_no_licence_is_kept_for_a_library_that_nobody_gets_any_more() -> None:
    by = describe.rules()
    assert {*by.read, *by.also} <= {library.name for library in everything()}


def test_a_compilers_own_libraries_in_a_wheel_are_declared() -> None:
    bundling = {
        library.name
        for library in everything()
        for file in importlib.metadata.files(library.name) or []
        if file.name.startswith(COMPILERS_OWN)
    }
    by = describe.rules()
    assert {name for name in bundling if "GCC-exception" not in describe.licence_of(name, by)} == set()


def test_code_from_elsewhere_that_lies_here_has_its_licence_beside_it_and_is_allowed() -> None:
    by = describe.rules()
    assert {each.name: describe.not_allowed(each.licence, by.allowed) for each in libraries.vendored()} == {
        "preact": [],
        "uplot": [],
    }


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({}, "x has no License-Expression; it says ''. Read its licence file"),
        ({"License": "MIT"}, "x has no License-Expression; it says 'MIT'"),
        ({"License_Expression": "AGPL-3.0-only"}, "x is under AGPL-3.0-only, which licences.toml does not allow"),
        ({"License_Expression": "MIT AND (MIT OR X11) AND SSPL-1.0"}, "x is under SSPL-1.0, which"),
        ({"License_Expression": "My own"}, "'My own' is no SPDX expression"),
    ],
)
def test_a_library_whose_licence_nobody_has_looked_at_is_refused(fields: dict[str, str], complaint: str) -> None:
    with pytest.raises(ReleaseError) as raised:
        describe.licence_in(metadata(**fields), "x", describe.rules())
    assert complaint in str(raised.value)


def test_a_library_that_comes_to_say_something_else_is_looked_at_again() -> None:
    by = describe.Rules(frozenset({"MIT"}), {"x": {"says": "MIT", "licence": "MIT"}}, {})
    assert describe.licence_in(metadata(License="MIT"), "x", by) == "MIT"
    with pytest.raises(ReleaseError, match="x said 'MIT' and says 'BSL' now"):
        describe.licence_in(metadata(License="BSL"), "x", by)
    with pytest.raises(ReleaseError, match="take it off"):
        describe.licence_in(metadata(License_Expression="MIT"), "x", by)


def test_of_alternatives_one_that_is_allowed_is_enough() -> None:
    assert describe.not_allowed("GPL-2.0-only OR MIT", frozenset({"MIT"})) == []
    assert describe.not_allowed("GPL-2.0-only AND MIT", frozenset({"MIT"})) == ["GPL-2.0-only"]


def test_the_agents_package_brings_few_libraries_and_no_page(folder: Path) -> None:
    found = components(read(folder, AGENT))
    assert found.keys() == {"msgspec", "nvidia-ml-py", "psutil", "tomli", "xxhash"}
    assert {each["scope"] for each in found.values()} == {"required"}


def test_the_wheel_says_which_extra_brings_a_library(folder: Path) -> None:
    found = components(read(folder, WHEEL))
    assert found["msgspec"]["scope"] == "required"
    assert found["torch"]["scope"] == "optional"
    assert found["torch"]["properties"] == [
        {"name": "eagle-eye:extra", "value": extra} for extra in ("checkpoint", "ml")
    ]
    assert found["uplot"]["purl"] == "pkg:npm/uplot@1.6.32"
    assert not {"pytest", "ruff", "hatchling"} & found.keys()


def test_an_image_stands_on_its_base(folder: Path) -> None:
    found = components(read(folder, "eagle-eye-agent-image"))
    assert found.keys() == {"docker.io/library/python", "msgspec", "nvidia-ml-py", "psutil", "xxhash"}
    assert {"preact", "numpy"} <= components(read(folder, "eagle-eye-server-image")).keys()


def test_who_needs_whom_leads_from_the_artefact_to_everything_in_it(folder: Path) -> None:
    document = read(folder, WHEEL)
    needs = {each["ref"]: each.get("dependsOn", []) for each in document["dependencies"]}
    reached: set[str] = set()
    todo = [document["metadata"]["component"]["bom-ref"]]
    while todo:
        if (each := todo.pop()) not in reached:
            reached.add(each)
            todo.extend(needs[each])
    assert reached >= {each["bom-ref"] for each in document["components"]}


def test_versions_are_those_of_the_lock(folder: Path) -> None:
    locked = libraries.locked()
    found = components(read(folder, SERVER))
    ours = {"preact", "uplot"}
    assert {name: each["version"] for name, each in found.items() if name not in ours}.items() <= locked.items()


def test_a_bill_says_of_which_bytes_it_speaks_and_is_the_same_each_time(folder: Path) -> None:
    document = read(folder, AGENT)
    assert document["metadata"]["component"]["hashes"][0]["content"] == hashlib.sha256(AGENT.encode()).hexdigest()
    assert document["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    (artefact,) = describe.in_files([folder / AGENT])
    assert bill(artefact, EPOCH_S) == (folder / f"{AGENT}.cdx.json").read_text(encoding="utf-8")


def test_the_sums_cover_every_file(folder: Path) -> None:
    lines = dict(line.split("  ")[::-1] for line in (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines())
    there = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    del there["SHA256SUMS"]
    assert lines == there


def test_a_file_that_nobody_knows_is_not_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(EPOCH_S))
    (tmp_path / "left-over.zip").touch()
    with pytest.raises(ReleaseError, match=r"left-over.zip: packaging/release/describe.py does not say what is in it"):
        describe.describe(tmp_path)


def test_a_bill_is_cyclonedx(folder: Path) -> None:
    validation = pytest.importorskip(
        "jsonschema_rs", reason="jsonschema_rs is not installed: make test-full installs it"
    )
    schemas = Path(str(importlib.metadata.distribution("cyclonedx-python-lib").locate_file("cyclonedx/schema/_res")))
    base = "http://cyclonedx.org/schema/"
    others = ("spdx.SNAPSHOT.schema.json", "jsf-0.82.SNAPSHOT.schema.json")
    registry = validation.Registry([(base + name, json.loads((schemas / name).read_text())) for name in others])
    schema = json.loads((schemas / "bom-1.6.SNAPSHOT.schema.json").read_text())
    valid = validation.validator_for(schema, registry=registry)
    for file in folder.glob("*.cdx.json"):
        assert [str(error) for error in valid.iter_errors(json.loads(file.read_text()))] == []
    assert not valid.is_valid(
        {"bomFormat": "CycloneDX", "specVersion": "1.6", "components": [{"type": "x", "name": "y"}]}
    )
