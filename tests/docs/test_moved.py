"""Each address that a page of the site once had leads to the page of today."""

from __future__ import annotations

import importlib.util
import posixpath
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT

GENERATED = {"reference/api-reference.html"}  # by make docs, of the app's own schema


@cache
def other_pages() -> ModuleType:
    """Return packaging/site/other_pages.py."""
    spec = importlib.util.spec_from_file_location("other_pages", ROOT / "packaging" / "site" / "other_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MOVED = sorted(other_pages().moved().items())


def source(address: str) -> Path:
    """Return the page of docs/ that the site has at an address."""
    return ROOT / "docs" / (address.removesuffix(".html") + ".md")


def test_the_pages_that_once_lay_in_one_folder_are_among_them() -> None:
    assert {"quick-start.html", "policy.html", "api-reference.html", "project/DECISIONS.html"} <= dict(MOVED).keys()


@pytest.mark.parametrize(("old", "new"), MOVED, ids=[old for old, _ in MOVED])
def test_an_old_address_leads_to_a_page_that_exists_and_is_no_pages_own(old: str, new: str) -> None:
    assert new in GENERATED or source(new).is_file()
    assert not source(old).exists()


@pytest.mark.parametrize(("old", "new"), [("a.html", "b/c.html"), ("project/a.html", "b/index.html")])
def test_a_redirect_is_relative_to_its_own_folder_and_keeps_the_heading(old: str, new: str) -> None:
    html = other_pages().redirect(old, new)
    for found in (r'canonical" href="(.*?)"', r'url=(.*?)"', r'<a href="(.*?)"', r'replace\("(.*?)" \+ location.hash'):
        (there,) = re.findall(found, html)
        assert posixpath.normpath(posixpath.join(posixpath.dirname(old), there)) == new


def test_redirects_are_written_beside_the_pages(tmp_path: Path) -> None:
    for _, new in MOVED:
        (tmp_path / new).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / new).touch()
    other_pages().write_redirects(tmp_path)
    assert [old for old, _ in MOVED if not (tmp_path / old).stat().st_size] == []


def test_a_redirect_never_takes_the_place_of_a_page(tmp_path: Path) -> None:
    for old, new in MOVED:
        for address in (old, new):
            (tmp_path / address).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / address).touch()
    with pytest.raises(FileExistsError):
        other_pages().write_redirects(tmp_path)


def test_a_redirect_to_nowhere_ends_the_build(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"moved\.toml"):
        other_pages().write_redirects(tmp_path)
