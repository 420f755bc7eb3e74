"""A trace's tables as data frames: ``eagle_eye.traces.read(folder)``; docs/reference/traces.md. Extra ``client``.

The names below are imported lazily, so that what is not installed is named when it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_eye.server.backtest.trace_format import BadTrace
    from eagle_eye.traces.trace_frames import Trace, read

__all__ = ["BadTrace", "Trace", "read"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from eagle_eye.traces import trace_frames
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "eagle_eye":
            raise ImportError(f"reading traces is not part of this installation (no module {error.name})") from None
        raise ImportError(f'traces need: pip install "eagle-eye[client]" (no module {error.name})') from None
    return getattr(trace_frames, name)
