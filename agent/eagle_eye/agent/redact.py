"""Takes obvious secrets out of free text before it leaves the host."""

from __future__ import annotations

import re

MASK = "[redacted]"

_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{4,}")
_NAMED = re.compile(
    r"(?i)((?<![\w-])[\w-]{0,64}(?:token|passw(?:or)?d|passphrase|secret|credential|(?:api|access)[_-]?key|authorization)"
    r"[\w-]{0,64}[\"']?\s{0,8}[=:]\s{0,8})(\"[^\"]*\"|'[^']*'|[^\s\"',;&)}\]]+)"
)
_URL_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)[^\s/@:]{0,200}:[^\s/@]{1,200}@")
_SHAPES = re.compile(r"\b(?:AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,})\b")


def redact(text: str) -> str:
    """Return the text with what looks like a secret replaced by a mask.

    It knows ``name=value`` and ``name: value`` where the name speaks of a token, password, secret or
    key, bearer tokens, passwords in URLs and the common shapes of access keys. A secret with neither a
    telling name nor a telling shape stays: this is a net, not a wall.
    """
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _NAMED.sub(rf"\1{MASK}", text)
    text = _URL_USER.sub(rf"\1{MASK}@", text)
    return _SHAPES.sub(MASK, text)
