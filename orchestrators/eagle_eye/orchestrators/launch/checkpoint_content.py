"""Verifies a checkpoint against its own table of contents. Reads files; executes nothing named in them.

torch.distributed.checkpoint writes ``.metadata``, a pickle with each tensor's file, offset and length. It is unpickled
without its classes, so that a forged one cannot execute anything.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

METADATA_BYTES_MAX = 512 << 20


def flaw(folder: Path) -> str:
    """Return what is wrong with the checkpoint, "" where nothing is, or its table is in an unknown format.

    Each file in the table must exist, be readable, and have the length in the table.
    """
    try:
        lengths = _lengths(folder / ".metadata")
    except OSError as error:
        return f".metadata: {error.strerror}"
    except _UnknownTableError:
        return ""
    except Exception as error:  # noqa: BLE001 - whatever a pickle's bytes lead to
        return f".metadata cannot be read: {type(error).__name__}"
    for name, length in sorted(lengths.items()):
        path = folder / name
        try:
            with path.open("rb") as file:
                file.read(1)
            size = path.stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size < length:
            return f"{name} has {size} bytes, its table of contents names {length}"
    return ""


class _UnknownTableError(Exception):
    """The file lists no files and lengths, or is too long."""


def _lengths(path: Path) -> dict[str, int]:
    if path.stat().st_size > METADATA_BYTES_MAX:
        raise _UnknownTableError
    with path.open("rb") as file:
        table = _Reader(file).load()
    lengths: dict[str, int] = {}
    for name, end in _places(table):
        lengths[name] = max(end, lengths.get(name, 0))
    if not lengths:
        raise _UnknownTableError
    return lengths


def _places(table: object) -> Iterator[tuple[str, int]]:
    """Yield each item's file, relative to the checkpoint, and its end offset."""
    stored = getattr(table, "storage_data", None)
    if not isinstance(stored, dict):
        raise _UnknownTableError
    for place in stored.values():
        name, offset, length = (getattr(place, key, None) for key in ("relative_path", "offset", "length"))
        if not (isinstance(name, str) and isinstance(offset, int) and isinstance(length, int)):
            continue
        # A path that leads out of the checkpoint is ignored.
        if not Path(name).is_absolute() and ".." not in Path(name).parts:
            yield name, offset + length


class _Reader(pickle.Unpickler):
    """An unpickler that replaces every class with a plain container."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ARG002 - the base's names
        return _Container


class _Container:
    """Accepts any arguments and attributes of a pickle."""

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Take pickled attributes: a mapping, a pair with one for slots, or a class-specific state."""
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)

    def append(self, _: object) -> None:
        """Take an item of a list."""

    def extend(self, _: object) -> None:
        """Take items of a list."""

    def __setitem__(self, _: object, __: object) -> None:
        """Take an item of a mapping."""
