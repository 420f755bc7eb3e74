"""The API reference as Markdown, made of the running app's own OpenAPI document: every endpoint, every field.

``.venv/bin/python packaging/site/api_reference.py > FILE`` in the project's environment; ``make docs`` does it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from eagle_eye.server.app import create_app
from eagle_eye.server.config import ServerConfig

HEAD = """# API reference

Every endpoint with all its fields, made of the OpenAPI document that a server of this version answers at
`/openapi.json`. What holds for all of them, and what they are for, is in [The server's HTTP interface](api.md). Errors
are problem details ([Problem](#problem)) with the status codes listed; what needs no token says so.
"""
ERRORS_FROM = 400
_REFERENCE = "#/components/schemas/"


def document() -> dict[str, Any]:
    """Return the OpenAPI document of a server with the default configuration."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = create_app(ServerConfig(data_dir=folder)).api.openapi()
    return found


def reference(reported: Mapping[str, Any]) -> str:
    """Return ``reported``, an OpenAPI document, as one Markdown page: endpoints by tag, then what they answer."""
    tags: dict[str, list[str]] = {}
    for path, methods in reported["paths"].items():
        for method, operation in methods.items():
            tags.setdefault(operation.get("tags", ["other"])[0], []).extend(_operation(path, method, operation))
    parts = [HEAD]
    for tag in sorted(tags):
        parts += [f"## {tag.capitalize()}", *tags[tag]]
    parts.append("## Types")
    for name, schema in sorted(reported["components"]["schemas"].items()):
        parts += [f"### {name} {{ #{name.lower()} }}", schema.get("description", ""), "\n".join(_fields(schema))]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {method.upper()} `{path}` {{ #{operation['operationId'].lower()} }}"
    yield operation.get("description", operation["summary"]).replace("``", "`")
    if not operation.get("security"):
        yield "Open to everybody."
    if parameters := [each for each in operation.get("parameters", ()) if each["in"] != "path"]:
        rows = [
            f"| `{each['name']}` | {each['in']} | {_type(each['schema'])}{_bounds(each['schema'])} "
            f"| {'yes' if each.get('required') else _default(each['schema'])} | {_line(each.get('description', ''))} |"
            for each in parameters
        ]
        yield "\n".join(["| parameter | in | type | needed | |", "|---|---|---|---|---|", *rows])
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        schema = body.get("schema", {})
        yield f"Body, `{kind}`: {_type(schema)}"
        if schema.get("properties"):
            yield "\n".join(_fields(schema))
    answers = sorted(operation["responses"].items())
    reported = [f"{status} {_contents(answer)}".strip() for status, answer in answers if int(status) < ERRORS_FROM]
    errors = ", ".join(status for status, _ in answers if int(status) >= ERRORS_FROM)
    yield f"Answers {'; '.join(reported)}. Errors: {errors or 'none of its own'}."


def _contents(answer: Mapping[str, Any]) -> str:
    return "; ".join(
        _type(content["schema"]) if kind.endswith("json") and content.get("schema") else f"`{kind}`"
        for kind, content in answer.get("content", {}).items()
    )


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    if not schema.get("properties"):
        yield _type(schema)
        return
    required = set(schema.get("required", ()))
    yield "| field | type | always there | |"
    yield "|---|---|---|---|"
    for name, field in schema["properties"].items():
        always = "yes" if name in required else _default(field)
        yield f"| `{name}` | {_type(field)}{_bounds(field)} | {always} | {_line(field.get('description', ''))} |"


def _type(schema: Mapping[str, Any]) -> str:
    if reference := schema.get("$ref", ""):
        name = reference.removeprefix(_REFERENCE)
        return f"[{name}](#{name.lower()})"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(_type(choice) for choice in choices)
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if kind == "array":
        if items := schema.get("prefixItems"):
            return "[" + ", ".join(_type(item) for item in items) + "]"
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object, name to {_type(schema['additionalProperties'])}"
    return f"{kind} ({schema['format']})" if "format" in schema else str(kind)


def _bounds(schema: Mapping[str, Any]) -> str:
    words = {
        "minimum": "at least",
        "maximum": "at most",
        "minLength": "length at least",
        "maxLength": "length at most",
        "minItems": "items at least",
        "maxItems": "items at most",
    }
    found = [
        f"{words[key]} {value}"
        for each in (schema, *schema.get("anyOf", ()))
        for key, value in each.items()
        if key in words
    ]
    return f", {', '.join(found)}" if found else ""


def _default(schema: Mapping[str, Any]) -> str:
    return f"no: `{schema['default']!r}`" if schema.get("default") not in (None, "") else "no"


def _line(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


if __name__ == "__main__":
    sys.stdout.write(reference(document()))
