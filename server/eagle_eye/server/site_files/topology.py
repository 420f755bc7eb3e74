"""Reading what hangs on which switch from the site's file."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.engine.roster import Topology

FILE_BYTES_MAX = 64 << 20  # some hundred thousand ports
_ShapeT = TypeVar("_ShapeT", bound=msgspec.Struct)


class Places(msgspec.Struct, frozen=True):
    """Where people find a node, which no detector judges by; what is absent is not known."""

    rack_of_node: dict[str, str] = {}
    switch_of_node: dict[str, str] = {}


def read_topology(path: Path) -> Topology:
    """Return the topology. Raises ConfigurationError for a file that is missing, too large or malformed."""
    return _read(path, Topology)


def read_places(path: Path) -> Places:
    """Return what the same file says of places. Raises as ``read_topology``."""
    return _read(path, Places)


def _read(path: Path, shape: type[_ShapeT]) -> _ShapeT:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigurationError(f"topology_file: {path} is larger than {FILE_BYTES_MAX} bytes")
        return msgspec.json.decode(path.read_bytes(), type=shape)
    except OSError as error:
        raise ConfigurationError(f"topology_file: {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f'topology_file: {path}: {error}; expected {{"switch_of_node": {{"n1": "leaf1"}}, "switch_of_link": {{}},'
            ' "rack_of_node": {"n1": "r12"}}'
        ) from None
