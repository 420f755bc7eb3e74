"""The modules of packaging/host, which is a folder of scripts and no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "packaging/host"
RELEASE_S = 1_767_225_600  # 2026-01-01


def module(name: str) -> Any:
    """Return one of the scripts as a module."""
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        return importlib.import_module(name)
