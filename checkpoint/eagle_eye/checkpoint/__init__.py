"""In-memory checkpoints: captured at each step, kept on the node and its peers, persisted in the background.

The names below are imported lazily: planning and monitoring need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle_eye.schema.record_types import prepare_record_types

if TYPE_CHECKING:
    from eagle_eye.checkpoint.checkpointer import AnotherModel, MemoryCheckpointer, NoCheckpoint, NotTheSame
    from eagle_eye.checkpoint.restart_point import run_restartable
    from eagle_eye.checkpoint.state import RandomState

__all__ = ["AnotherModel", "MemoryCheckpointer", "NoCheckpoint", "NotTheSame", "RandomState", "run_restartable"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eagle_eye.checkpoint import checkpointer, restart_point, state

    prepare_record_types()
    elsewhere: dict[str, Any] = {"RandomState": state, "run_restartable": restart_point}
    return getattr(elsewhere.get(name, checkpointer), name)
