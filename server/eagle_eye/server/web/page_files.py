"""The live page's files as served, and its content security policy. Reads the package's folder once."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

FOLDER = Path(__file__).parent / "page"
_TYPES: Mapping[str, bytes] = MappingProxyType(
    {
        ".html": b"text/html; charset=utf-8",
        ".js": b"text/javascript; charset=utf-8",
        ".mjs": b"text/javascript; charset=utf-8",
        ".css": b"text/css; charset=utf-8",
        ".svg": b"image/svg+xml",
    }
)
_IMPORT_MAP = re.compile(rb'<script type="importmap">(.*?)</script>', re.DOTALL)


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file; ``etag`` changes with its content."""

    content: bytes
    content_type: bytes
    etag: bytes


def read_page(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Return the files to serve, by path; "/" is index.html. Files of types that browsers do not need are left out."""
    found: dict[str, PageFile] = {}
    for file in sorted(folder.rglob("*")):
        content_type = _TYPES.get(file.suffix)
        if content_type is None or not file.is_file():
            continue
        content = file.read_bytes()
        name = file.relative_to(folder).as_posix()
        etag = b'"%s"' % hashlib.sha256(content).hexdigest()[:32].encode()
        found["/" if name == "index.html" else f"/{name}"] = PageFile(content, content_type, etag)
    return found


def content_security_policy(index: bytes) -> bytes:
    """Return the policy for a page that loads and runs only this server's files.

    Browsers support import maps only inline, so the one in ``index`` is allowed by its hash. Trusted types are required
    and no policy may create any, so that a script that assigns text as markup causes an error, not an element.
    """
    maps = [base64.b64encode(hashlib.sha256(found).digest()).decode() for found in _IMPORT_MAP.findall(index)]
    scripts = " ".join(["'self'", *(f"'sha256-{digest}'" for digest in maps)])
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script';"
        " trusted-types 'none'"
    ).encode()
