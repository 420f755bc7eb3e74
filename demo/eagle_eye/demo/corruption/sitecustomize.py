"""Silent data corruption, loaded into every Python process under the launcher, unknown to the rest of the demo.

While a file named after this process's node exists in ``EAGLE_EYE_DEMO_CORRUPTION``, every gradient that the loss sends
backwards is NaN. The loss itself stays correct and nothing is raised, as with a GPU that computes wrong numbers.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_TARGET = "torch.nn.functional"


class _Patch(importlib.abc.MetaPathFinder):
    """Lets the target be imported as usual, then replaces one of its functions."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol's
        target: ModuleType | None = None,  # noqa: ARG002 - the protocol's
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the target's own spec with a loader that patches it afterwards; None for other modules."""
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                _corrupt(module)

            spec.loader.exec_module = execute_and_patch  # type: ignore[method-assign]  # of this one import
        return spec


def _corrupt(functional: Any) -> None:
    folder = os.environ["EAGLE_EYE_DEMO_CORRUPTION"]
    right = functional.cross_entropy

    def wrong(*args: Any, **kwargs: Any) -> Any:
        loss = right(*args, **kwargs)
        # The node's name is set by the launcher after this interpreter has started, so it is read now.
        flag = os.path.join(folder, os.environ.get("EAGLE_EYE_NODE", ""))  # noqa: PTH118 - hot path
        if loss.requires_grad and os.path.isfile(flag):  # noqa: PTH113 - hot path
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    functional.cross_entropy = wrong


if "EAGLE_EYE_DEMO_CORRUPTION" in os.environ:
    sys.meta_path.insert(0, _Patch())
