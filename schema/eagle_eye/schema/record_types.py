"""Makes record types safe to decode from several threads; called once a program has loaded its code."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

_one_at_a_time = threading.Lock()


def prepare_record_types() -> None:
    """Afterwards any number of threads may be the first to decode a record type of the modules loaded so far.

    Call it before the first thread starts, and again where record types are imported later.
    """
    # msgspec (0.22 is the newest that we know) examines a Struct's fields when the type is first decoded, by whatever
    # way: a Decoder, decode(type=) or convert. It hangs the result on the class before it is complete, and while it
    # runs Python for the annotations of a field's own type, a second thread reads the null pointers in it: SIGSEGV. To
    # make a Decoder here completes the type for all ways. When upgrading, see whether StructInfo_Convert in _core.c
    # still caches first and fills in later; tests/schema/test_record_types.py shows the crash.
    with _one_at_a_time:
        for kind in _below(msgspec.Struct):
            with contextlib.suppress(Exception):  # a user's type that cannot be completed can't be decoded either
                msgspec.msgpack.Decoder(kind)


def _below(kind: type[Any]) -> Iterator[type[Any]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _below(derived)
