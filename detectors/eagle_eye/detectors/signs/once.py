"""Caches results that several detectors compute from one window. Pure: the results are the same as without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from eagle_eye.detectors.types import Blind, Window

P = ParamSpec("P")
R = TypeVar("R")


class _Kept(NamedTuple):
    """A result, or why there was none: never the exception, whose traceback would keep the window alive."""

    answer: Any
    blind: tuple[Any, ...] | None = None


def once(work: Callable[Concatenate[Window, P], R]) -> Callable[Concatenate[Window, P], R]:
    """Decorate a function of a window and hashable arguments so that it runs once per window.

    Later callers get the first result, or Blind with the same message; callers must not modify the result.
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
    """Decorate a function that depends only on the members so that it runs once while they stay the same.

    It may read ``nodes``, ``series``, ``role_of``, ``node_of`` and its hashable arguments only.
    """

    @wraps(work)
    def answer(window: Window, /, *args: P.args, **named: P.kwargs) -> R:
        key = (work, args, tuple(named.items())) if named else (work, args)
        kept = window.members_memo.get(key)
        if kept is None:
            kept = window.members_memo[key] = _Kept(work(window, *args, **named))
        return cast("R", kept.answer)

    return answer
