"""Reading what hangs on which switch from the site's file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.engine.topology import Topology

FILE_BYTES_MAX = 64 << 20  # some hundred thousand ports


def read_topology(path: Path) -> Topology:
    """Return the topology. Raises ConfigurationError for a file that is missing, too large or malformed."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigurationError(f"topology_file: {path} is larger than {FILE_BYTES_MAX} bytes")
        return msgspec.json.decode(path.read_bytes(), type=Topology)
    except OSError as error:
        raise ConfigurationError(f"topology_file: {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f'topology_file: {path}: {error}; expected {{"switch_of_node": {{"n1": "leaf1"}}, "switch_of_link": {{}}}}'
        ) from None
