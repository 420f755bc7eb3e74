"""Under which licence each library may be used: what its metadata says, read with licences.toml."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import Any, NamedTuple, cast

import license_expression
import tomllib

from release.errors import ReleaseError

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
