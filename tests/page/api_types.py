"""What the page takes from Python: the API's answers as TypeScript types, and the labels that people read.

``python -m tests.page.api_types`` writes ``api.d.ts`` and ``app/labels.js`` in ``server/web/page``; a test holds them
against the server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle_eye.schema.labels import (
    AUTHOR_LABELS,
    CHART_ENDINGS,
    METRIC_ENDINGS,
    METRIC_LABELS,
    STATE_LABELS,
    THROTTLE_REASONS,
)
from eagle_eye.server.api import answers

_PAGE = Path(__file__).parents[2] / "server/eagle_eye/server/web/page"
FILE = _PAGE / "api.d.ts"
LABELS = _PAGE / "app/labels.js"
_HEAD = """// What the API answers. Made by `python -m tests.page.api_types` of the server's own types; do not edit.
// Times are RFC 3339. Nothing of this is served.
"""
_LABELS_HEAD = """// What people read for states, metrics and reasons of throttling.
// Made by `python -m tests.page.api_types` of schema/labels.py; do not edit.
"""


def declarations() -> str:
    """Return the file's text."""
    _, components = answers.schemas("#/{name}")
    return _HEAD + "".join(_interface(name, shape) for name, shape in sorted(components.items()))


def labels() -> str:
    """Return the text of the page's labels."""
    tables = {
        "STATE_LABELS": STATE_LABELS,
        "AUTHOR_LABELS": AUTHOR_LABELS,
        "METRIC_LABELS": METRIC_LABELS,
        "METRIC_ENDINGS": METRIC_ENDINGS,
        "CHART_ENDINGS": CHART_ENDINGS,
    }
    constants = [_constant(name, "Record<string, string>", dict(table)) for name, table in tables.items()]
    reasons = [[bit, reason] for bit, reason in THROTTLE_REASONS.items()]
    return _LABELS_HEAD + "".join(
        [*constants, _constant("THROTTLE_REASONS", "[bit: number, reason: string][]", reasons)]
    )


def _constant(name: str, type_: str, value: object) -> str:
    return f"\n/** @type {{{type_}}} */\nexport const {name} = {json.dumps(value, indent=2, ensure_ascii=False)};\n"


def _interface(name: str, shape: dict[str, Any]) -> str:
    if "properties" not in shape:
        return f"\nexport type {name} = {_type(shape)};\n"
    required = set(shape.get("required", ()))
    fields = (
        f"  {field}{'' if field in required else '?'}: {_type(of)};\n" for field, of in shape["properties"].items()
    )
    return f"\nexport interface {name} {{\n{''.join(fields)}}}\n"


def _type(shape: dict[str, Any]) -> str:
    match shape:
        case {"$ref": str(reference)}:
            return reference.rpartition("/")[2]
        case {"enum": list(values)}:
            return " | ".join(json.dumps(value) for value in values)
        case {"anyOf": list(choices)}:
            return " | ".join(dict.fromkeys(_type(choice) for choice in choices))
        case {"type": "array", "prefixItems": list(items)}:
            return f"[{', '.join(_type(item) for item in items)}]"
        case {"type": "array"}:
            return f"Array<{_type(shape.get('items', {}))}>"
        case {"type": "object", "additionalProperties": dict(value)}:
            return f"Record<string, {_type(value)}>"
        case {"type": "object"}:
            return "Record<string, any>"
        case {"type": "integer" | "number"}:
            return "number"
        case {"type": "string" | "boolean" | "null" as plain}:
            return str(plain)
    return "any"


if __name__ == "__main__":
    FILE.write_text(declarations(), encoding="utf-8")
    LABELS.write_text(labels(), encoding="utf-8")
