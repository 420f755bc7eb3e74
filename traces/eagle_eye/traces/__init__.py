"""Traces as data frames: ``read(folder)``, and the verdicts of ``backtest(folder)``; docs/reference/traces.md.

Extra ``client``. The names below are imported lazily, so that what is not installed is named when it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_eye.server.backtest.trace import BadTrace
    from eagle_eye.traces.trace_frames import Trace, read
    from eagle_eye.traces.verdict_frames import backtest

__all__ = ["BadTrace", "Trace", "backtest", "read"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{'verdict_frames' if name == 'backtest' else 'trace_frames'}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "eagle_eye":
            raise ImportError(f"reading traces is not part of this installation (no module {error.name})") from None
        raise ImportError(f'traces need: pip install "eagle-eye[client]" (no module {error.name})') from None
    return getattr(module, name)
