"""nvidia-resiliency-ext's own state dict for tensors of CPUs: its ``BasicTensorAwareStateDict`` refuses them."""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (  # type: ignore[import-not-found]
    BasicTensorAwareStateDict,
)


class OnCpu(BasicTensorAwareStateDict):  # type: ignore[misc]  # only where it is installed has it a type
    """One whose tensors are where they are to be."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = state
        self._is_hollow = False
