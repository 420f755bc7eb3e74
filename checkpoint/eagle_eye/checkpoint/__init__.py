"""Checkpoints in memory: captured at each step, kept on the node and at its neighbours, persisted behind.

The names below are loaded when they are asked for: what plans or watches needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_eye.checkpoint.checkpointer import AnotherModel, MemoryCheckpointer, NoCheckpoint, NotTheSame
    from eagle_eye.checkpoint.state import RandomState

__all__ = ["AnotherModel", "MemoryCheckpointer", "NoCheckpoint", "NotTheSame", "RandomState"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from eagle_eye.checkpoint import checkpointer, state

    return getattr(state if name == "RandomState" else checkpointer, name)
