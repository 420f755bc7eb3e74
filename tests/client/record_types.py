"""The API's records as types for Python's checkers, made of what /openapi.json is made of: ``client/…/records.py``.

``python -m tests.client.record_types`` writes the file; a test holds it against the server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_eye.server.api import answers

FILE = Path(__file__).parents[2] / "client/eagle_eye/client/records.py"
RETURNED = ("Action", "Incident", "IncidentInFull", "Job", "Node")
_HEAD = '''\
"""What records hold, for type checkers; made by ``python -m tests.client.record_types`` of the server's own types.

They are plain dictionaries. Times are RFC 3339. A newer server may send more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired
'''


def declarations() -> str:
    """Return the file's text."""
    _, components = answers.schemas("#/{name}")
    wanted: set[str] = set()
    todo = [*RETURNED]
    while todo:
        name = todo.pop()
        if name not in wanted:
            wanted.add(name)
            todo += _named_in(components[name])
    return _HEAD + "".join(_class(name, components[name]) for name in sorted(wanted))


def _named_in(shape: Any) -> list[str]:
    if isinstance(shape, dict):
        own = [shape["$ref"].rpartition("/")[2]] if "$ref" in shape else []
        return own + [name for part in shape.values() for name in _named_in(part)]
    return [name for part in shape for name in _named_in(part)] if isinstance(shape, list) else []


def _class(name: str, shape: dict[str, Any]) -> str:
    required = set(shape.get("required", ()))
    fields = "".join(
        f"    {field}: {_type(of) if field in required else f'NotRequired[{_type(of)}]'}\n"
        for field, of in shape["properties"].items()
    )
    return f'\n\nclass {_called(name)}(TypedDict):\n    """``{name}`` of /openapi.json."""\n\n{fields}'


def _called(name: str) -> str:
    return f"{name}Dict"


def _type(shape: dict[str, Any]) -> str:
    match shape:
        case {"$ref": str(reference)}:
            return _called(reference.rpartition("/")[2])
        case {"enum": [str(), *_]}:
            return "str"  # values are added
        case {"anyOf": list(choices)}:
            return " | ".join(dict.fromkeys(_type(choice) for choice in choices))
        case {"type": "array"}:
            return f"list[{_type(shape.get('items', {}))}]"
        case {"type": "object", "additionalProperties": dict(value)}:
            return f"dict[str, {_type(value)}]"
        case {"type": "object"}:
            return "dict[str, Any]"
        case {"type": str(plain)}:
            return {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "None"}[plain]
    return "Any"


if __name__ == "__main__":
    FILE.write_text(declarations(), encoding="utf-8")
