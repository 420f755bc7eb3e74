"""Masks obvious secrets in text, command lines and environments before they leave the host."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MASK = "[redacted]"

# Words in a name that mark its value as secret; "tokenizer" and "tokens_per_step=4096" are training terms.
_TELLING = (
    r"(?:token(?!iz)|passw(?:or)?d|passphrase|secret|credential|signature|authorization|cookie|connection[_-]?string"
    r"|(?:api|access|account|private|session|signing|encryption|master|license|ssh)[_-]?key"
    r"|(?<![a-z])(?:jwt|pass|auth|dsn|sas)(?![a-z]))"
)
_NAME = rf"[\w-]{{0,64}}?{_TELLING}[\w-]{{0,64}}"
_VALUE = r"(\"[^\"]*\"|'[^']*'|[^\s\"',;&)}\]]+)"

_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]{0,16384}(?:-----END [A-Z ]{0,40}KEY-----)?")
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)[A-Za-z0-9._~+/=-]{4,}")
_NAMED = re.compile(rf"(?i)((?<![\w-]){_NAME}[\"']?\s{{0,8}}[=:]\s{{0,8}}){_VALUE}")
_OPTION = re.compile(rf"(?i)((?<![^\s\"'])--?{_NAME}[\"',]{{0,2}}\s{{1,8}})(?!-){_VALUE}")
_PARAMETER = re.compile(r"(?i)([?&](?:sig|key|code)=)[^\s&#\"']+")
_URL_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.-]{1,20}://)(?:[^\s/@:]{0,200}:[^\s/@]{1,200}|[^\s/@:]{16,200})@")
_SHAPES = re.compile(
    r"\b(?:A(?:KIA|SIA)[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}"
    r"|sk-[A-Za-z0-9_-]{20,}|nvapi-[\w-]{20,}|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|ee_[\w-]{40,}|whsec_[A-Za-z0-9+/=]{20,}"
    r"|eyJ[\w-]{8,4096}\.[\w-]{8,8192}\.[\w-]{0,1024})"
)
_TELLS = re.compile(_NAME, re.IGNORECASE)
_COUNT = re.compile(r"(?i)[\"']?\d[\d_.]{0,30}(?:e[+-]?\d{1,3})?[kmbt]?[\"']?")


def redact(text: str) -> str:
    """Return the text with apparent secrets masked.

    It recognizes ``name=value``, ``name: value`` and ``--name value`` where the name contains token, password, secret
    or key, bearer tokens, passwords in URLs and the common formats of access keys. A secret with neither a recognizable
    name nor format remains: this is best effort.
    """
    text = _PRIVATE_KEY.sub(MASK, text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _NAMED.sub(_masked, text)
    text = _OPTION.sub(_masked, text)
    text = _PARAMETER.sub(rf"\1{MASK}", text)
    text = _URL_USER.sub(rf"\1{MASK}@", text)
    return _SHAPES.sub(MASK, text)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line with secrets masked, also where name and value are separate arguments."""
    shown: list[str] = []
    named = ""
    for argument in arguments:
        if named and not argument.startswith("--") and not _is_count(named, argument):
            shown.append(MASK)
            named = ""
            continue
        shown.append(redact(argument))
        named = argument if argument.startswith("-") and "=" not in argument and _TELLS.fullmatch(argument) else ""
    return shown


def redact_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with secrets masked, by variable name and by the format of the value."""
    return {
        name: MASK if value and _TELLS.fullmatch(name) and not _is_count(name, value) else redact(value)
        for name, value in variables.items()
    }


def _masked(found: re.Match[str]) -> str:
    return found[0] if _is_count(found[1], found[2]) else found[1] + MASK


def _is_count(name: str, value: str) -> bool:
    """Whether a name with "token" is a count of a language model's tokens."""
    return "tokens" in name.lower() and _COUNT.fullmatch(value) is not None
