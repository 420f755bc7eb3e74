"""What several detectors ask of one window is worked out once. Pure: the same answer as without."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from eagle_eye.detectors.types import Blind, Window

P = ParamSpec("P")
R = TypeVar("R")


class _Kept(NamedTuple):
    """An answer, or why there was none: never the exception, whose traceback would keep the window alive."""

    answer: Any
    blind: tuple[Any, ...] | None = None


def once(work: Callable[Concatenate[Window, P], R]) -> Callable[Concatenate[Window, P], R]:
    """Have a function of a window and hashable arguments called once for each window.

    Later callers get the first one's answer, or Blind with the same message: nobody may change what it returns.
    """

    @wraps(work)
    def answer(window: Window, /, *args: P.args, **named: P.kwargs) -> R:
        key = (work, args, tuple(named.items())) if named else (work, args)
        kept = window.memo.get(key)
        if kept is None:
            try:
                kept = _Kept(work(window, *args, **named))
            except Blind as reason:
                kept = _Kept(None, reason.args)
            window.memo[key] = kept
        if kept.blind is not None:
            raise Blind(*kept.blind)
        return cast("R", kept.answer)

    return answer


def once_for_members(work: Callable[Concatenate[Window, P], R]) -> Callable[Concatenate[Window, P], R]:
    """Have a function that looks at who the members are, and at nothing else, called once while they stay the same.

    It may read ``nodes``, ``series``, ``role_of``, ``node_of`` and its hashable arguments alone.
    """

    @wraps(work)
    def answer(window: Window, /, *args: P.args, **named: P.kwargs) -> R:
        key = (work, args, tuple(named.items())) if named else (work, args)
        kept = window.members_memo.get(key)
        if kept is None:
            kept = window.members_memo[key] = _Kept(work(window, *args, **named))
        return cast("R", kept.answer)

    return answer
