"""The manifest, and which right a request to Kubernetes' API takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

MANIFEST = Path(__file__).parents[3] / "packaging" / "kubernetes" / "orchestrator.yaml"
_PATH = re.compile(
    r"/api/v1(?:/namespaces/[^/]+)?/(?P<kind>nodes|pods|configmaps)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?\Z"
)


def manifest() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))


def granted() -> set[tuple[str, str]]:
    """(verb, resource) of all roles in the manifest."""
    return {
        (verb, resource)
        for document in manifest()
        if document["kind"] == "ClusterRole"
        for rule in document["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def needed(method: str, path: str) -> tuple[str, str] | None:
    """The right that the request takes, as the API server sees it; None where everybody may."""
    plain, _, query = path.partition("?")
    if plain in ("/api/v1/", "/api/v1"):
        return None
    found = _PATH.match(plain)
    assert found, path
    resource = found["kind"] + (f"/{found['sub']}" if found["sub"] else "")
    if method == "GET":
        verb = "get" if found["name"] else ("watch" if "watch=" in query else "list")
    else:
        verb = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}[method]
    return verb, resource
