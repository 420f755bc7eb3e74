"""The page's files: all of them served, packed and as their authors published them; the types agree with the server."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from eagle_eye.server.web.dispatcher import PAGE_FOLDER, content_security_policy, read_page
from tests.page import api_types
from tests.server.builders import Running, running

ROOT = Path(__file__).parents[2]
TYPES = Path(__file__).parent / "types"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("page")) as found:
        yield found


def ours(suffix: str) -> list[Path]:
    return [file for file in PAGE_FOLDER.rglob(f"*{suffix}") if "vendor" not in file.parts]


def test_every_file_that_a_browser_needs_is_served_with_its_type(server: Running) -> None:
    for path, file in read_page().items():
        answer = server.client.get(path)
        assert (answer.status_code, answer.content) == (200, file.content)
        assert answer.headers["content-type"].encode() == file.content_type
    assert server.client.get("/api.d.ts").status_code == 404


@pytest.mark.parametrize(
    ("path", "accept", "kind"),
    [
        ("/no/such", "text/html,*/*;q=0.8", "text/html; charset=utf-8"),
        ("/no/such", "*/*", "application/problem+json"),
        ("/api/v1/no-such", "text/html,*/*;q=0.8", "application/problem+json"),
    ],
)
def test_who_strays_in_a_browser_is_answered_by_a_page(path: str, accept: str, kind: str, server: Running) -> None:
    answer = server.client.get(path, headers={"Accept": accept})
    assert (answer.status_code, answer.headers["content-type"]) == (404, kind)
    assert "content-security-policy" in answer.headers


def test_every_file_that_is_named_is_there() -> None:
    served = read_page()
    index = served["/"].content.decode()
    named = [f"/{name}" for name in re.findall(r'(?:src|href)="([^"#][^"]*)"', index)]
    named += ["/" + name.removeprefix("./") for name in re.findall(r'": "(\./[^"]+)"', index)]
    for file in ours(".js"):
        for name in re.findall(r'from "(\.[^"]+)"', file.read_text(encoding="utf-8")):
            named.append("/" + (file.parent / name).resolve().relative_to(PAGE_FOLDER).as_posix())
    assert set(named) <= set(served)


def test_a_file_that_the_browser_has_already_is_not_sent_again(server: Running) -> None:
    first = server.client.get("/app/main.js")
    again = server.client.get("/app/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_policy_allows_nothing_inline_but_the_import_map(server: Running) -> None:
    policy = server.client.get("/").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; ")
    assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
    assert len(re.findall("'sha256-", policy)) == 1
    assert content_security_policy(b"<p>no map</p>").count(b"sha256") == 0


def test_no_file_of_ours_makes_markup_of_text_or_loads_from_elsewhere() -> None:
    for file in [*ours(".js"), *ours(".html"), *ours(".css")]:
        text = file.read_text(encoding="utf-8")
        for markup in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "setAttribute(",
            " style=",
        ):
            assert markup not in text, file
        assert not re.search(r"https?://|@import|url\(", text), file


def test_what_others_wrote_is_as_they_published_it() -> None:
    vendor = PAGE_FOLDER / "vendor"
    listed = dict(line.split("  ", 1)[::-1] for line in (vendor / "SHA256SUMS").read_text("utf-8").splitlines())
    files = {
        path.relative_to(vendor).as_posix(): path
        for path in vendor.rglob("*")
        if path.parent != vendor and path.is_file()
    }
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()} == listed
    assert {name.split("/")[0] for name in files} == {name.split("/")[0] for name in files if name.endswith("/LICENSE")}


def test_the_wheel_holds_the_page() -> None:
    packed = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    page = {
        f"eagle_eye/server/web/page/{path.relative_to(PAGE_FOLDER).as_posix()}"
        for path in PAGE_FOLDER.rglob("*")
        if path.is_file()
    }
    assert page <= packed


def test_the_types_of_the_apis_answers_are_the_servers() -> None:
    again = "run: .venv/bin/python -m tests.page.api_types"
    assert api_types.FILE.read_text(encoding="utf-8") == api_types.declarations(), again
    assert api_types.LABELS.read_text(encoding="utf-8") == api_types.labels(), again


def test_the_types_are_checked_where_the_pages_files_lie() -> None:
    included = json.loads((TYPES / "tsconfig.json").read_text(encoding="utf-8"))["include"]
    assert {(TYPES / path).resolve().relative_to(PAGE_FOLDER).parts[0] for path in included} == {
        "app",
        "views",
        "*.d.ts",
    }


def test_the_pages_types_agree() -> None:
    compiler = TYPES / "node_modules/.bin/tsc"
    if not compiler.exists() or shutil.which("node") is None:
        pytest.skip("needs TypeScript: make check-page (Node.js 20 and npm)")
    done = subprocess.run(
        [str(compiler), "--project", str(TYPES / "tsconfig.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_versions_that_are_served_are_those_that_are_type_checked() -> None:
    wanted = json.loads((TYPES / "package.json").read_text(encoding="utf-8"))["devDependencies"]
    readme = (PAGE_FOLDER / "vendor/README.md").read_text(encoding="utf-8")
    for name in ("preact", "uplot"):
        assert re.search(rf"`{name}` \(.*\| {re.escape(wanted[name])} \|", readme)
    lock = (TYPES / "package-lock.json").read_text(encoding="utf-8")
    assert "registry" not in lock
    assert "resolved" not in lock
