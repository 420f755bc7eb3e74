"""Builds the types of the API's answers: from records as ``views.plain`` shows them, or from fields."""

from __future__ import annotations

from datetime import datetime
from types import GenericAlias
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

Time = Annotated[datetime, Meta(tz=True)]
Number = float | str  # JSON has no infinity: it is "+Inf" or "-Inf"
Named = dict[str, Any]


def shown(record: type[Struct], name: str = "", without: tuple[str, ...] = (), **more: Any) -> type[Struct]:
    """Return the type of ``views.plain`` of a record, without some fields and with others; all are required."""
    fields: dict[str, Any] = {}
    for field, hint in get_type_hints(record, include_extras=True).items():
        if field in without:
            continue
        if field.endswith("_s"):
            fields[field.removesuffix("_s")] = Time | None if type(None) in get_args(hint) else Time
        else:
            fields[field] = hint
    return made(name or record.__name__, **{**fields, **more})


def made(name: str, /, **fields: Any) -> type[Struct]:
    """Return the type of an object with exactly these fields, all required but those that may be UNSET."""
    given = [(field, hint, UNSET) if UnsetType in get_args(hint) else (field, hint) for field, hint in fields.items()]
    return msgspec.defstruct(name, given, forbid_unknown_fields=True, kw_only=True)


def many(item: Any) -> Any:
    """Return the type of a list."""
    return GenericAlias(list, (item,))


def page(item: type[Struct]) -> type[Struct]:
    """Return the type of a list's page; ``next`` is the cursor of the following one, null for none."""
    return made(f"{item.__name__}Page", items=many(item), next=str | None)
