"""Constraints on requests as JSON Schema, for /openapi.json. The endpoints check them with more detailed errors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from eagle_eye.schema.action import EVENT_TYPES
from eagle_eye.schema.names import NAME_CHARS_MAX
from eagle_eye.server.delivery.notifiers.guard import URL_CHARS_MAX
from eagle_eye.server.model.event_labels import LABELS

Constraint = Mapping[str, Any]

_YEAR = "(19(7[1-9]|[89][0-9])|20([0-8][0-9]|9[0-8]))"
_DAY = "(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31"
_LEAP_DAY = "(19(72|76|80|84|88|92|96)|20([02468][048]|[13579][26]))-02-29"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_SECONDS = r"[0-9]{1,9}(\.[0-9]{1,9})?|[1-3][0-9]{9}(\.[0-9]{1,9})?"
# RFC 3339 with an offset, or Unix seconds. Excludes the first and last year: an offset may move them out of range.
TIME: Constraint = MappingProxyType(
    {
        "maxLength": 64,
        "pattern": f"^(({_YEAR}-({_DAY})|{_LEAP_DAY})T{_CLOCK}|{_SECONDS})$",
    }
)
# No control characters, no white space except the space, nothing invisible.
_PRINTABLE = r"[^\x00-\x1f\x7f-\xa0\xad\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3000\ufeff]"
NAME: Constraint = MappingProxyType(
    {"minLength": 1, "maxLength": NAME_CHARS_MAX, "pattern": f"^{_PRINTABLE}{{1,{NAME_CHARS_MAX}}}$"}
)
NAME_OR_NONE: Constraint = MappingProxyType(
    {"maxLength": NAME_CHARS_MAX, "pattern": f"^{_PRINTABLE}{{0,{NAME_CHARS_MAX}}}$"}
)
WEBHOOK_URL: Constraint = MappingProxyType(
    {
        "format": "uri",
        "pattern": r"^https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?([/?#][^\s\\\x00-\x20\x7f]*)?$",
        "minLength": 8,
        "maxLength": URL_CHARS_MAX,
    }
)
_FOUR = "[A-Za-z0-9+/]{4}"
_PADDED = "([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)"
# The base64 of 24 to 64 bytes; "" has the server generate one.
SECRET: Constraint = MappingProxyType(
    {"pattern": f"^(whsec_(({_FOUR}){{8,21}}|({_FOUR}){{8,20}}{_PADDED}|({_FOUR}){{21}}[A-Za-z0-9+/]{{2}}==))?$"}
)
EVENT_TYPE: Constraint = MappingProxyType({"enum": [*EVENT_TYPES]})


def list_of(item: Constraint, most: int) -> dict[str, Any]:
    """Return the schema of a list of at most ``most`` items."""
    return {"maxItems": most, "items": dict(item)}


def matcher(chars_max: int) -> dict[str, Any]:
    """Return the schema of ``label=glob`` or ``label!=glob``."""
    value = r'("[^"]+"|[^\s"~][^\x00]*)'
    return {"maxLength": chars_max, "pattern": rf"^\s*({'|'.join(LABELS)})\s*!?=\s*{value}$"}
