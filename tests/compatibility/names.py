"""Writes the names that users build on, for later versions to be held to.

``python -m tests.compatibility.names FILE`` writes what this version calls metrics, events, faults, the parts of a
webhook, its own figures on ``/metrics`` and the keys of its configuration.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec

from eagle_eye.agent.config import AgentConfiguration
from eagle_eye.cli.main import COMMANDS
from eagle_eye.detectors.faults import FAULTS
from eagle_eye.schema import action
from eagle_eye.schema.events import EVENTS
from eagle_eye.schema.metrics import METRICS
from eagle_eye.server.config import ServerConfig

DOCS = Path(__file__).parents[2] / "docs" / "reference"


def names() -> dict[str, dict[str, Any]]:
    """Return the names by what they are of, each with what must not change about it."""
    return {
        "metrics": {spec.name: [spec.unit, spec.kind.value, spec.scope.value] for spec in METRICS},
        "events": {spec.kind: list(spec.attributes) for spec in EVENTS},
        "faults": {fault.name: "" for fault in FAULTS},
        "actions": dict.fromkeys(get_args(action.ActionKind), ""),
        "reports": dict.fromkeys(get_args(action.ReportState), ""),
        "webhooks": dict.fromkeys(action.EVENT_TYPES, ""),
        "action_data": dict.fromkeys(action.ActionRequest.__struct_fields__, ""),
        "own_metrics": dict.fromkeys(own_metrics(), ""),
        "commands": {command.name: "" for command in COMMANDS},
        "endpoints": dict.fromkeys(endpoints(), ""),
        "server_keys": dict.fromkeys(keys(ServerConfig), ""),
        "agent_keys": dict.fromkeys(keys(AgentConfiguration), ""),
    }


def own_metrics() -> list[str]:
    """Return the server's figures on ``/metrics``; tests/server/test_docs.py holds that the document has just these."""
    text = (DOCS / "metrics.md").read_text(encoding="utf-8").partition("## Ingest")[2]
    return sorted(set(re.findall(r"`(eagle_eye_\w+)`", text)))


def endpoints() -> list[str]:
    """Return the HTTP API's methods and paths; tests/server/test_docs.py holds that the document has just these."""
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    return sorted(set(re.findall(r"`((?:GET|POST|PUT|PATCH|DELETE) /[^ `]*)`", text)))


def keys(shape: type[msgspec.Struct], prefix: str = "") -> list[str]:
    """Return the keys of a configuration, sections' with their names before a dot."""
    found: list[str] = []
    for field in msgspec.structs.fields(shape):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found.extend(keys(field.type, f"{prefix}{field.encode_name}."))
        else:
            found.append(prefix + field.encode_name)
    return sorted(found)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("file", type=Path)
    written = f"{json.dumps(names(), indent=1, sort_keys=True)}\n"
    arguments.parse_args().file.write_text(written, encoding="utf-8")
