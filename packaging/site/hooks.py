"""What mkdocs is told beyond mkdocs.yml, so that one set of Markdown files is right on GitHub and in the site.

- Pages and files that docs/ links to outside of itself come along: ``../CHANGELOG.md`` becomes the page
  ``project/CHANGELOG.md``, ``../packaging/x.yaml`` the file ``source/packaging/x.yaml``. A link to nothing ends the
  build.
- Anchors are GitHub's. A link that shows a page's file name (``[policy.md](policy.md)``) shows its title.
- What ``make docs`` has written (``build/site-pages/``: the API reference, the notebook) are more pages; links to the
  notebook lead to its page.
- A table or list that Markdown did not recognise, and anything that a browser would load from another host, ends the
  build, too.
- At the addresses that pages once had (``moved.toml``) lie pages that lead to them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from other_pages import write_redirects
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "build" / "site-pages"
WRITTEN = ("reference/api-reference.md", "how-to/incident-notebook.md")
PROJECT = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
_FENCE = re.compile(r"^ *(```|~~~)")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_NAMED = re.compile(r"\[(?:docs/(?:[\w-]+/)*)?([\w-]+\.md)\]\(([^()\s#:]+)")
_ELSEWHERE = re.compile(r"^[a-z][a-z+.-]*:|^#")  # another address, or a place on the same page
# What a browser fetches by itself. A link that a person follows (<a href>) may lead anywhere.
_LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=[\"']?(?:https?:)?//"
    r"|<link\b(?![^>]*\brel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//"
    r"|url\(\s*[\"']?(?:https?:)?//|@import\s+[\"'](?:https?:)?//"
)
_UNREAD = re.compile(r"<p>[^<]*(?:\n|^)\s*(?:\||[-*] |\d+\. )|<p>\s*\|")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Have anchors made as GitHub makes them, and the search's worker run from file:// by our own means."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    # The offline plugin adds an address of its own unless one with this name is here.
    config.extra["polyfills"] = ["assets/iframe-worker.js"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that make docs writes, the project's, and whatever pages link to outside docs/."""
    for path in sorted(GENERATED.rglob("*.md")):
        files.append(File.generated(config, path.relative_to(GENERATED).as_posix(), abs_src_path=str(path)))
    if missing := [path for path in WRITTEN if files.get_file_from_path(path) is None]:
        raise PluginError(f"{GENERATED}/{missing[0]} is missing; make docs writes it")
    seen = {origin(file) for file in files.documentation_pages()} | set(PROJECT)
    waiting = sorted(seen)
    while waiting:
        path = waiting.pop()
        if place(path) not in files.src_uris:
            inclusion = InclusionLevel.INCLUDED if path in PROJECT else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path), inclusion=inclusion))
        if path.endswith(".md") and (ROOT / path).is_file():
            found = {target(path, link) for link in links((ROOT / path).read_text(encoding="utf-8"))}
            waiting += sorted(new for new in found - seen if not new.startswith("docs/"))
            seen |= found
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs calls it so
    """Point what leaves docs/ to where it is in the site."""
    path = origin(page.file)
    if (GENERATED / path.removeprefix("docs/")).is_file():
        return markdown
    lines = markdown.splitlines(keepends=True)
    for number, line in outside_code(lines):
        titled = _NAMED.sub(lambda found: f"[{_title(target(path, found[2]), found[1])}]({found[2]}", line)
        lines[number] = _LINK.sub(lambda found: f"]({_moved(path, found[1], page.file.src_uri)})", titled)
    return "".join(lines)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs calls it so
    """Refuse a page on which a table or a list stayed text."""
    bare = re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
    if unread := _UNREAD.search(bare):
        near = unread[0].strip()[-120:]
        raise PluginError(f"{page.file.src_uri}: a table or list stayed text; leave a line empty before it: {near!r}")
    return html


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that makes a browser load something from another host; write the redirects."""
    site = Path(config.site_dir)
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        if loaded := _LOADED.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.relative_to(site)} loads from elsewhere: {loaded[0]!r}; bring it along instead")
    write_redirects(site)


def outside_code(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line outside fenced code."""
    fence = ""
    for number, line in enumerate(lines):
        if mark := _FENCE.match(line):
            fence = "" if fence == mark[1] else fence or mark[1]
        elif not fence:
            yield number, line


def links(markdown: str) -> set[str]:
    """Return what ``markdown`` links to by a relative path, without anchors."""
    lines = markdown.splitlines()
    found = {link.partition("#")[0] for _, line in outside_code(lines) for link in _LINK.findall(line)}
    return {link for link in found if link and not _ELSEWHERE.match(link)}


def origin(file: File) -> str:
    """Return the path in the repository of a file of the site."""
    for folder in ("project/", "source/"):
        if file.src_uri.startswith(folder):
            path = file.src_uri.removeprefix(folder)
            return path if (ROOT / path).is_file() else f"{path.removesuffix('.md')}/README.md"
    return f"docs/{file.src_uri}"


def place(path: str) -> str:
    """Return the path in the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith("/README.md"):  # as README it would be its section's index, with no line of its own
        return f"project/{path.removesuffix('/README.md')}.md"
    return f"project/{path}" if path.endswith(".md") else f"source/{path}"


def target(path: str, link: str) -> str:
    """Return the path in the repository of what the file at ``path`` links to. PluginError where nothing is."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / found).is_dir():
        found = posixpath.join(found, "README.md")
    if found.startswith("..") or not (ROOT / found).is_file():
        raise PluginError(f"{path} links to {link}, where no file is")
    return found


@cache
def _title(path: str, otherwise: str) -> str:
    heading = re.search(r"^# ([^:\n]+)", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1].replace("`", "").strip() if heading else otherwise


def _moved(path: str, link: str, here: str) -> str:
    bare, mark, anchor = link.partition("#")
    if not bare or _ELSEWHERE.match(link):
        return link
    there = target(path, bare)
    if path.startswith("docs/") and there.startswith("docs/"):
        return link.replace(".ipynb", ".md")
    return posixpath.relpath(place(there), posixpath.dirname(here) or ".") + mark + anchor
