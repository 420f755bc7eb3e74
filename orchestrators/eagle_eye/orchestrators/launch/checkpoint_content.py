"""Whether a checkpoint holds what its own table of contents says. Reads files; runs nothing that they name.

torch.distributed.checkpoint writes ``.metadata``, a pickle that says for each tensor in which file it lies, from
where, how long. It is read here without any class of its own, so that a forged one can run nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

METADATA_BYTES_MAX = 512 << 20


def flaw(folder: Path) -> str:
    """Return what is wrong with the checkpoint, "" where nothing is found, or where its table is none we understand.

    Each file that the table names must be there, readable, and as long as the table says.
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
    """The file says nothing of files and lengths, or is too long."""


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
    """Yield the file in which something lies, relative to the checkpoint, and the byte up to which it does."""
    stored = getattr(table, "storage_data", None)
    if not isinstance(stored, dict):
        raise _UnknownTableError
    for place in stored.values():
        name, offset, length = (getattr(place, key, None) for key in ("relative_path", "offset", "length"))
        if not (isinstance(name, str) and isinstance(offset, int) and isinstance(length, int)):
            continue
        # A path that leads out of the checkpoint is no business of ours.
        if not Path(name).is_absolute() and ".." not in Path(name).parts:
            yield name, offset + length


class _Reader(pickle.Unpickler):
    """An unpickler for which every class is a mere container."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ARG002 - the base's names
        return _Container


class _Container:
    """Takes whatever arguments and attributes a pickle gives it."""

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Attributes as a pickle has them: a mapping, a pair with one for slots, or something of its class's own."""
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)

    def append(self, _: object) -> None:
        """Items of what was a list."""

    def extend(self, _: object) -> None:
        """Items of what was a list."""

    def __setitem__(self, _: object, __: object) -> None:
        """Items of what was a mapping."""
